"""Who listens to control, who stands in between, and who has no secret (docs/security.md)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess, switch_here
from fanin import _fanin, errors
from fanin._connections import Followers, Leader
from fanin._membership import Connected, Ranks
from fanin._services import is_own, place
from fanin._settings import Settings
from ranks import DEADLINE, Failure, Me
from torch._C._distributed_c10d import HashStore

ALONE = ""  # for `launch`: no switch is named
SECRET = "nobody else has this secret"


class Tap:
    """Passes TCP on to a switch, and keeps what it hears."""

    def __init__(self, switch: str) -> None:
        self._switch = switch
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        host, _, port = self._switch.rpartition(":")
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            theirs = socket.create_connection((host, int(port)))
            for one, other in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while words := one.recv(1 << 16):
                self.heard += words
                other.sendall(words)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def tap(switch: str) -> Iterator[Tap]:
    tapped = Tap(switch)
    yield tapped
    tapped.close()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    return file


def test_who_listens_does_not_hear_what_a_rank_and_a_switch_say(tap: Tap) -> None:
    # Alone it sends no gradients, which would not pass here.
    with fanin.connect(tap.address, job="a-name-to-be-overheard", rank=0, world_size=1):
        pass
    assert len(tap.heard) > 1000
    assert b"overheard" not in tap.heard
    assert b"HTTP/2" not in tap.heard
    assert b"fanin.v1" not in tap.heard


def by_secret(me: Me, machine: str, secret_file: str | None) -> float:
    os.environ["FANIN_MACHINE"] = machine.split()[me.rank]
    if secret_file is not None:
        os.environ["FANIN_SECRET_FILE"] = secret_file.split()[me.rank]
    me.init()
    tensor = torch.full((1000,), me.rank + 1.0)
    dist.all_reduce(tensor)
    return float(tensor.sum())


@pytest.mark.parametrize("machines", ["a b", "a a b b"])
def test_ranks_that_have_a_secret_sum_by_their_own_services(
    launch: Launch, secret_file: Path, machines: str
) -> None:
    world_size = len(machines.split())
    ranks = launch(by_secret, world_size, machines, f"{secret_file} " * world_size, at=ALONE)
    total = 1000.0 * sum(range(1, world_size + 1))
    assert ranks.results() == [total] * world_size


def test_a_rank_with_another_secret_takes_no_part(
    launch: Launch, secret_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("somebody else has this secret")
    ranks = launch(by_secret, 2, "a b", f"{secret_file} {other}", at=ALONE)
    failures = [ranks.outcome(rank) for rank in range(2)]
    assert all(isinstance(failure, Failure) for failure in failures), failures
    assert any("another secret" in failure.message for failure in failures), failures


def test_a_switch_that_knows_a_secret_serves_nobody_without_it(secret_file: Path) -> None:
    with switch_here(secret_file=str(secret_file)) as switch:
        with pytest.raises(
            errors.Untrusted, match=r"asks for a secret.*FANIN_SECRET_FILE"
        ) as refused:
            fanin.connect(switch.address, job="stranger", rank=0, world_size=1)
        assert refused.value.switch == switch.address
        file = str(secret_file)
        with fanin.connect(
            switch.address, job="known", rank=0, world_size=1, secret_file=file
        ) as group:
            assert (group.all_reduce(np.ones(10, np.float32)) == 1).all()


def test_a_service_whose_key_is_not_the_one_that_was_told_is_refused(switch: str) -> None:
    trust = _fanin.Trust()
    trust.insist(switch, "00" * 32)
    with pytest.raises(errors.Untrusted, match="somebody may stand in between"):
        _fanin.Client([(switch, 1.0, None, None)], "told", 0, 1, timeout=DEADLINE, trust=trust)
    seen = _fanin.Trust()
    _fanin.Client([(switch, 1.0, None, None)], "told", 0, 1, timeout=DEADLINE, trust=seen).close()
    assert len(seen.fingerprint(switch) or "") == 64


class Closed:
    """A membership that is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("same", [True, False])
def test_ranks_to_whom_a_switch_shows_different_keys_all_refuse_it(same: bool) -> None:
    settings = Settings(switch="127.0.0.1:1,box:4800")
    trust = _fanin.Trust()
    own, other = "01" * 32, "02" * 32
    trust.insist("box:4800", own)
    # As each machine means its own.
    trust.insist("127.0.0.1:1", own)

    def gather(name: str, text: str, *_: float) -> list[str]:
        assert name == "keys"
        assert json.loads(text) == {"box:4800": own}
        return [text, json.dumps({"box:4800": own if same else other})]

    ranks = Ranks("job", "job", "group 'x'", 0, 2, "10.0.0.1", "", gather, trust)
    here = place(replace(settings, plan="switch"), "10.0.0.1")
    client: Any = Closed()
    if same:
        ranks._compare_keys([here, here], here, Connected(client), gather)
    else:
        with pytest.raises(errors.Untrusted, match=f"{own} to rank 0 and {other} to rank 1"):
            ranks._compare_keys([here, here], here, Connected(client), gather)
    assert client.closed is not same


def test_a_name_by_which_each_machine_means_itself_is_compared_with_no_other() -> None:
    assert is_own("127.0.0.1:4800")
    assert is_own("[::1]:4800")
    assert is_own("localhost:4800")
    assert not is_own("10.0.0.1:4800")
    assert not is_own("box:4800")
    assert not is_own("[fd00::1]:4800")


def sums_on(me: Me) -> None:
    group = fanin.connect(job="comes-back", rank=me.rank, world_size=2, timeout=5.0)
    group.all_reduce(np.ones(10, np.float32))
    me.say("running")
    me.hear()
    while True:
        group.all_reduce(np.ones(10, np.float32))


def test_a_switch_that_comes_back_with_another_key_is_another_one(
    launch: Launch, tmp_path: Path
) -> None:
    switch = SwitchProcess("--tls-key", str(tmp_path / "first"))
    with switch:
        ranks = launch(sums_on, 2, at=switch.address)
        assert [ranks.hear(rank) for rank in range(2)] == ["running"] * 2
        switch.kill()
        switch.options = ("--tls-key", str(tmp_path / "second"))
        switch.start()
        for rank in range(2):
            ranks.tell(rank, "restarted")
        for rank in range(2):
            failure = ranks.outcome(rank)
            assert isinstance(failure, Failure)
            assert "somebody may stand in between" in failure.message, failure.message
            assert failure.kind in ("SwitchLost", "Untrusted")


def test_who_reads_the_store_speaks_for_no_rank() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(Followers, store, 2, lambda: "127.0.0.1")
        # As rank 1 does, before it connects.
        store.set("words/1", _fanin.Exchange().public)
        family, address, port, *said = json.loads(store.get("words"))
        for key in (*map(bytes.fromhex, said), store.get("words/1"), b""):
            with socket.socket(family) as connected:
                connected.connect((address, port))
                connection = Connection(connected.detach())
            with connection:
                connection.send_bytes((1).to_bytes(4))
                with pytest.raises((AuthenticationError, EOFError, OSError)):
                    answer_challenge(connection, key)
        leader = pool.submit(Leader, store, 1).result(DEADLINE)
        followers = leading.result(DEADLINE)
    leader.say("a word")
    assert next(followers.hear(DEADLINE)) == "a word"
    leader.close()
    followers.close()


def fanin_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fanin", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def test_the_commands_know_the_secret_by_a_flag_and_by_the_environment(secret_file: Path) -> None:
    with SwitchProcess("--secret-file", str(secret_file)) as switch:
        at = ("--switch", switch.address)
        for command in ("status", "doctor"):
            refused = fanin_command(command, *at)
            assert refused.returncode == 1
            assert "FANIN_SECRET_FILE" in refused.stdout + refused.stderr
            for flags, environment in (
                (["--secret-file", str(secret_file)], {}),
                ([], {"FANIN_SECRET_FILE": str(secret_file)}),
            ):
                told = fanin_command(command, *at, *flags, **environment)
                assert told.returncode == 0, told.stdout + told.stderr


def test_a_launcher_s_own_switch_has_the_secret_of_its_ranks(
    secret_file: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('fanin')\n"
        "tensor = torch.ones(10)\n"
        "dist.all_reduce(tensor)\n"
        "print(f'summed {tensor[0].item()}\\n', end='')\n"
        "dist.destroy_process_group()\n"
    )
    ran = fanin_command(
        "run", "--nproc-per-node", "2", "--secret-file", str(secret_file), str(program)
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("summed 2.0") == 2
