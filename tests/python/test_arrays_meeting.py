"""Where ranks of arrays meet: at an address, in a store, where their launcher says."""

from __future__ import annotations

import sys
import time
from multiprocessing import Manager
from typing import Any

import fanin
import numpy as np
import pytest
from array_ranks import ALONE, joined
from conftest import Launch, free_address
from fanin import errors
from programs import Program, Start
from ranks import Me
from torch._C._distributed_c10d import TCPStore


def in_a_store(me: Me, store: Any) -> list[int]:
    if isinstance(store, int):
        store = TCPStore("127.0.0.1", store, is_master=False)
    found = []
    for _ in range(2):  # what the first job left in the store does no harm
        with fanin.connect(rank=me.rank, world_size=2, rendezvous=store, timeout=30) as group:
            found += group.all_reduce(np.array([me.rank + 1]), "product").tolist()
    return found


def test_ranks_meet_in_a_store(launch: Launch) -> None:
    torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Manager() as manager:
        for store in (manager.dict(), torchs.port):
            assert launch(in_a_store, 2, store, at=ALONE).results() == [[2, 2]] * 2


def fails_in_a_store(me: Me, store: Any) -> str:
    said: Any = {"machine": f"m{me.rank}", "secret_file": "/none" if me.rank else None}
    try:
        fanin.connect(rank=me.rank, world_size=2, rendezvous=store, timeout=60, **said)
    except errors.FaninError as error:
        return str(error)
    return "joined"


def test_all_hear_why_one_cannot_join(launch: Launch) -> None:
    began = time.monotonic()
    with Manager() as manager:
        store = manager.dict()
        first, second = launch(fails_in_a_store, 2, store, at=ALONE).results()
    assert "/none" in second
    assert first.startswith("rank 1: ")
    assert "/none" in first
    assert time.monotonic() - began < 30


LAUNCHED = r"""
import os
import numpy as np
import fanin

with fanin.connect(timeout=30) as group:
    ranks = group.all_gather(group.rank)
    # In one piece: two ranks may write to one pipe.
    os.write(1, f"it is {group.rank} of {group.world_size} {ranks}\n".encode())
with fanin.connect(timeout=30) as again:
    assert again.all_reduce(np.ones(1), "max")[0] == 1
"""


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ],
)
def test_a_launcher_says_who_a_rank_is_and_where_ranks_meet(
    start: Start, rank: str, size: str
) -> None:
    host, port = free_address().split(":")
    blank = dict.fromkeys(("RANK", "WORLD_SIZE", "FANIN_SWITCH"), "")
    meet = {"MASTER_ADDR": host, "MASTER_PORT": port, "SLURM_STEP_ID": "0"}
    programs = [
        start(LAUNCHED, each, 3, ALONE, **{**blank, **meet, rank: str(each), size: "3"})
        for each in range(3)
    ]
    for each, program in enumerate(programs):
        program.line(rf"it is {each} of 3 \[0 1 2\]")
        assert program.wait() == 0, program.text()
        assert "waiting for the switch" not in program.text()


def test_torchrun_says_it_by_its_own_store(tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = free_address().split(":")[1]
    program = Program([*command, "--master-port", port, str(file)], {"FANIN_SWITCH": ""})
    try:
        assert program.wait() == 0, program.text()
        for rank in range(2):
            assert f"it is {rank} of 2 [0 1]" in program.lines
    finally:
        program.end()


def test_a_process_that_nobody_launched_is_a_job_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FANIN_SWITCH"):
        monkeypatch.delenv(name, raising=False)
    with fanin.connect() as group:
        assert (group.rank, group.world_size) == (0, 1)
        assert group.all_reduce([1.5, 2.0]).tolist() == [1.5, 2.0]
        assert group.all_reduce([True], "bor").tolist() == [True]
        assert group.all_to_all([[7]]).tolist() == [[7]]
        assert group.all_gather(3).tolist() == [3]
        group.barrier()
        alone = group.split(0)
        assert alone is not None
        assert alone.broadcast(4).tolist() == 4
        alone.close()


def test_what_does_not_say_where_ranks_meet_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FANIN_SWITCH", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.SwitchUnreachable, match="say rendezvous=HOST:PORT"):
        fanin.connect(rank=0, world_size=2)
    with pytest.raises(ValueError, match="say rank and world_size both"):
        fanin.connect(rank=0)
    with pytest.raises(TypeError, match="the rendezvous is a int"):
        fanin.connect(rank=0, world_size=2, rendezvous=7)  # type: ignore[arg-type]
    with pytest.raises(errors.SwitchUnreachable, match=r"cannot listen at 192\.0\.2\.1:9"):
        fanin.connect(rank=0, world_size=2, rendezvous="192.0.2.1:9")
    with pytest.raises(errors.JoinTimeout):
        fanin.connect(rank=0, world_size=2, rendezvous=free_address(), timeout=1)
    store: dict[str, str] = {}
    with pytest.raises(errors.JoinTimeout, match="ranks 1 did not come within 1 s"):
        fanin.connect(rank=0, world_size=2, rendezvous=store, timeout=1)


def without_ways(me: Me) -> str:
    said: Any = {"rank": me.rank, "world_size": 2, "job": "no-ways", "timeout": 30}
    with fanin.connect(protocol="atp", **said) as group:
        assert group.all_reduce(np.ones(2, np.float32)).tolist() == [2, 2]
        with pytest.raises(errors.FaninError, match="say rendezvous=HOST:PORT") as caught:
            group.all_to_all(np.zeros(2))
        return str(caught.value)


def test_ranks_that_met_at_no_place_are_told_how(launch: Launch, atp: str) -> None:
    (told, _) = launch(without_ways, 2, at=atp).results()
    assert "float32, float16, bfloat16, int32 alone" in told


def in_secret(me: Me, meet: str) -> None:
    with joined(me, "services", meet, security="encrypt") as group:
        assert group.all_reduce(np.ones(2)).tolist() == [2, 2]
        assert group.all_gather(me.rank).tolist() == [0, 1]
        with pytest.raises(errors.FaninError, match="neither encrypted nor authenticated"):
            group.all_to_all(np.zeros(2))


def test_what_is_not_encrypted_is_refused_where_that_was_asked(launch: Launch) -> None:
    launch(in_secret, 2, free_address(), at=ALONE).results()
