"""Collectives that return a handle, or work in place: nothing is differentiated through them.

The tensors of an operation may be changed by the program only after `synchronize`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from fanin._layers import Layer, of_layer
from fanin.horovod.engine import Engine, Handle, Recurring
from fanin.horovod.executor import Own
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import Kind, ReduceOp
from fanin.horovod.submission import (
    Average,
    Result,
    Sum,
    every,
    first,
    named,
    reduce_op,
    reducible,
    refuse_bound,
    rows,
    scatterable,
    set_number,
    submit,
    synchronize,
)
from fanin.horovod.world import world

_SPLITS: Final = (torch.int32, torch.int64)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce a tensor over the ranks of a process set. See `allreduce`."""
    scales = float(prescale_factor), float(postscale_factor)
    return _reduce([tensor], name, reduce_op(op, average), scales, process_set, first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce a tensor in place."""
    scales = float(prescale_factor), float(postscale_factor)
    chosen = reduce_op(op, average)
    return _reduce([tensor], name, chosen, scales, process_set, first, in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place, and return it."""
    chosen = reduce_op(op, average)
    scales = float(prescale_factor), float(postscale_factor)
    handle = _reduce([tensor], name, chosen, scales, process_set, first, in_place=True)
    result: Tensor = synchronize(handle)
    return result


def reduce_async(
    tensor: Tensor, op: ReduceOp, name: str | None, priority: int, *, in_place: bool
) -> Handle:
    """Reduce a tensor; of what is ready, the largest priority goes first. For `fanin.byteps`."""
    return _submit(
        Kind.ALLREDUCE,
        [tensor],
        name,
        global_process_set,
        first,
        op=op,
        in_place=in_place,
        priority=priority,
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors, all at once, under one name."""
    scales = float(prescale_factor), float(postscale_factor)
    return _reduce(tensors, name, reduce_op(op, average), scales, process_set, every)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors in place, all at once, under one name."""
    scales = float(prescale_factor), float(postscale_factor)
    chosen = reduce_op(op, average)
    return _reduce(tensors, name, chosen, scales, process_set, every, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, and return them."""
    scales = float(prescale_factor), float(postscale_factor)
    chosen = reduce_op(op, average)
    handle = _reduce(tensors, name, chosen, scales, process_set, every, in_place=True)
    result: list[Tensor] = synchronize(handle)
    return result


class RecurringAllreduce:
    """Reduces the tensors of one name in place, step after step, and looks at them once."""

    def __init__(
        self,
        name: str,
        op: ReduceOp,
        scales: tuple[float, float],
        process_set: ProcessSet,
        layer: Layer,
    ) -> None:
        self._name = name
        self._op = op
        self._scales = scales
        self._process_set = process_set
        self._layer = layer
        self._engine: weakref.ref[Engine] | None = None
        self._recurring: Recurring | None = None

    def start(self, tensors: Sequence[Tensor]) -> Handle:
        """Reduce the tensors, all at once, as `grouped_allreduce_async_` does."""
        engine, recurring = world().engine, self._recurring
        if (
            recurring is not None
            and self._engine is not None
            and self._engine() is engine
            and set_number(self._process_set) == recurring.request.process_set
            and _are_like(tensors, recurring)
        ):
            refuse_bound()
            return engine.submit_again(recurring, tensors, in_place=True, result=every)
        with of_layer(self._layer):
            handle = _reduce(
                tensors, self._name, self._op, self._scales, self._process_set, every, in_place=True
            )
        self._engine, self._recurring = weakref.ref(engine), Recurring(handle.request)
        return handle


def _are_like(tensors: Sequence[Tensor], recurring: Recurring) -> bool:
    """Whether nothing is to be said of tensors that was not said of those before them."""
    return all(
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.dtype is form.dtype
        and tensor.shape == form.shape
        and tensor.device.type == form.device
        and tensor.device == tensors[0].device
        for tensor, form in zip(tensors, recurring.request.tensors, strict=True)
    )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Sum or average sparse tensors, by gathering what each rank has.

    Returns a function that waits for the result, which is not coalesced, and returns it.
    """
    op = ReduceOp(op)
    if op not in (Sum, Average):
        raise ValueError(f"sparse tensors are summed or averaged, and op is {op.name}")
    parts = [tensor._indices().t().contiguous(), tensor._values()]
    name = named(name, Kind.ALLREDUCE, process_set)
    handle = _submit(Kind.ALLGATHER, parts, name, process_set, every, sparse=True)

    def result() -> Tensor:
        indices, values = synchronize(handle)
        if op is Average:
            values = values / len(set_ranks(process_set))
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Join the tensors of all ranks at their first dimension. See `allgather`."""
    return _submit(Kind.ALLGATHER, [tensor], name, process_set, first)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Join several tensors with those of all ranks, all at once, under one name."""
    return _submit(Kind.ALLGATHER, tensors, name, process_set, every)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Give all ranks a tensor like the root's. See `broadcast`."""
    return _submit(Kind.BROADCAST, [tensor], name, process_set, first, root=root_rank)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Make a tensor what the root's is."""
    return _submit(
        Kind.BROADCAST, [tensor], name, process_set, first, root=root_rank, in_place=True
    )


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Make a tensor what the root's is, and return it."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Give each rank its rows of a tensor. See `alltoall`.

    The result is the pair of what this rank got, and of how many rows came from each.
    """
    name = named(name, Kind.ALLTOALL, process_set)
    kind = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    if isinstance(splits, Tensor) and splits.dtype not in _SPLITS:
        raise ValueError(f"splits are {splits.dtype}, and must be int32 or int64")
    sent = rows(tensor.shape, None if splits is None else list(map(int, splits)), process_set)

    def result(own: Own, _: object) -> tuple[Tensor, Tensor]:
        received = torch.tensor(own.received, dtype=kind.dtype, device=kind.device)
        return own.results[0], received

    return _submit(Kind.ALLTOALL, [tensor], name, process_set, result, splits=sent)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Sum or average tensors, and give each rank a part of the rows. See `reducescatter`."""
    scales = float(prescale_factor), float(postscale_factor)
    return _scatter([tensor], name, op, process_set, scales, first)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Sum or average several tensors, all at once, and give each rank a part of each."""
    scales = float(prescale_factor), float(postscale_factor)
    return _scatter(tensors, name, op, process_set, scales, every)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    It adds zeros to the others' sums and averages meanwhile, which count it: for CUDA tensors on
    the CUDA device of that number, the current one if it is -1. Returns the rank that joined last.
    """
    if device < 0 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()  # of this thread: the engine's has its own
    last: int = synchronize(world().engine.join(device))
    return last


def _reduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    result: Result,
    *,
    in_place: bool = False,
) -> Handle:
    op = reducible(op, process_set)
    return _submit(
        Kind.ALLREDUCE, tensors, name, process_set, result, op=op, scales=scales, in_place=in_place
    )


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    scales: tuple[float, float],
    result: Result,
) -> Handle:
    op = scatterable(op)
    return _submit(Kind.REDUCESCATTER, tensors, name, process_set, result, op=op, scales=scales)


def _submit(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Result,
    *,
    op: ReduceOp = Sum,
    scales: tuple[float, float] = (1.0, 1.0),
    root: int = 0,
    splits: tuple[int, ...] = (),
    sparse: bool = False,
    in_place: bool = False,
    priority: int = 0,
) -> Handle:
    # Also where it is refused here: the others' next one without a name is to be the same.
    name = named(name, kind, process_set)
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise ValueError("a tensor is sparse: use sparse_allreduce_async, or to_dense() first")
    if any(tensor.is_quantized for tensor in tensors):
        raise ValueError("a tensor is quantized: dequantize() it first")
    if in_place and any(map(_overlaps, tensors)):
        raise ValueError("a tensor is expanded, and cannot be written to: clone() it first")
    if len({tensor.device for tensor in tensors}) > 1:
        raise RuntimeError("tensors of a group are on one device")  # as Horovod does
    return submit(
        kind,
        tensors,
        name,
        process_set,
        result,
        op=op,
        scales=scales,
        root=root,
        splits=splits,
        sparse=sparse,
        in_place=in_place,
        priority=priority,
    )


def _overlaps(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in steps)
