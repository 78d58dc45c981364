"""Collectives of NumPy arrays that return a handle: for TensorFlow, and for Keras on any backend.

The arrays may be views of a framework's memory. They stay as they are until the handle is done, and
results are new arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanin.arrays.operators import read
from fanin.horovod.array_execution import ArrayExecutor
from fanin.horovod.engine import Handle
from fanin.horovod.executor import Own
from fanin.horovod.process_sets import ProcessSet, global_process_set
from fanin.horovod.requests import Kind, ReduceOp
from fanin.horovod.submission import (
    Sum,
    every,
    named,
    reducible,
    rows,
    scatterable,
    submit,
    synchronize,
)
from fanin.horovod.world import world


def allreduce(
    arrays: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Handle:
    """Reduce arrays, all at once, under one name; the handle has a list of them.

    `scales` are the factors before and after the sum. Raises `NotImplementedError` for an Adasum of
    a process set, or of a number of ranks that is no power of two.
    """
    op = reducible(ReduceOp(op), process_set)
    return _submit(Kind.ALLREDUCE, arrays, name, process_set, op=op, scales=scales)


def allgather(
    arrays: Sequence[Any], name: str | None, process_set: ProcessSet, *, sparse: bool = False
) -> Handle:
    """Join arrays with those of all ranks at their first dimension; the handle has a list of them.

    `sparse` says that they are the parts of one sparse array, which other ranks ask for as a sum.
    """
    if sparse:
        name = named(name, Kind.ALLREDUCE, process_set)
    return _submit(Kind.ALLGATHER, arrays, name, process_set, sparse=sparse)


def broadcast(
    arrays: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle:
    """Give all ranks the root's arrays, under one name; the handle has a list of them."""
    return _submit(Kind.BROADCAST, arrays, name, process_set, root=root_rank)


def alltoall(
    array: Any, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Handle:
    """Give each rank its rows of an array.

    The handle has the rows that came, and a list of how many came from each rank. Raises
    `ValueError` if the splits ask for rows that are not there.
    """
    name = named(name, Kind.ALLTOALL, process_set)
    given = read(array)

    def result(own: Own, _: object) -> tuple[Any, list[int]]:
        return own.results[0], list(own.received)

    return submit(
        Kind.ALLTOALL,
        [given],
        name,
        _checked(process_set),
        result,
        splits=rows(given.shape, splits, process_set),
    )


def reducescatter(
    arrays: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Handle:
    """Sum or average arrays, and give each rank a part of each; the handle has a list of them."""
    op = scatterable(op)
    return _submit(Kind.REDUCESCATTER, arrays, name, process_set, op=op, scales=scales)


def join() -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    It adds zeros to the others' sums and averages meanwhile, which count it. Returns the rank that
    joined last.
    """
    _checked(global_process_set)
    last: int = synchronize(world().engine.join(-1))
    return last


def _submit(
    kind: Kind,
    arrays: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    *,
    op: ReduceOp = Sum,
    scales: tuple[float, float] = (1.0, 1.0),
    root: int = 0,
    sparse: bool = False,
) -> Handle:
    given = [read(array) for array in arrays]
    return submit(
        kind,
        given,
        name,
        _checked(process_set),
        every,
        op=op,
        scales=scales,
        root=root,
        sparse=sparse,
    )


def _checked(process_set: ProcessSet) -> ProcessSet:
    """Return the set. Raises `ValueError` if this process's job is of another framework."""
    if not isinstance(world().engine.executor, ArrayExecutor):
        raise ValueError(
            f"{world().framework.name} is initialized in this process, and has the tensors of its "
            "framework alone: call its shutdown(), and the init() of this one"
        )
    return process_set
