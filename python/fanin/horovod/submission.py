"""The part of every collective that knows no framework: what is asked for, and under which name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from fanin._bounds import current as bound
from fanin._layers import current
from fanin.horovod.engine import Handle
from fanin.horovod.executor import Own
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import Kind, ReduceOp, Request
from fanin.horovod.world import world

Average: Final = ReduceOp.Average
Sum: Final = ReduceOp.Sum
Adasum: Final = ReduceOp.Adasum
Min: Final = ReduceOp.Min
Max: Final = ReduceOp.Max
Product: Final = ReduceOp.Product

Result = Callable[[Own, Any], Any]
"""Makes the result of an operation of this rank's part and of what rank 0 has said of it."""


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


def first(own: Own, _: object) -> Any:
    """Return the result of an operation with one tensor."""
    return own.results[0]


def every(own: Own, _: object) -> list[Any]:
    """Return the results of an operation with several tensors."""
    return own.results


def set_number(process_set: ProcessSet) -> int:
    """Return the number of a set that this process is in; raises `ValueError` for others."""
    set_ranks(process_set)
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def named(name: str | None, kind: Kind, process_set: ProcessSet) -> str:
    """Return the name, or the next number of operations that have none.

    It is called also where an operation is refused on this rank: the others' next one without a
    name is to have the same number.
    """
    return name or world().engine.name(set_number(process_set), kind)


def reducible(op: ReduceOp, process_set: ProcessSet) -> ReduceOp:
    """Return the operation. Raises `NotImplementedError` for an Adasum that cannot be."""
    if op is Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum is for all ranks: leave process_set out")
        size = world().position.size
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of two of ranks, and there are {size}")
    return op


def scatterable(op: ReduceOp) -> ReduceOp:
    """Return the operation. Raises `NotImplementedError` for one that reducescatter has not."""
    op = ReduceOp(op)
    if op not in (Sum, Average):
        raise NotImplementedError(f"reducescatter is for op Sum and Average, and not {op.name}")
    return op


def rows(
    shape: Sequence[int], splits: Sequence[int] | None, process_set: ProcessSet
) -> tuple[int, ...]:
    """Return how many rows each rank gets; raises `ValueError` where they are not there."""
    size = len(set_ranks(process_set))
    if not shape:
        raise ValueError("alltoall cuts the first dimension, and the tensor has none")
    if splits is None:
        if shape[0] % size:
            raise ValueError(f"{shape[0]} rows cannot be cut for {size} ranks alike: give splits")
        return (shape[0] // size,) * size
    cut = tuple(map(int, splits))
    if len(cut) != size or min(cut) < 0 or sum(cut) > shape[0]:
        raise ValueError(
            f"splits are {list(cut)}: {size} numbers, whose sum is not above the {shape[0]} rows"
        )
    return cut


def refuse_bound() -> None:
    """Raise `ValueError` within `fanin.torch.loss_bound`."""
    if bound() is not None:
        raise ValueError(
            "fanin.torch.loss_bound is not for Horovod's collectives, which are fused with others: "
            "sum what may lose less by torch.distributed, in a group of fanin's"
        )


def submit(
    kind: Kind,
    tensors: Sequence[Any],
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
    """Submit an operation to this process's engine. See `engine.Engine.submit`."""
    name = named(name, kind, process_set)
    if not tensors and kind is not Kind.BARRIER:
        raise ValueError("a group has one tensor at least")
    refuse_bound()
    request = Request(
        0,
        kind,
        name,
        set_number(process_set),
        op=op,
        scales=scales,
        root=int(root),
        splits=splits,
        sparse=sparse,
        layer=current(),
        priority=priority,
    )
    return world().engine.submit(request, tensors, in_place=in_place, result=result)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set wait here."""
    synchronize(submit(Kind.BARRIER, [], None, process_set, every))
