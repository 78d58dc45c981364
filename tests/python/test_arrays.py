"""Collectives of arrays: each as NumPy would do it, whoever sums, and without a switch."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from array_ranks import ALONE, alike, joined
from conftest import Launch, free_address
from fanin.arrays import operators
from ranks import Me

WAYS = ("memory", "services", "switch", "atp")
OPS: Any = operators.OPS
MEAN: Any = "mean"


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
