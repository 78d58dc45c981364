"""Floats that travel as int8 or int4: how far off, the same bits, and what is kept of rounding."""

from __future__ import annotations

from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import _fanin
from fanin._settings import PACKED, Packed
from fanin.torch.hooks.error_feedback import BLOCK, ErrorFeedback, feed_back
from fanin.torch.works.collectives import DTYPES
from ranks import Failure, Me
from test_all_reduce import FLOATS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from wire_dtypes import Bound, held_to, reduce

# The short ones travel as they are (tests/python/test_native.py).
LENGTHS = [1, 4096, 4097, 8192, 8193, 100_003]


def largest(part: torch.Tensor) -> torch.Tensor:
    """Of each element the largest absolute value in its block."""
    blocks = torch.zeros(-(-part.numel() // BLOCK) * BLOCK, dtype=torch.float64)
    blocks[: part.numel()] = part.double().abs()
    most = blocks.view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK)
    return most.reshape(-1)[: part.numel()]


def error_bound(wire_dtype: Packed) -> Bound:
    """docs/protocols/switchml.md, "Floats as int8" and "Floats as int4", in float64."""
    # A step by the largest magnitude of its block, and the distance of coarse levels by the element
    # itself.
    step, distance = {"int8": (1 / 63.5, 0.0), "int4": (1 / 6, 1 / 2)}[wire_dtype]

    def bound(parts: list[torch.Tensor], divisor: int) -> torch.Tensor:
        sizes = [largest(part) for part in parts]
        size, exact = torch.stack(sizes).sum(0), torch.stack(parts).double().sum(0).abs()
        each = [
            torch.maximum(size * step, part.double().abs() * distance)
            for part, size in zip(parts, sizes, strict=True)
        ]
        grown = size * (1 + max(step, distance))
        contributions = torch.stack(each).sum(0) + grown * len(parts) * 2.0**-24
        of_sum = torch.maximum(grown * step, (exact + contributions) * distance)
        off = contributions + of_sum * (1 + len(parts) * 2.0**-24)
        own = 2.0 ** -FLOATS[parts[0].dtype]
        smallest = 2.0**-25 if parts[0].dtype == torch.float16 else 0.0
        return (off + own * (size + off)) / divisor + smallest

    return bound


in_both = pytest.mark.parametrize("wire_dtype", PACKED)
LARGEST_LEVEL: dict[Packed, float] = {"int8": 127.0, "int4": 12.0}


@in_both
@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_every_dtype_is_within_the_bound_and_the_same_on_all_ranks(
    launch: Launch, dtype: torch.dtype, average: bool, wire_dtype: Packed
) -> None:
    bound = error_bound(wire_dtype)
    for length, exact, off in held_to(bound, launch, wire_dtype, LENGTHS, dtype, average):
        if length > 4096:
            assert (off > 2.0**-8 * exact.abs()).any(), f"it did not travel as {wire_dtype}"
        else:
            assert (off <= 2.0**-7 * exact.abs()).all(), "it did not travel as it is"


@in_both
def test_every_run_has_the_same_bits(launch: Launch, wire_dtype: Packed) -> None:
    how = (wire_dtype, LENGTHS, torch.float32, True)
    one, other = (launch(reduce, 2, *how).results()[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def special(me: Me, wire_dtype: Packed) -> list[float]:
    with fanin.connect(
        job="special", rank=me.rank, world_size=me.world_size, wire_dtype=wire_dtype
    ) as group:
        array = np.ones(8192, np.float32)
        if me.rank == 0:
            array[:4] = np.nan, np.inf, -np.inf, np.inf
        if me.rank == 1:
            array[3] = -np.inf
        group.all_reduce(array)
        assert not np.isfinite(array[:BLOCK]).any(), "no silent garbage in a block that is none"
        assert (array[BLOCK:] == 2).all()
        too_large = np.full(8192, np.finfo(np.float32).max, np.float32)
        group.all_reduce(too_large, "avg")
        assert np.isinf(too_large).all(), "as stated"
        return [float(x) for x in array[:4]]


@in_both
def test_nan_and_infinity_reach_every_rank(launch: Launch, wire_dtype: Packed) -> None:
    for first in launch(special, 2, wire_dtype).results():
        assert np.isnan(first[0])
        assert first[1:3] == [np.inf, -np.inf]
        assert np.isnan(first[3])


def differs(me: Me) -> None:
    dtype: Any = ["int4", "int8"][me.rank]
    me.init(pg_options=fanin.torch.Options(wire_dtype=dtype))


def test_ranks_that_disagree_all_get_the_same_clear_error(launch: Launch) -> None:
    ranks = launch(differs, 2)
    for outcome in (ranks.outcome(rank) for rank in range(2)):
        assert isinstance(outcome, Failure)
        assert outcome.kind == "SettingMismatch", outcome.text
        assert "FANIN_WIRE_DTYPE" in outcome.message
        assert "int8" in outcome.message
        assert "int4" in outcome.message


def gradients(dtype: torch.dtype, length: int, seed: int = 0) -> torch.Tensor:
    """Of magnitudes that differ from block to block."""
    dice = torch.Generator().manual_seed(seed)
    sizes = torch.rand(-(-length // BLOCK), generator=dice).mul(12).sub(9).exp2()
    sizes = sizes.repeat_interleave(BLOCK)[:length]
    return (torch.randn(length, generator=dice) * sizes).to(dtype)


def fed_back(values: torch.Tensor, residual: torch.Tensor, wire_dtype: Packed) -> None:
    address, elements = values.data_ptr(), values.numel()
    _fanin.feed_back(address, elements, DTYPES[values.dtype], residual.data_ptr(), wire_dtype)


@in_both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_missing_is_the_same_on_any_device(dtype: torch.dtype, wire_dtype: Packed) -> None:
    for length in (1, 31, 32, 4097, 10_000):
        pair = [(gradients(dtype, length), torch.zeros(length)) for _ in range(2)]
        for step in range(3):
            (a, rest_of_a), (b, rest_of_b) = pair
            fresh = gradients(dtype, length, step)
            if step == 1:
                fresh[length // 2] = torch.nan
                fresh[0] = torch.finfo(dtype).max
            a.copy_(fresh)
            b.copy_(fresh)
            fed_back(a, rest_of_a, wire_dtype)
            feed_back(b, rest_of_b, wire_dtype)
            assert torch.equal(a.nan_to_num(1.0), b.nan_to_num(1.0))
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(rest_of_a, rest_of_b)
            assert rest_of_a.isfinite().all()


def test_what_cannot_be_fed_back_is_refused() -> None:
    tensor, residual = torch.zeros(8, dtype=torch.int32), torch.zeros(8)
    with pytest.raises(ValueError, match=r"\"int32\": one of float32, float16 and bfloat16"):
        _fanin.feed_back(tensor.data_ptr(), 8, "int32", residual.data_ptr(), "int8")
    with pytest.raises(ValueError, match=r"null address"):
        _fanin.feed_back(tensor.data_ptr(), 8, "float32", 0, "int4")
    with pytest.raises(ValueError, match=r"\"bfloat16\": one of int8 and int4"):
        _fanin.feed_back(tensor.data_ptr(), 8, "float32", residual.data_ptr(), "bfloat16")


def unchanged(me: Me, length: int, wire_dtype: Packed) -> bool:
    """Whether what was fed back arrives as it was sent: the other rank has nothing to add."""
    me.init(pg_options=fanin.torch.Options(wire_dtype=wire_dtype))
    sent = gradients(torch.float32, length)
    fed_back(sent, torch.zeros(length), wire_dtype)
    tensor = sent.clone() if me.rank == 0 else torch.zeros(length)
    dist.all_reduce(tensor)
    return torch.equal(tensor, sent)


@in_both
def test_what_was_fed_back_travels_unchanged_however_it_is_cut(
    launch: Launch, wire_dtype: Packed
) -> None:
    for length in (5000, 1_000_003):
        assert launch(unchanged, 2, length, wire_dtype).results() == [True, True]


class Bucket:
    """As much of DDP's as `ErrorFeedback` looks at."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.index = lambda: index
        self.buffer = lambda: buffer
        self.parameters = lambda: parameters


@in_both
def test_a_bucket_has_its_own_residual_which_its_parameters_take_along(wire_dtype: Packed) -> None:
    feedback = ErrorFeedback(wire_dtype)
    parameters = [torch.zeros(8000), torch.zeros(8000)]

    def rounded(index: int, *of: torch.Tensor) -> float:
        buffer = torch.full((8000 * len(of),), 0.3)
        buffer[::BLOCK] = LARGEST_LEVEL[wire_dtype]
        feedback.round(Bucket(index, buffer, list(of)))  # type: ignore[arg-type]
        return float(buffer[1])

    assert [rounded(0, parameters[0]) for _ in range(4)] == [0.0, 1.0, 0.0, 0.0]
    assert [rounded(1, parameters[1]) for _ in range(2)] == [0.0, 1.0]
    assert [rounded(0, parameters[0]) for _ in range(2)] == [1.0, 0.0]
    # Another model's, with which it takes turns.
    assert [rounded(0, parameters[1]) for _ in range(2)] == [0.0, 0.0]
    assert rounded(0, parameters[0]) == 0.0
    # DDP forms other buckets of the same parameters.
    assert [rounded(0, *parameters) for _ in range(2)] == [0.0, 1.0]
    (residual,) = feedback._residuals
    # The errors before, 0.1 and 0.2, went with the parameters.
    assert residual.missing[[1, 8001]].tolist() == pytest.approx([-0.3, -0.2], abs=1e-5)
    del parameters[:]
    assert rounded(0, torch.zeros(8000)) == 0.0
    assert len(feedback._residuals) == 1, "of a model that is no more nothing is kept"


def test_what_travels_as_it_is_is_not_rounded() -> None:
    for buffer in (torch.full((4096,), 0.3), torch.full((8000,), 0.3, dtype=torch.float64)):
        buffer[0] = 127.0
        ErrorFeedback("int8").round(Bucket(0, buffer, []))  # type: ignore[arg-type]
        assert buffer[1] == torch.tensor(0.3, dtype=buffer.dtype)


SMALL = 0.3
STEPS = 64


class Constant(nn.Module):
    """A gradient that is the same in every step: small ones beside large ones, one a block."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8192))
        self.gradient = torch.full((8192,), SMALL)
        self.gradient[::BLOCK] = largest

    def forward(self) -> torch.Tensor:
        return (self.weight * self.gradient).sum()


def descend(me: Me, wire_dtype: Packed, feeds_back: bool) -> float:
    """How far weights are in the end from where the gradients lead."""
    me.init("gloo")
    network = Constant(LARGEST_LEVEL[wire_dtype])
    model = DistributedDataParallel(network)
    if feeds_back:
        state = fanin.torch.HookState(wire_dtype=wire_dtype)
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
    else:
        options = fanin.torch.Options(wire_dtype=wire_dtype)
        group: Any = dist.new_group(backend="fanin", pg_options=options)
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return float((network.weight + STEPS * network.gradient).abs().max())


@in_both
def test_error_feedback_keeps_weights_within_one_rounding_of_their_way(
    launch: Launch, wire_dtype: Packed
) -> None:
    # The nearest multiple of a step, 1, is never further than half of one from the way so far.
    assert all(off <= 0.5 + 1e-3 for off in launch(descend, 2, wire_dtype, True).results())
    # Each step's rounding is right in expectation, and their errors add up as a random walk's do.
    assert all(off > 2.0 for off in launch(descend, 2, wire_dtype, False).results())
