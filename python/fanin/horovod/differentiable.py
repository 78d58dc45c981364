"""Collectives that return when they are done, and through which gradients pass."""

# `forward` and `backward` are torch's.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fanin.horovod import operations
from fanin.horovod.compression import Compression, Compressor
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average, Sum, reduce_op, synchronize
from fanin.horovod.world import rank


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: Tensor) -> Any:
        ctx.options = options
        op, before, after, process_set = options
        handle = operations.grouped_allreduce_async(
            tensors, None, name, op, before, after, process_set
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_Allreduce.apply(ctx.options, None, *gradients)


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, name: str | None, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.lengths = [tensor.shape[:1].numel() for tensor in tensors]
        handle = operations.grouped_allgather_async(tensors, name, process_set)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # All ranks' losses are of all rows: each gets the mean of what they say of its own.
        options = (Average, 1.0, 1.0, ctx.process_set)
        reduced = _Allreduce.apply(options, None, *gradients)
        place = ctx.process_set.rank()
        lengths = allgather(torch.tensor([ctx.lengths], device="cpu"), process_set=ctx.process_set)
        begins = lengths[:place].sum(0).tolist()
        cuts = zip(reduced, begins, ctx.lengths, strict=True)
        return None, None, *(each.narrow(0, begin, length) for each, begin, length in cuts)


class _Broadcast(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root = root
        ctx.process_set = process_set
        return synchronize(operations.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        if rank() != ctx.root:
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        handle = operations.alltoall_async(tensor, splits, name, process_set)
        output, received = synchronize(handle)
        ctx.process_set = process_set
        ctx.received = received
        ctx.length = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        back, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        # Rows that went nowhere have no gradient.
        missing = back.new_zeros(ctx.length - back.shape[0], *back.shape[1:])
        return torch.cat([back, missing]), None, None, None


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: Tensor) -> Any:
        op, before, after, process_set = options
        # As Horovod has it: of a sum, each rank's gradient counts once for each rank.
        size = len(set_ranks(process_set)) if op is Sum else 1
        ctx.factor = size * before * after
        ctx.process_set = process_set
        handle = operations.grouped_reducescatter_async(
            tensors, name, op, process_set, before, after
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_parts = [gradient * ctx.factor for gradient in gradients]
        return None, None, *_Allgather.apply(ctx.process_set, None, *of_parts)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a tensor reduced over the ranks of a process set; the average unless `op` is given.

    Operations of all ranks with one `name` belong together, and begin once all ranks have called
    them; those without a name belong together by their number. A tensor must have the same shape
    and dtype on all ranks: else all of them get a `HorovodInternalError`.
    """
    options = (reduce_op(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed([tensor], compression, lambda sent: _reduced(options, name, sent))[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return several tensors reduced, all at once, under one name. See `allreduce`."""
    options = (reduce_op(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(tensors, compression, lambda sent: _reduced(options, name, sent))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, joined at the first dimension, in which they may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return several tensors joined with those of all ranks. See `allgather`."""
    return list(_Allgather.apply(process_set, name, *tensors))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of one rank, which is counted among all, also in a process set."""
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give each rank its rows of a tensor, and return what all ranks gave to this one.

    `splits` says how many rows each rank gets; the result is a pair then, of the rows that came and
    of how many came from each rank. Without it all get as many.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of a tensor summed, or averaged, over all ranks.

    Where rows cannot be divided evenly, the first ranks get one more.
    """
    options = (op, prescale_factor, postscale_factor, process_set)
    return _compressed([tensor], compression, lambda sent: _scattered(options, name, sent))[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of several tensors, all at once. See `reducescatter`."""
    options = (op, prescale_factor, postscale_factor, process_set)
    return _compressed(tensors, compression, lambda sent: _scattered(options, name, sent))


def _reduced(options: tuple[Any, ...], name: str | None, tensors: list[Tensor]) -> Any:
    return _Allreduce.apply(options, name, *tensors)


def _scattered(options: tuple[Any, ...], name: str | None, tensors: list[Tensor]) -> Any:
    return _Reducescatter.apply(options, name, *tensors)


def _compressed(tensors: Sequence[Tensor], compression: Compressor, call: Any) -> list[Tensor]:
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    results = call(list(sent))
    return [
        compression.decompress(result, context)
        for result, context in zip(results, contexts, strict=True)
    ]
