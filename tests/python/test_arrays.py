"""Collectives of arrays: each as NumPy would do it, whoever sums, and without a switch."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
from multiprocessing import Manager
from typing import Any

import fanin
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import Launch, free_address
from fanin import errors
from fanin.arrays import operators, peers
from programs import Program, Start
from ranks import Me, wait_until
from torch._C._distributed_c10d import TCPStore

ALONE = ""  # for `launch`: no switch is named
WAYS = ("memory", "services", "switch", "atp")
OPS: Any = operators.OPS
MEAN: Any = "mean"


def joined(me: Me, way: str, meet: str, **said: Any) -> fanin.Group:
    """Join the ranks at `meet`; each is a machine by itself but where they share memory."""
    if way != "memory":
        said["machine"] = f"m{me.rank}"
    if way == "atp":
        said["protocol"] = "atp"
    return fanin.connect(
        rank=me.rank, world_size=me.world_size, rendezvous=meet, timeout=30, **said
    )


def alike(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.asarray(expected).dtype, (got.dtype, np.asarray(expected).dtype)
    assert got.shape == np.asarray(expected).shape


REDUCED: dict[str, Any] = {
    "sum": np.add.reduce,
    "avg": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "product": np.multiply.reduce,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


def reduced(op: str, arrays: list[Any]) -> Any:
    """What NumPy says; averages of whole numbers are rounded by Python's own arithmetic."""
    dtype = arrays[0].dtype
    whole = REDUCED[op](np.stack(arrays), axis=0, dtype=dtype)
    if op == "avg" and dtype.kind in "iu":
        return np.vectorize(lambda x: int(int(x) / len(arrays)), otypes=[dtype])(whole)
    return whole / len(arrays) if op == "avg" else whole


def given(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small whole numbers, so that sums are exact in every dtype and order."""
    draw = np.random.default_rng([rank, *shape])
    return draw.integers(0, 2 if dtype == "bool" else 5, shape).astype(dtype)


def in_every_way(me: Me, way: str, meet: str) -> None:
    n, rank = me.world_size, me.rank
    with joined(me, way, meet) as group:
        for dtype in ("float32", "float64", "int64", "uint8", "int16", "complex64", "bool"):
            for shape in ((5,), (2 * n, 3), (n * 2000, 4)):
                all_ = [given(each, shape, dtype) for each in range(n)]
                mine = all_[rank].copy()
                for op in OPS:
                    bits, kind = op.startswith("b"), mine.dtype.kind
                    unordered = kind == "c" and op in ("min", "max")
                    if (bits and kind not in "biu") or unordered or (dtype, op) == ("bool", "avg"):
                        with pytest.raises(TypeError):
                            group.all_reduce(mine, op)
                        continue
                    expected = reduced(op, all_)
                    out = np.empty_like(mine)
                    assert group.all_reduce(mine, op, out=out) is out
                    alike(mine, all_[rank])
                    # In place, and in another order in memory.
                    turned = np.array(mine, order="F")
                    assert group.all_reduce(turned, op) is turned
                    for got in (out, turned):
                        if op == "avg" and kind in "fc":
                            np.testing.assert_allclose(got, expected, 1e-6)
                        else:
                            alike(got, expected)
                    if shape[0] % n == 0 and op in ("sum", "max", "bxor"):
                        rows = shape[0] // n
                        part = expected[rows * rank :][:rows]
                        alike(group.reduce_scatter(mine, op), part)
                        alike(mine, all_[rank])
                    if op in ("sum", "min"):
                        kept = mine.copy()
                        told = group.reduce(kept, 1, op)
                        alike(kept, expected if rank == 1 else mine)
                        if rank == 1:
                            alike(told, expected)
                        else:
                            assert told is None
                alike(group.broadcast(mine.copy(), n - 1), all_[n - 1])
                turned = np.array(mine, order="F")
                alike(group.all_gather(mine), np.concatenate(all_))
                alike(group.all_gather(turned), np.concatenate(all_))
                gathered = group.gather(turned, 1)
                if rank == 1:
                    alike(gathered, np.concatenate(all_))
                else:
                    assert gathered is None
                if shape[0] % n == 0:
                    rows = shape[0] // n
                    parts = [each[rows * rank :][:rows] for each in all_]
                    alike(group.all_to_all(mine), np.concatenate(parts))
                    alike(group.all_to_all(turned), np.concatenate(parts))
                    alike(group.reduce_scatter(turned), reduced("sum", all_)[rows * rank :][:rows])
                    part, whole = all_[0][rows * rank :][:rows], mine if rank == 0 else None
                    alike(group.scatter(whole), part)
                    alike(group.scatter(whole, out=np.empty_like(part)), part)
                sent = group.send_async(turned, (rank + 1) % n)
                alike(group.receive((rank - 1) % n), all_[(rank - 1) % n])
                sent.wait()
                group.barrier()
        for number in (np.float32(rank), np.int16(rank)):
            assert group.all_reduce(number, "max") == n - 1
            assert group.all_gather(number).tolist() == list(range(n))
            assert group.broadcast(number, 1) == 1
        counts = [[(sender + 2 * other) % 3 for other in range(n)] for sender in range(n)]
        table = np.arange(sum(counts[rank]))[:, None] + 100 * rank
        uneven = []
        for sender in range(n):
            begin = sum(counts[sender][:rank])
            uneven.append(np.arange(begin, begin + counts[sender][rank])[:, None] + 100 * sender)
        alike(group.all_to_all(table, counts[rank]), np.concatenate(uneven))
        summing = group.plan["services"] if group.plan else []
        assert len(summing) == {"memory": 0, "services": n, "switch": n + 1, "atp": 1}[way]


@pytest.mark.parametrize("way", WAYS)
def test_every_collective_is_as_numpy_would_do_it(
    launch: Launch, switch: str, atp: str, way: str
) -> None:
    at = {"switch": switch, "atp": atp}.get(way, ALONE)
    launch(in_every_way, 3, way, free_address(), at=at).results(120)


def at_random(me: Me, way: str, meet: str, seed: int) -> None:
    """The same calls on all ranks, several under way at once, awaited in another order on each."""
    n, rank = me.world_size, me.rank
    draw, own = random.Random(seed), random.Random(seed * 100 + rank)
    with joined(me, way, meet) as group:
        for step in range(20):
            begun = []
            for call in range(draw.randrange(1, 6)):
                kind = draw.randrange(6)
                shape = (n * draw.randrange(0, 4), draw.choice([1, 7, 3000]))
                dtype = draw.choice(["float32", "int64", "uint16"])
                op: Any = draw.choice(operators.OPS[:5])
                root = draw.randrange(n)
                all_ = [given(each + step * 10 + call, shape, dtype) for each in range(n)]
                mine, rows = all_[rank].copy(), shape[0] // n
                total = reduced(op, all_)
                expected: Any
                if kind == 0:
                    handle, expected = group.all_reduce_async(mine, op), total
                elif kind == 1:
                    handle = group.reduce_scatter_async(mine, op)
                    expected = total[rows * rank :][:rows]
                elif kind == 2:
                    handle, expected = group.broadcast_async(mine, root), all_[root]
                elif kind == 3:
                    handle, expected = group.all_gather_async(mine), np.concatenate(all_)
                elif kind == 4:
                    handle = group.all_to_all_async(mine)
                    expected = np.concatenate([each[rows * rank :][:rows] for each in all_])
                else:
                    handle, expected = group.reduce_async(mine, root, op), total
                    expected = total if rank == root else None
                begun.append((handle, expected, op))
            own.shuffle(begun)
            for handle, expected, op in begun:
                got = handle.wait()
                if expected is None:
                    assert got is None
                elif op == "avg":
                    np.testing.assert_allclose(got, expected, 1e-6)
                else:
                    alike(got, expected)


@pytest.mark.parametrize("way", WAYS)
def test_calls_at_random_do_not_meet_each_other(
    launch: Launch, switch: str, atp: str, way: str
) -> None:
    at = {"switch": switch, "atp": atp}.get(way, ALONE)
    for seed in range(3):
        launch(at_random, 3, way, free_address(), seed, at=at).results(120)


def test_integers_wrap_and_averages_round_towards_zero() -> None:
    for dtype in (np.int8, np.int64, np.uint16):
        least = np.iinfo(dtype).min
        parts = [np.array([least, 7, 1], dtype), np.array([least, 0, 1], dtype)]
        whole = [int(each) for each in parts[0]], [int(each) for each in parts[1]]
        assert operators.combined("avg", [each.copy() for each in parts])[1:].tolist() == [3, 1]
        wrapped = (whole[0][0] + whole[1][0]) % 2 ** (8 * parts[0].itemsize)
        assert int(operators.combined("sum", parts)[0]) % 2**64 == wrapped
    lower = operators.combined("avg", [np.array([-7, -8]), np.array([0, 0])])
    assert lower.tolist() == [-3, -4]


def in_place_or_not(me: Me, meet: str) -> None:
    with joined(me, "memory", meet) as group:
        mine = np.full(3, me.rank + 1.0)
        assert group.all_reduce(mine) is mine
        assert mine.tolist() == [3, 3, 3]
        for other in (mine.copy().tolist(), torch.full((3,), 3.0), mine.copy().data):
            alike(group.all_reduce(other, "product"), np.asarray(other) ** 2)
        fixed = np.full(3, me.rank + 1.0)
        fixed.flags.writeable = False
        assert group.all_reduce(fixed) is not fixed
        assert fixed.tolist() == [me.rank + 1] * 3
        assert group.broadcast(fixed, 1).tolist() == [2, 2, 2]
        of_torch = torch.arange(4) + me.rank
        assert group.all_reduce(of_torch).tolist() == [1, 3, 5, 7]
        assert of_torch.tolist() == [me.rank, me.rank + 1, me.rank + 2, me.rank + 3]
        strided = np.zeros((6, 4))[::2, ::-1]
        strided[...] = me.rank
        alike(group.all_gather(strided), np.repeat([0.0, 1.0], 3)[:, None] * np.ones((6, 4)))
        out = np.zeros((12, 4))[::2]
        assert group.all_gather(strided, out=out) is out
        assert out[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
        assert group.reduce_scatter(strided[:2]).tolist() == [[1.0] * 4]
        if me.rank == 0:
            for _ in range(3):
                group.send([5.0, 6.0, 7.0], 1)
        else:
            assert group.receive(0, out=out[:3, 1]).tolist() == [5, 6, 7]
            with pytest.raises(ValueError, match="out has shape"):
                group.receive(0, out=np.zeros(2))
            # It was read, and is gone; the next one is as good as before.
            assert group.receive(0).tolist() == [5, 6, 7]
        matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
        assert group.all_to_all(matrix)[0].tolist() == [[1, 2], [3, 4]][me.rank]
        short = np.ones(3, ml_dtypes.bfloat16) * (me.rank + 1)
        assert group.all_reduce(short, "max").tolist() == [2, 2, 2]
        assert group.all_to_all(np.ones((2, 3), ml_dtypes.float8_e5m2)).dtype.name == "float8_e5m2"


def test_what_is_given_stays_unless_it_can_take_the_result(launch: Launch) -> None:
    launch(in_place_or_not, 2, free_address(), at=ALONE).results()


def refused(me: Me, meet: str) -> None:
    with joined(me, "memory", meet) as group:
        for wrong, told in (
            (lambda: group.all_reduce(np.zeros(3), MEAN), "op is 'mean'; supported: sum, avg"),
            (lambda: group.all_reduce(np.zeros(3), "bor"), "cannot combine dtype float64 by"),
            (lambda: group.all_reduce(["a"]), "cannot combine dtype <U1"),
            (lambda: group.all_reduce(object()), "cannot take a object: give an array"),
            (lambda: group.broadcast(np.array([None])), "cannot take object: give an array"),
            (lambda: group.scatter(np.array([None]), me.rank), "cannot take object: give an array"),
            (lambda: group.all_gather(np.ma.array([1])), "cannot take a masked array"),
            (lambda: group.all_reduce(torch.ones(1, requires_grad=True)), "cannot take a Tensor"),
            (lambda: group.receive(1 - me.rank, out=[0]), "out is a list"),  # type: ignore[arg-type]
            (lambda: group.all_reduce(np.zeros(3, ">f8")), "another byte order"),
            (lambda: group.broadcast(np.zeros(3), 2), "rank 2 is not in a group of 2"),
            (lambda: group.all_gather(np.zeros(3), out=np.zeros(3)), r"the result has \(6,\)"),
            (lambda: group.reduce_scatter(np.zeros(3)), r"2 equal parts.*shape \(3,\)"),
            (lambda: group.all_to_all(np.zeros(3), [1, 1]), r"rows are \[1, 1\]: .* 3 together"),
            (lambda: group.send(1, me.rank), "is this rank, which sends to others"),
            (lambda: group.split(-2), "color is -2"),
        ):
            with pytest.raises((TypeError, ValueError), match=told):
                wrong()
        assert group.all_reduce(np.ones(2)).tolist() == [2, 2]


def test_what_cannot_be_done_is_refused_and_nothing_is_lost(launch: Launch) -> None:
    launch(refused, 2, free_address(), at=ALONE).results()


def in_parts(me: Me, meet: str) -> Any:
    with joined(me, "services", meet) as group:
        halves = group.split(me.rank % 2, key=-me.rank)
        none = group.split(None if me.rank else 0)
        assert halves is not None
        assert (none is None) == (me.rank > 0)
        with halves:
            summed = halves.all_reduce(np.array([me.rank])).tolist()
            deeper = halves.split(0)
            assert deeper is not None
            with deeper:
                # In the order of the keys: the later rank comes first.
                told = deeper.all_gather(me.rank).tolist(), halves.rank
        both = group.all_reduce(np.array([1])).tolist()
        if none is not None:
            none.close()
        return summed, told, both


def test_groups_within_groups(launch: Launch) -> None:
    got = launch(in_parts, 4, free_address(), at=ALONE).results()
    assert got == [
        ([2], ([2, 0], 1), [4]),
        ([4], ([3, 1], 1), [4]),
        ([2], ([2, 0], 0), [4]),
        ([4], ([3, 1], 0), [4]),
    ]


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


def out_of_step(me: Me, way: str, meet: str) -> tuple[str, str, float]:
    with joined(me, way, meet) as group:
        began = time.monotonic()
        call: Any = [
            lambda: group.all_to_all(np.zeros((3, 4))),
            lambda: group.all_reduce(np.zeros(4), "max"),
            lambda: group.all_to_all(np.zeros((3, 4))),
        ][me.rank]
        with pytest.raises(errors.CollectiveMismatch) as caught:
            call()
        with pytest.raises(errors.CollectiveMismatch) as again:
            group.all_to_all(np.zeros(3))
        return str(caught.value), str(again.value), time.monotonic() - began


def test_ranks_that_are_out_of_step_are_all_told(launch: Launch) -> None:
    for told, again, waited in launch(
        out_of_step, 3, "services", free_address(), at=ALONE
    ).results():
        assert "all_to_all" in told
        assert "all_reduce max" in told
        assert "all_reduce max" in again
        assert waited < 20


def of_other_shapes(me: Me, meet: str) -> str:
    with joined(me, "memory", meet) as group:
        with pytest.raises(errors.CollectiveMismatch) as caught:
            group.reduce_scatter(np.zeros((2 * (1 + me.rank),), np.int16))
        return str(caught.value)


def test_arrays_of_unlike_shapes_are_a_mismatch(launch: Launch) -> None:
    for told in launch(of_other_shapes, 2, free_address(), at=ALONE).results():
        assert "shape" in told


def waits_for_the_dead(me: Me, way: str, meet: str) -> tuple[str, int, float]:
    with joined(me, way, meet) as group:
        large = np.zeros((3, 1_000_000))
        group.all_to_all(large)
        me.say("ready")
        if me.rank == 1:
            time.sleep(60)
        began = time.monotonic()
        with pytest.raises(errors.RankLost) as caught:
            for _ in iter(lambda: group.all_to_all(large), None):
                pass
        return str(caught.value), caught.value.rank, time.monotonic() - began


@pytest.mark.parametrize("way", ["memory", "services"])
def test_a_rank_that_is_killed_is_named_soon(launch: Launch, way: str) -> None:
    ranks = launch(waits_for_the_dead, 3, way, free_address(), at=ALONE)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(1)
    for rank in (0, 2):
        _, lost, waited = ranks.result(rank)
        assert lost == 1
        assert waited < 25


def waits_for_who_left(me: Me, meet: str) -> str:
    with joined(me, "services", meet) as group:
        if me.rank == 1:
            return ""
        with pytest.raises(errors.FaninError) as caught:
            group.receive(1)
        assert isinstance(caught.value, errors.RankLeft | errors.RankLost)
        assert caught.value.rank == 1
        return type(caught.value).__name__


def test_a_rank_that_left_is_not_waited_for(launch: Launch) -> None:
    assert launch(waits_for_who_left, 2, free_address(), at=ALONE).result(0) == "RankLeft"


def runs_out_of_time(me: Me, meet: str) -> list[Any]:
    with fanin.connect(rank=me.rank, world_size=3, rendezvous=meet, timeout=20) as group:
        group.client.set_timeout(2.0)
        if me.rank == 2:
            me.hear()
            with pytest.raises(errors.AllReduceTimeout) as caught:
                group.all_to_all(np.zeros(3))
        else:
            with pytest.raises(errors.AllReduceTimeout) as caught:
                group.all_to_all(np.zeros(3))
            me.say("over")
            me.hear()
        return [caught.value.missing_ranks, str(caught.value)]


def test_a_timeout_names_whom_it_waited_for(launch: Launch) -> None:
    ranks = launch(runs_out_of_time, 3, free_address(), at=ALONE)
    for rank in (0, 1):
        assert ranks.hear(rank) == "over"
    ranks.tell(2, "go on")
    for rank in (0, 1):
        ranks.tell(rank, "go on")
    said = ranks.results()
    assert [each[0] for each in said[:2]] == [[2], [2]]
    assert all("all_to_all" in text for _, text in said)


def fails_elsewhere(me: Me, meet: str) -> tuple[str, float]:
    """Rank 0 fails before it has connected to rank 2; ranks 1 and 2 have long arrays under way."""
    with joined(me, "services", meet) as group:
        beside = group.receive_async((me.rank + 1) % 3)
        began = time.monotonic()
        if me.rank == 0:
            group.gather(np.zeros(1), 1)
        else:
            with pytest.raises(errors.CollectiveMismatch):
                group.all_to_all(np.zeros((3, 1_000_000)))
        with pytest.raises(errors.CollectiveMismatch) as caught:
            beside.wait()
        return str(caught.value), time.monotonic() - began


def test_all_hear_of_a_mismatch_whatever_they_do(launch: Launch) -> None:
    for told, waited in launch(fails_elsewhere, 3, free_address(), at=ALONE).results():
        assert "gather to rank 1" in told
        assert "all_to_all" in told
        assert waited < 15


def roots_that_differ(me: Me, meet: str) -> str:
    with joined(me, "memory", meet) as group:
        with pytest.raises(errors.CollectiveMismatch) as caught:
            _ = [group.scatter(np.arange(2), root=root) for root in (me.rank, 0, 1)]
        return str(caught.value)


def test_roots_that_differ_are_a_mismatch(launch: Launch) -> None:
    for told in launch(roots_that_differ, 2, free_address(), at=ALONE).results():
        assert "scatter from rank" in told


def leaves_when_done(me: Me, meet: str) -> Any:
    with joined(me, "services", meet) as group:
        if me.rank == 2:
            time.sleep(7)  # longer than services wait for a rank that has left
        return group.gather(np.array([me.rank]), 0)


def test_a_rank_may_leave_when_it_has_sent_all(launch: Launch) -> None:
    first, *others = launch(leaves_when_done, 3, free_address(), at=ALONE).results()
    assert first.tolist() == [0, 1, 2]
    assert others == [None, None]


class Quiet:
    """A membership in which nothing happens."""

    timeout = 30.0

    def failure(self) -> None:
        return None

    def left(self) -> list[int]:
        return []


def test_many_ranks_connect_at_once() -> None:
    count = 2 * peers.STRANGERS_MAX
    client: Any = Quiet()
    ranks = [peers.Peers(rank, count, "127.0.0.1", client) for rank in range(count)]
    told = [each.said for each in ranks]
    for each in ranks:
        each.heard(told)

    def body_of(rank: int) -> peers.Body:
        return lambda exchange: exchange.to_root(np.array([rank]), 0)

    # Rank 0 comes last, and finds all others at its door.
    sent = [each.collective("gather", body_of(each.rank)) for each in ranks[1:]]
    for transfer in sent:
        transfer.wait(30)
    got = ranks[0].collective("gather", body_of(0))
    got.wait(30)
    assert [int(each[0]) for each in got.result()] == list(range(count))
    for each in ranks:
        each.close()


def ends_with_things_under_way(me: Me, meet: str) -> str:
    group = joined(me, "memory", meet)
    if me.rank == 0:
        handle = group.receive_async(1)
        group.close()
        with pytest.raises(errors.Closed):
            handle.wait()
        with pytest.raises(errors.Closed):
            group.all_to_all(np.zeros(2))
    else:
        handle = group.receive_async(0)
        del handle, group
        gc.collect()
    wait_until(lambda: not any("peers" in each.name for each in threading.enumerate()), "the end")
    return "ended"


def test_closing_ends_what_is_under_way(launch: Launch) -> None:
    assert (
        launch(ends_with_things_under_way, 2, free_address(), at=ALONE).results() == ["ended"] * 2
    )


def test_strangers_at_a_ranks_port_do_no_harm(launch: Launch) -> None:
    ranks = launch(listens, 2, free_address(), at=ALONE)
    host, port = ranks.hear(0)
    for hello in (b"", b"x" * 100, os.urandom(21)):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(hello)
    ranks.tell(0, "go on")
    ranks.tell(1, "go on")
    assert ranks.results() == [[0, 0], [10, 10]]


def listens(me: Me, meet: str) -> list[int]:
    with joined(me, "memory", meet) as group:
        group.all_to_all(np.zeros(2))
        if me.rank == 0:
            assert group._peers is not None
            me.say(group._peers._listener.getsockname()[:2])
        me.hear()
        return [int(each) for each in group.all_to_all(np.array([0, 10]))]
