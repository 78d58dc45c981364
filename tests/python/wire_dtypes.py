"""Sums by real ranks, held to a bound: tests of dtypes, of tensors and on the wire, share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import fanin.torch
import torch
import torch.distributed as dist
from conftest import Launch
from fanin._settings import WireDtype
from ranks import Me

WORLD_SIZE = 3
Bound = Callable[[list[torch.Tensor], int], torch.Tensor]
"""``bound(parts, divisor)``: how far off each element may be, in float64."""


def values(dtype: torch.dtype, length: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(rank)
    if dtype == torch.int32:
        return torch.randint(-(2**28), 2**28, (length,), generator=dice, dtype=dtype)
    # Magnitudes over many powers of two, as gradients have.
    scale = torch.exp2(torch.randint(-12, 3, (length,), generator=dice).float())
    return (torch.randn(length, generator=dice) * scale).to(dtype)


def reduce(
    me: Me,
    wire_dtype: WireDtype | None,
    lengths: Sequence[int],
    dtype: torch.dtype,
    average: bool,
) -> list[torch.Tensor]:
    me.init(pg_options=fanin.torch.Options(wire_dtype=wire_dtype))
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    tensors = [values(dtype, length, me.rank) for length in lengths]
    for tensor in tensors:
        dist.all_reduce(tensor, op=op)
    return tensors


def held_to(
    bound: Bound,
    launch: Launch,
    wire_dtype: WireDtype,
    lengths: Sequence[int],
    dtype: torch.dtype,
    average: bool,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Sum, and hold the sums as `held` does."""
    by_rank = launch(reduce, WORLD_SIZE, wire_dtype, lengths, dtype, average).results()
    return held(by_rank, bound, lengths, dtype, average)


def held(
    by_rank: Sequence[Sequence[torch.Tensor]],
    bound: Bound,
    lengths: Sequence[int],
    dtype: torch.dtype,
    average: bool,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Hold every rank to the same bits, integers to exact sums, and floats to the bound.

    Yields the length, the exact sum and how far off the one found is, for floats.
    """
    for index, length in enumerate(lengths):
        parts = [values(dtype, length, rank) for rank in range(WORLD_SIZE)]
        result = by_rank[0][index]
        for other in by_rank[1:]:
            assert torch.equal(result, other[index])  # bit-identical
        if dtype == torch.int32:
            exact = torch.stack(parts).sum(0)  # in int64
            if average:
                exact = torch.div(exact, WORLD_SIZE, rounding_mode="trunc")
            assert torch.equal(result.long(), exact)
            continue
        divisor = WORLD_SIZE if average else 1
        exact = torch.stack(parts).double().sum(0) / divisor
        off = (result.double() - exact).abs()
        assert (off <= bound(parts, divisor)).all()
        yield length, exact, off
