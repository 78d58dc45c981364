"""Packets that are authenticated or encrypted, as a program asks for it (docs/security.md)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin.torch import Options
from ranks import DEADLINE, Failure, Me
from test_faults import Sum, both_ways, exact_across_a_restart, exact_loop

ETH_P_ALL = 3
RANDOM = torch.Generator()
RANDOM.seed()
Security = Literal["tag", "authenticate", "encrypt"]


class Listener:
    """Looks for some elements in what passes on the loopback interface.

    They are drawn at random: tests that run beside this one send others.
    """

    def __init__(self) -> None:
        self.elements: list[float] = torch.randn(4, generator=RANDOM).tolist()
        self._bytes = torch.tensor(self.elements).numpy().tobytes()
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.socket.bind(("lo", 0))
        self.socket.settimeout(0.2)
        self._heard = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                self._heard |= self._bytes in self.socket.recv(1 << 16)

    def stop(self) -> bool:
        """Return whether gradients were readable."""
        self._stopped.set()
        self._thread.join()
        self.socket.close()
        return self._heard


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Listen, where that is allowed."""
    try:
        listener = Listener()
    except PermissionError:
        pytest.skip("only root may listen")
    yield listener
    listener.stop()


def summed(me: Me, security: Security, by: str, elements: list[float]) -> None:
    settings: dict[str, Any] = {"machine": f"machine {me.rank}"}
    if by == "environment":
        os.environ["FANIN_SECURITY"] = security
    else:
        settings["security"] = security
    me.init(pg_options=Options(**settings))
    tensor = torch.tensor(elements * 10_000)
    for _ in range(3):
        sums = tensor.clone()
        dist.all_reduce(sums)
        assert torch.equal(sums, 2 * tensor)
    halves = torch.zeros(20_000)
    dist.reduce_scatter_tensor(halves, tensor.clone())
    assert torch.equal(halves, 2 * tensor[:20_000])
    me.say("summed")
    me.hear()


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize("security", ["tag", "authenticate", "encrypt"])
def test_a_listener_reads_gradients_unless_they_are_encrypted(
    launch: Launch, switch: str, listener: Listener, security: str, by: str
) -> None:
    ranks = launch(summed, 2, security, by, listener.elements)
    for rank in range(2):
        assert ranks.hear(rank) == "summed"
    assert listener.stop() == (security != "encrypt")
    command = [sys.executable, "-m", "fanin", "status", "--switch", switch, "--json"]
    status = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    jobs = json.loads(status.stdout)["jobs"]
    assert [job["security"] for job in jobs if job["state"] == "running"] == [security]
    for rank in range(2):
        ranks.tell(rank, "go")
    ranks.results()


def encrypted(me: Me, way: Callable[[Me, float], Sum]) -> int:
    os.environ["FANIN_SECURITY"] = "encrypt"
    return exact_loop(me, way)


# The switch comes back without its memory, and the job goes on there under another key.
@both_ways
def test_encrypted_sums_are_exact_across_a_restart_of_the_switch(
    launch: Launch, switch_process: SwitchProcess, way: Callable[[Me, float], Sum]
) -> None:
    ranks = launch(encrypted, 2, way, at=switch_process.address)
    exact_across_a_restart(ranks, switch_process)


def differs(me: Me, machines: str) -> None:
    security: Security = "encrypt" if me.rank % 2 else "tag"
    me.init(pg_options=Options(security=security, machine=machines[me.rank]))


# With two ranks a machine, those that sum with each other over machines agree.
@pytest.mark.parametrize("machines", ["aa", "ab", "aabb"])
def test_ranks_that_disagree_all_hear_it(launch: Launch, machines: str) -> None:
    ranks = launch(differs, len(machines), machines)
    for rank in range(len(machines)):
        outcome = ranks.outcome(rank)
        assert isinstance(outcome, Failure)
        assert outcome.kind == "SettingMismatch", outcome.text
        assert "FANIN_SECURITY" in outcome.message
        told = re.search(r"rank (\d) and rank (\d) differ in .*: (\w+) and (\w+);", outcome.message)
        assert told, outcome.message
        wanted = ["encrypt" if int(rank) % 2 else "tag" for rank in told.group(1, 2)]
        assert list(told.group(3, 4)) == wanted, outcome.message
        assert set(wanted) == {"tag", "encrypt"}
