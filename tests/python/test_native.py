"""Tensors that travel as they are: all dtypes by default, short ones whatever is asked for."""

from __future__ import annotations

import math
import os
from typing import Any

import fanin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fake_device import plug_in
from ranks import Me

INTEGERS = [torch.int64, torch.uint8, torch.int8]
FLOATS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Floats of more elements travel as `wire_dtype` says.
SMALL_MAX = 4096


def metrics(me: Me, wire_dtype: Any) -> list[torch.Tensor]:
    """What a careful user looks at: on Gloo, and on the switch."""
    os.environ["FANIN_WIRE_DTYPE"] = wire_dtype
    me.init()
    gloo: Any = dist.new_group(backend="gloo")
    loss_and_tokens = torch.tensor([0.1 + me.rank / 7, 1e9 + me.rank])
    one_nan = torch.full((SMALL_MAX,), 1.5 + me.rank)
    if me.rank == 1:
        one_nan[7] = math.nan
        one_nan[8] = math.inf
    scalar = torch.tensor(1e-30)
    strided = torch.arange(12.0).reshape(3, 4).t()
    out = []
    for tensor in (loss_and_tokens, one_nan, scalar, strided):
        ours, theirs = tensor.clone(), tensor.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0, equal_nan=True)
        out.append(ours)
    return out


@pytest.mark.parametrize("wire_dtype", ["native", "shared_exponent", "bfloat16", "int8", "int4"])
def test_metrics_come_out_as_on_gloo(launch: Launch, wire_dtype: str) -> None:
    by_rank = launch(metrics, 8, wire_dtype).results()
    for loss_and_tokens, one_nan, *others in by_rank:
        loss = sum(torch.tensor(0.1 + rank / 7).double() for rank in range(8))
        assert loss_and_tokens[0] == loss.float()  # type: ignore[union-attr]
        assert loss_and_tokens[1] == 8e9 + 28
        assert one_nan.isnan().nonzero().tolist() == [[7]]
        assert one_nan[8] == math.inf
        assert (one_nan[9:] == 40).all()
        first = (by_rank[0][0], *by_rank[0][2:])
        assert all(map(torch.equal, (loss_and_tokens, *others), first))  # bit-identical


def part(dtype: torch.dtype, length: int, rank: int) -> torch.Tensor:
    """Numbers over the whole range of the type."""
    dice = torch.Generator().manual_seed(rank)
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (length,), generator=dice, dtype=dtype)
    most = 4 if dtype == torch.float16 else 30
    size = torch.rand(length, generator=dice, dtype=torch.float64) * 2 * most - most
    return (torch.randn(length, generator=dice, dtype=torch.float64) * 10**size).to(dtype)


def reduce(me: Me, dtype: torch.dtype, average: bool) -> list[torch.Tensor]:
    me.init()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    tensors = [part(dtype, length, me.rank) for length in (1, 255, SMALL_MAX, 100_003)]
    for tensor in tensors:
        dist.all_reduce(tensor, op=op)
    return tensors


def check(by_rank: list[list[torch.Tensor]], dtype: torch.dtype, average: bool) -> None:
    world_size = len(by_rank)
    for index, result in enumerate(by_rank[0]):
        assert all(torch.equal(result, other[index]) for other in by_rank[1:])  # bit-identical
        parts = torch.stack([part(dtype, len(result), rank) for rank in range(world_size)])
        if dtype in INTEGERS:
            total = parts.sum(0, dtype=dtype)
            if average:
                total = torch.div(total.long(), world_size, rounding_mode="trunc").to(dtype)
            assert torch.equal(result, total)
            continue
        divisor = world_size if average else 1
        columns = parts.double().T.tolist()
        sums = [math.fsum(column) / divisor for column in columns]
        total = torch.tensor(sums, dtype=torch.float64)
        exact = total if dtype == torch.float64 else total.to(dtype).double()
        own = parts.double().abs().sum(0) * world_size * 2.0**-53
        half_ulp = exact.abs() * 2.0 ** (1 - FLOATS[dtype])
        smallest = 2.0**-24 if dtype == torch.float16 else 0.0
        off = (result.double() - total).abs()
        finite = result.isfinite()
        assert (off <= half_ulp + own + smallest)[finite].all()
        assert torch.equal(result.double()[~finite], exact[~finite])


@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_each_element_is_right_to_its_own_magnitude(
    launch: Launch, dtype: torch.dtype, average: bool
) -> None:
    check(launch(reduce, 3, dtype, average).results(), dtype, average)


def mixed(me: Me) -> None:
    """Small and large tensors, and dtypes, in one stream, several under way."""
    me.init()
    works, expected = [], []
    for turn in range(20):
        for dtype in (torch.float32, torch.int64, torch.int32, torch.uint8, torch.float64):
            length = [3, 20_000, 300][turn % 3]
            tensor = torch.full((length,), turn + me.rank).to(dtype)
            works.append((dist.all_reduce(tensor, async_op=True), tensor))
            expected.append(2 * turn + 1)
    for (work, tensor), value in zip(works, expected, strict=True):
        assert work is not None
        work.wait()
        torch.testing.assert_close(tensor.double(), torch.full_like(tensor, value).double())


def test_tensors_mix_in_one_stream(launch: Launch) -> None:
    launch(mixed, 2).results()


def staged(me: Me) -> None:
    with pytest.MonkeyPatch.context() as patch:
        devices = plug_in(patch)
        me.init()
        for dtype in (torch.float32, *INTEGERS, torch.float64):
            tensor = (torch.arange(5000) % 100 + me.rank).to(dtype)
            dist.all_reduce(tensor)
            expected = (2 * (torch.arange(5000) % 100) + 1).to(dtype)
            torch.testing.assert_close(tensor, expected)
        assert devices, "they went through the device"


def test_device_tensors_of_every_dtype(launch: Launch) -> None:
    launch(staged, 2).results()


def arrays(me: Me) -> None:
    with fanin.connect(job="native-arrays", rank=me.rank, world_size=me.world_size) as group:
        for dtype in (np.float64, np.int64):
            array = np.array([[2**53, -3], [5, 7]], dtype=dtype)
            assert group.all_reduce(array.T).tolist() == [[2**54, 10], [-6, 14]]
        odd = np.array([2**53 + 1, -7 + me.rank], dtype=np.int64)
        assert group.all_reduce(odd, "avg").tolist() == [2**53 + 1, -6]
        wrapped = np.array([200, 1], dtype=np.uint8)
        assert group.all_reduce(wrapped).tolist() == [400 % 256, 2]
        assert group.all_reduce(np.array([-100], dtype=np.int8)).tolist() == [-200 + 256]
        assert group.all_reduce(np.array(1e300)).tolist() == 2e300


def test_arrays_of_every_dtype(launch: Launch) -> None:
    launch(arrays, 2).results()
