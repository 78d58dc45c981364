"""Collectives that return a handle, or work in place: nothing is differentiated through them.

The tensors of an operation may be changed by the program only after `synchronize`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fanin._bounds import current as bound
from fanin._layers import current
from fanin.horovod.engine import Handle
from fanin.horovod.execution import Own
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import Kind, ReduceOp, Request
from fanin.horovod.world import world

Average: Final = ReduceOp.Average
Sum: Final = ReduceOp.Sum
Adasum: Final = ReduceOp.Adasum
Min: Final = ReduceOp.Min
Max: Final = ReduceOp.Max
Product: Final = ReduceOp.Product

_SPLITS: Final = (torch.int32, torch.int64)


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that is meant: `average` is what `op` was called in old programs."""
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError("op and average are given: give op alone")
    warnings.warn("average is deprecated: give op=hvd.Average or op=hvd.Sum", DeprecationWarning, 3)
    return Average if average else Sum


def poll(handle: Handle) -> bool:
    """Whether an operation is over, so that `synchronize` returns at once."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result.

    Raises `HorovodInternalError` where the ranks disagree about the operation, and where one of
    them, or what sums for them, is gone.
    """
    return handle.wait()


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
    return _reduce([tensor], name, reduce_op(op, average), scales, process_set, _first)


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
    return _reduce([tensor], name, chosen, scales, process_set, _first, in_place=True)


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
    handle = _reduce([tensor], name, chosen, scales, process_set, _first, in_place=True)
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
        _first,
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
    return _reduce(tensors, name, reduce_op(op, average), scales, process_set, _all)


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
    return _reduce(tensors, name, chosen, scales, process_set, _all, in_place=True)


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
    handle = _reduce(tensors, name, chosen, scales, process_set, _all, in_place=True)
    result: list[Tensor] = synchronize(handle)
    return result


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
    name = name or world().engine.name(_number(process_set), Kind.ALLREDUCE)
    handle = _submit(Kind.ALLGATHER, parts, name, process_set, _all, sparse=True)

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
    return _submit(Kind.ALLGATHER, [tensor], name, process_set, _first)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Join several tensors with those of all ranks, all at once, under one name."""
    return _submit(Kind.ALLGATHER, tensors, name, process_set, _all)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Give all ranks a tensor like the root's. See `broadcast`."""
    return _submit(Kind.BROADCAST, [tensor], name, process_set, _first, root=root_rank)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Make a tensor what the root's is."""
    return _submit(
        Kind.BROADCAST, [tensor], name, process_set, _first, root=root_rank, in_place=True
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
    name = name or world().engine.name(_number(process_set), Kind.ALLTOALL)
    kind = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    sent = _rows(tensor, splits, len(set_ranks(process_set)))

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
    return _scatter([tensor], name, op, process_set, scales, _first)


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
    return _scatter(tensors, name, op, process_set, scales, _all)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    It adds zeros to the others' sums and averages meanwhile, which count it: for CUDA tensors on
    the CUDA device of that number, the current one if it is -1. Returns the rank that joined last.
    """
    if device < 0 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()  # of this thread: the engine's has its own
    last: int = synchronize(world().engine.join(device))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set wait here."""
    synchronize(_submit(Kind.BARRIER, [], None, process_set, _all))


def _first(own: Own, _: object) -> Tensor:
    return own.results[0]


def _all(own: Own, _: object) -> list[Tensor]:
    return own.results


def _number(process_set: ProcessSet) -> int:
    set_ranks(process_set)
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def _reduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    result: Callable[[Own, Any], Any],
    *,
    in_place: bool = False,
) -> Handle:
    if op is Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum is for all ranks: leave process_set out")
        size = world().position.size
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of two of ranks, and there are {size}")
    return _submit(
        Kind.ALLREDUCE, tensors, name, process_set, result, op=op, scales=scales, in_place=in_place
    )


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    scales: tuple[float, float],
    result: Callable[[Own, Any], Any],
) -> Handle:
    op = ReduceOp(op)
    if op not in (Sum, Average):
        raise NotImplementedError(f"reducescatter is for op Sum and Average, and not {op.name}")
    return _submit(Kind.REDUCESCATTER, tensors, name, process_set, result, op=op, scales=scales)


def _submit(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Own, Any], Any],
    *,
    op: ReduceOp = Sum,
    scales: tuple[float, float] = (1.0, 1.0),
    root: int = 0,
    splits: tuple[int, ...] = (),
    sparse: bool = False,
    in_place: bool = False,
    priority: int = 0,
) -> Handle:
    engine = world().engine
    number = _number(process_set)
    # Also where it is refused here: the others' next one without a name is to be the same.
    name = name or engine.name(number, kind)
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise ValueError("a tensor is sparse: use sparse_allreduce_async, or to_dense() first")
    if any(tensor.is_quantized for tensor in tensors):
        raise ValueError("a tensor is quantized: dequantize() it first")
    if in_place and any(map(_overlaps, tensors)):
        raise ValueError("a tensor is expanded, and cannot be written to: clone() it first")
    if len({tensor.device for tensor in tensors}) > 1:
        raise RuntimeError("tensors of a group are on one device")  # as Horovod does
    if not tensors and kind is not Kind.BARRIER:
        raise ValueError("a group has one tensor at least")
    if bound() is not None:
        raise ValueError(
            "fanin.torch.loss_bound is not for Horovod's collectives, which are fused with others: "
            "sum what may lose less by torch.distributed, in a group of fanin's"
        )
    request = Request(
        0,
        kind,
        name,
        number,
        op=op,
        scales=scales,
        root=int(root),
        splits=splits,
        sparse=sparse,
        layer=current(),
        priority=priority,
    )
    return engine.submit(request, tensors, in_place=in_place, result=result)


def _overlaps(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in steps)


def _rows(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return how many rows each rank gets; raises `ValueError` where they are not there."""
    if not tensor.dim():
        raise ValueError("alltoall cuts the first dimension, and the tensor has none")
    there = tensor.shape[0]
    if splits is None:
        if there % size:
            raise ValueError(f"{there} rows cannot be cut for {size} ranks alike: give splits")
        return (there // size,) * size
    if isinstance(splits, Tensor) and splits.dtype not in _SPLITS:
        raise ValueError(f"splits are {splits.dtype}, and must be int32 or int64")
    rows = tuple(map(int, splits))
    if len(rows) != size or min(rows) < 0 or sum(rows) > there:
        raise ValueError(
            f"splits are {list(rows)}: {size} numbers, whose sum is not above the {there} rows"
        )
    return rows
