"""The backend's own all-reduces: every dtype, every shape, exact where it can be."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin._settings import WireDtype
from fanin.torch.backend import channel
from fanin.torch.works import collectives
from ranks import Me
from torch._C._distributed_c10d import HashStore
from wire_dtypes import WORLD_SIZE, held, reduce

FLOATS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of the significand


def error_bound(parts: list[torch.Tensor], divisor: int, wire_dtype: WireDtype) -> torch.Tensor:
    """The rounding to the tensor's own dtype, and what docs/protocols/switchml.md adds to it.

    Where exponents are shared that is SwitchML's Theorem 1: |sum - result| <= n / f with
    f = (2^31 - 1) / (n 2^m). 2^m is at most twice the largest magnitude.
    """
    n = len(parts)
    exact = torch.stack(parts).double()
    magnitudes = exact.abs()
    added: torch.Tensor = n * 2.0**-53 * magnitudes.sum(0) / divisor
    if wire_dtype == "shared_exponent":
        added = n * n * 2 * magnitudes.max() / (2**31 - 1) / divisor
    rounding = (exact.sum(0) / divisor).abs() * 2.0 ** -FLOATS[parts[0].dtype]
    # The smallest subnormal of float16 is the spacing near zero.
    return added + rounding + (2.0**-24 if parts[0].dtype == torch.float16 else 0.0)


@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("wire_dtype", ["native", "shared_exponent"])
def test_every_dtype_is_within_the_bound_and_the_same_on_all_ranks(
    launch: Launch, wire_dtype: WireDtype, dtype: torch.dtype, average: bool
) -> None:
    lengths = [1, 2, 255, 256, 257, 100_003]
    by_rank = launch(reduce, WORLD_SIZE, wire_dtype, lengths, dtype, average).results()
    are_right(by_rank, lengths, dtype, average, wire_dtype)


def are_right(
    by_rank: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int],
    dtype: torch.dtype,
    average: bool,
    wire_dtype: WireDtype = "native",
) -> None:
    bound = functools.partial(error_bound, wire_dtype=wire_dtype)
    floats = list(held(by_rank, bound, lengths, dtype, average))
    assert len(floats) == (0 if dtype == torch.int32 else len(lengths))


def awkward(me: Me) -> None:
    me.init()
    n = me.world_size
    square = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    transposed = square.t()
    dist.all_reduce(transposed)
    assert torch.equal(square, n * torch.arange(12, dtype=torch.int32).reshape(3, 4))

    channels_last = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    # Ranks need not agree about strides, only about shape.
    image = channels_last if me.rank == 0 else channels_last.contiguous()
    image.mul_(torch.arange(3.0).view(1, 3, 1, 1))
    dist.all_reduce(image)
    expected = n * torch.arange(3.0).view(1, 3, 1, 1).expand(2, 3, 4, 4)
    torch.testing.assert_close(image, expected, rtol=1e-6, atol=1e-6)

    every_other = torch.zeros(20)
    work = dist.all_reduce(every_other[::2].add_(1), async_op=True)
    assert work is not None
    work.wait()
    assert every_other.tolist() == [n, 0] * 10

    expanded = torch.full((3, 1), me.rank + 1.0).expand(3, 4)
    dist.all_reduce(expanded)
    assert expanded.tolist() == [[n * (n + 1) / 2] * 4] * 3

    for empty in (torch.empty(0), torch.empty(3, 0, dtype=torch.bfloat16)):
        dist.all_reduce(empty)
        work = dist.all_reduce(empty, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0].shape == empty.shape

    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * n

    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        whole = bytearray(b"\x07" * (1 + 4 * dtype.itemsize))
        unaligned = torch.frombuffer(whole, offset=1, dtype=dtype)
        unaligned.copy_(torch.arange(4) + me.rank)
        dist.all_reduce(unaligned)
        assert unaligned.tolist() == [n * i + n * (n - 1) / 2 for i in range(4)]
        assert whole[0] == 7

    with torch.inference_mode():
        strided = torch.ones(3, 4, dtype=torch.int32).t()
        work = dist.all_reduce(strided, async_op=True)
        assert work is not None
        work.get_future().wait()
    assert (strided == n).all()

    leaf = torch.ones(5, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [n] * 5
    assert leaf.requires_grad

    zeros = torch.zeros(1000)
    dist.all_reduce(zeros)
    assert not zeros.any()


def test_awkward_tensors(launch: Launch) -> None:
    launch(awkward, 2).results()


def refused(me: Me) -> str:
    """A client that takes one of rank 0's tensors not: this rank is one behind the others."""
    me.init()
    if me.rank == 1:
        me.hear()
        with pytest.raises(errors.RankLeft) as left:
            dist.all_reduce(torch.ones(3, dtype=torch.int32))
        return str(left.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(collectives.DTYPES, torch.int32, "no dtype")
        patch.setattr(channel.Channel, "sums", lambda *_: True)
        with pytest.raises(ValueError, match="no dtype"):
            dist.all_reduce(torch.ones(3, dtype=torch.int32))
    with pytest.raises(errors.Closed) as closed:
        dist.all_reduce(torch.full((3,), 10, dtype=torch.int32))
    me.say("closed")
    return str(closed.value)


def test_a_rank_whose_tensor_is_refused_sums_nothing_that_follows(launch: Launch) -> None:
    ranks = launch(refused, 2)
    assert ranks.hear(0) == "closed"
    ranks.tell(1, "go")
    closed, left = ranks.results()
    assert "the group ended, here, because" in closed
    assert "no dtype" in closed
    assert "rank 0" in left


def large(me: Me, length: int) -> tuple[int, int]:
    me.init()
    tensor = torch.arange(length, dtype=torch.int32)
    dist.all_reduce(tensor)
    wrong = (tensor != me.world_size * torch.arange(length, dtype=torch.int32)).sum().item()
    floats = torch.ones(length // 4)
    dist.all_reduce(floats, op=dist.ReduceOp.AVG)
    return int(wrong), int(((floats - 1).abs() > 1e-6).sum())


def test_thirty_million_elements(launch: Launch) -> None:
    assert launch(large, 2, 30_000_000).results() == [(0, 0), (0, 0)]


def outstanding(me: Me) -> None:
    me.init()
    tensors = [torch.full((1 + 997 * i,), i, dtype=torch.int32) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in reversed(range(30)):
        work = works[index]
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert (tensors[index] == index * me.world_size).all()


def test_many_outstanding_are_awaited_in_any_order(launch: Launch) -> None:
    launch(outstanding, 2).results()


def alone(me: Me) -> list[float]:
    me.init()
    tensor = torch.tensor([0.1, 1e30])
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    dist.barrier()
    return tensor.tolist()


def test_a_group_of_one_rank_needs_no_switch(launch: Launch) -> None:
    assert launch(alone, 1, at="").results() == [torch.tensor([0.1, 1e30]).tolist()]


def too_many(_: Me) -> str:
    try:
        dist.init_process_group("fanin", store=HashStore(), rank=0, world_size=4097)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_more_ranks_than_a_switch_can_serve_are_refused_at_once(launch: Launch) -> None:
    assert "4096" in launch(too_many, 1).result(0)
