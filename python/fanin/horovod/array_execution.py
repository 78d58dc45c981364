"""Executes what all ranks have agreed on, on a group of `fanin.arrays`: for TensorFlow and Keras.

Tensors are NumPy arrays here, which may be views of a framework's memory. They are read and never
written: each result is a new array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from fanin.arrays.group import Group
from fanin.arrays.group import Handle as Sum
from fanin.arrays.operators import Array, Op
from fanin.arrays.peers import LOSS_TIMEOUT
from fanin.errors import AllReduceTimeout, FaninError
from fanin.horovod.array_adasum import adasum
from fanin.horovod.executor import Executor, Own
from fanin.horovod.requests import Batch, DType, Form, Kind, Operation, ReduceOp

_OPS: Final[dict[ReduceOp, Op]] = {
    ReduceOp.Average: "sum",
    ReduceOp.Sum: "sum",
    ReduceOp.Min: "min",
    ReduceOp.Max: "max",
    ReduceOp.Product: "product",
}
# The kinds of dtypes (NumPy's letters) that have an operation; bfloat16 goes with floats.
_REDUCED: Final = {
    ReduceOp.Average: "iufc",
    ReduceOp.Sum: "biufc",
    ReduceOp.Adasum: "f",
    ReduceOp.Min: "biuf",
    ReduceOp.Max: "biuf",
    ReduceOp.Product: "biufc",
}
_BFLOAT16: Final = "bfloat16"


class ArrayExecutor(Executor):
    """Executes on a group of all ranks, and on groups that are split from it."""

    def __init__(self, world: Group) -> None:
        self._world = world
        self._groups: dict[int, tuple[tuple[int, ...], Group]] = {
            0: (tuple(range(world.world_size)), world)
        }

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether the ranks or their services can make one array of several."""
        return _kind(dtype_of(dtype)) in _REDUCED[op]

    def own(self, inputs: Sequence[Any], in_place: bool) -> Own:
        """Return the arrays of an operation that is submitted now."""
        assert not in_place, "arrays are read alone"
        return Own(inputs, in_place)

    def form(self, tensor: Any) -> Form:
        """Return an array's form."""
        return Form(tuple(tensor.shape), tensor.dtype, "cpu")

    def memory(self, own: Own) -> set[int]:
        """Return nothing: a sum under way has copies."""
        del own
        return set()

    def of_words(self, words: bytes) -> Array:
        """Return bytes as an array of uint8."""
        return np.frombuffer(words, np.uint8)

    def to_words(self, tensor: Any) -> bytes:
        """Return the bytes of an array of uint8."""
        return bytes(tensor.tobytes())

    def execute(self, batch: Batch, mine: Sequence[Own | None]) -> Callable[[], None] | None:
        """Execute operations of one kind. See `executor.Executor`."""
        execution = _EXECUTIONS.get(batch.operations[0].request.kind)
        if execution is None:
            return None
        ranks, group = self._groups[batch.operations[0].request.process_set]
        return execution(batch.operations, mine, group, ranks)

    def settle(self, owns: Sequence[Own]) -> None:
        """Return at once: arrays are in the host's memory."""

    def has(self, process_set: int) -> bool:
        """Return whether this rank is in a process set."""
        return process_set in self._groups

    def add(self, process_set: int, ranks: tuple[int, ...]) -> None:
        """Split a process set's group from the world's; all ranks of the job call it."""
        is_in = self._world.rank in ranks
        place = ranks.index(self._world.rank) if is_in else 0
        group = self._world.split(0 if is_in else None, place)
        if group is not None:
            self._groups[process_set] = ranks, group

    def remove(self, process_set: int) -> None:
        """Leave a process set's group, once all its ranks have what was sent there."""
        kept = self._groups.pop(process_set, None)
        if kept is not None:
            kept[1].barrier()
            kept[1].close()

    def close(self, *, world: bool) -> None:
        """Leave all groups, but for the world's unless asked."""
        for number in sorted(self._groups, reverse=True):
            if number or world:
                self._groups.pop(number)[1].close()

    def pulse(self) -> None:
        """Make a sum of nothing with all ranks."""
        self._world.all_reduce(np.zeros(1, np.float32))

    def why(self) -> Exception | None:
        """Return the error of a rank that is gone, if a service knows of one soon."""
        try:
            self._world.all_reduce_async(np.zeros(1, np.float32)).wait(LOSS_TIMEOUT)
        except AllReduceTimeout:
            return None  # fanin does not know either
        except FaninError as cause:
            return cause
        return None


def dtype_of(dtype: DType) -> np.dtype[Any]:
    """Return the dtype of an array's form as what it is."""
    return cast("np.dtype[Any]", dtype)


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if dtype.name == _BFLOAT16 else dtype.kind


_Execution = Callable[
    [Sequence[Operation], Sequence[Own | None], Group, tuple[int, ...]], Callable[[], None] | None
]


class _Piece:
    """One array of a batch, and whose it is."""

    def __init__(self, operation: Operation, own: Own | None, position: int) -> None:
        self.request = operation.request
        self.form = operation.request.tensors[position]
        self._own = own
        self._position = position
        # Whoever has joined adds zeros.
        self.array: Array = (
            np.zeros(self.form.shape, dtype_of(self.form.dtype))
            if own is None
            else own.inputs[position]
        )

    def scaled(self) -> Array:
        return scaled(self.array, self.request.scales[0])

    def give(self, values: Array) -> None:
        """Take the values of the result: memory that nobody else has."""
        if self._own is not None:
            self._own.results[self._position] = values


def _pieces(
    operations: Sequence[Operation], mine: Sequence[Own | None]
) -> Iterator[tuple[np.dtype[Any], list[_Piece]]]:
    """Yield the arrays of operations, those of one dtype together, on all ranks alike."""
    alike: dict[np.dtype[Any], list[_Piece]] = {}
    for operation, own in zip(operations, mine, strict=True):
        for position, form in enumerate(operation.request.tensors):
            piece = _Piece(operation, own, position)
            alike.setdefault(dtype_of(form.dtype), []).append(piece)
    yield from alike.items()


@dataclass
class _Begun:
    """A sum under way, of arrays of one dtype."""

    sum: Sum
    pieces: list[_Piece]

    def end(self, size: int) -> None:
        summed: Array = self.sum.wait()
        cuts = np.cumsum([piece.array.size for piece in self.pieces])[:-1]
        for piece, part in zip(self.pieces, np.split(summed, cuts), strict=True):
            result = _after(part, piece, size).reshape(piece.form.shape)
            # Not a view of what all others are in.
            shared = len(self.pieces) > 1 and np.shares_memory(result, summed)
            piece.give(result.copy() if shared else result)


def _allreduce(
    operations: Sequence[Operation],
    mine: Sequence[Own | None],
    group: Group,
    ranks: tuple[int, ...],
) -> Callable[[], None]:
    op = operations[0].request.op
    begun: list[_Begun] = []
    for _, pieces in _pieces(operations, mine):
        if op is ReduceOp.Adasum:
            _adasum(pieces, group)
            continue
        flat = np.concatenate([piece.scaled().reshape(-1) for piece in pieces])
        begun.append(_Begun(group.all_reduce_async(flat, _OPS[op]), pieces))

    def end() -> None:
        for each in begun:
            each.end(len(ranks))

    return end


def _after(summed: Array, piece: _Piece, size: int) -> Array:
    """Return the average of a sum, if that is asked for, times the factor after it."""
    factor = piece.request.scales[1]
    if piece.request.op is ReduceOp.Average:
        if _kind(summed.dtype) not in "fc":
            summed = truncated_average(summed, size)
        else:
            factor /= size
    return scaled(summed, factor)


def truncated_average(summed: Array, size: int) -> Array:
    """Return a sum of integers over the number of ranks, without the fraction."""
    # NumPy refuses a divisor that the dtype cannot hold: 128 ranks are too many for int8.
    is_narrow = size > np.iinfo(summed.dtype).max
    wide = summed.astype(np.int64) if is_narrow else summed
    quotient = wide // size
    average: Array = quotient + ((wide % size != 0) & (wide < 0)).astype(wide.dtype)
    return average.astype(summed.dtype, copy=False)


def scaled(array: Array, factor: float) -> Array:
    """Return an array times a factor: in float64 for integers, float32 for halves."""
    if factor == 1.0:
        return array
    dtype = array.dtype
    if _kind(dtype) not in "fc":
        return (array.astype(np.float64) * factor).astype(dtype)
    if dtype.itemsize < 4:
        return (array.astype(np.float32) * np.float32(factor)).astype(dtype)
    product: Array = np.multiply(array, dtype.type(factor))
    return product


def _adasum(pieces: list[_Piece], group: Group) -> None:
    flat = np.concatenate([piece.scaled().reshape(-1) for piece in pieces])
    gathered = _gathered(_bytes(flat), group)
    cuts = np.cumsum([piece.array.size for piece in pieces])[:-1]
    of_ranks = [np.split(row.view(flat.dtype), cuts) for row in gathered]
    for position, piece in enumerate(pieces):
        result = adasum([each[position] for each in of_ranks])
        piece.give(scaled(result, piece.request.scales[1]).reshape(piece.form.shape))


def _allgather(
    operations: Sequence[Operation],
    mine: Sequence[Own | None],
    group: Group,
    ranks: tuple[int, ...],
) -> None:
    owns = [own for own in mine if own is not None]
    # For each array, the bytes of each rank.
    lengths = [
        [of_rank[position] * form.row_bytes for of_rank in operation.of_all]
        for operation in operations
        for position, form in enumerate(operation.request.tensors)
    ]
    ours = np.concatenate([_bytes(array) for own in owns for array in own.inputs])
    longest = max(sum(length[place] for length in lengths) for place in range(len(ranks)))
    padded = np.zeros(longest, np.uint8)
    padded[: ours.size] = ours
    gathered = _gathered(padded, group)
    begins = [0] * len(ranks)
    of_arrays = iter(lengths)
    for operation, own in zip(operations, owns, strict=True):
        for position, form in enumerate(operation.request.tensors):
            length = next(of_arrays)
            parts = [
                row[begin : begin + n]
                for row, begin, n in zip(gathered, begins, length, strict=True)
            ]
            begins = [begin + n for begin, n in zip(begins, length, strict=True)]
            values = np.concatenate(parts).view(dtype_of(form.dtype))
            total = sum(of_rank[position] for of_rank in operation.of_all)
            own.results[position] = values.reshape(total, *form.shape[1:])


def _gathered(ours: Array, group: Group) -> list[Array]:
    """Return each rank's bytes, of which all have as many."""
    if not ours.size:
        return [ours] * group.world_size
    return list(group.all_gather(ours).reshape(group.world_size, -1))


def _broadcast(
    operations: Sequence[Operation],
    mine: Sequence[Own | None],
    group: Group,
    ranks: tuple[int, ...],
) -> None:
    root = ranks.index(operations[0].request.root)
    owns = [own for own in mine if own is not None]
    inputs = [array for own in owns for array in own.inputs]
    if group.rank == root:
        flat = np.concatenate([_bytes(array) for array in inputs])
    else:
        flat = np.empty(sum(array.nbytes for array in inputs), np.uint8)
    if flat.size:
        flat = group.broadcast(flat, root)
    parts = iter(np.split(flat, np.cumsum([array.nbytes for array in inputs])[:-1]))
    for operation, own in zip(operations, owns, strict=True):
        for position, form in enumerate(operation.request.tensors):
            values = next(parts).copy().view(dtype_of(form.dtype))
            own.results[position] = values.reshape(form.shape)


def _alltoall(
    operations: Sequence[Operation],
    mine: Sequence[Own | None],
    group: Group,
    ranks: tuple[int, ...],
) -> None:
    del ranks
    for operation, own in zip(operations, mine, strict=True):
        assert own is not None
        form = operation.request.tensors[0]
        own.received = tuple(splits[group.rank] for splits in operation.of_all)
        sent = [rows * form.row_bytes for rows in operation.of_all[group.rank]]
        came = group.all_to_all(_bytes(own.inputs[0])[: sum(sent)], sent)
        values = came.view(dtype_of(form.dtype))
        own.results[0] = values.reshape(sum(own.received), *form.shape[1:])


def _reducescatter(
    operations: Sequence[Operation],
    mine: Sequence[Own | None],
    group: Group,
    ranks: tuple[int, ...],
) -> None:
    size = len(ranks)
    for dtype, pieces in _pieces(operations, mine):
        # The part for each rank, in one piece; the first ranks get a row more, the others zeros.
        cuts = [np.array_split(piece.scaled(), size) for piece in pieces]
        columns = [
            np.concatenate([cut[place].reshape(-1) for cut in cuts]) for place in range(size)
        ]
        longest = columns[0].size
        source = np.zeros((size, longest), dtype)
        for row, column in zip(source, columns, strict=True):
            row[: column.size] = column
        summed = group.reduce_scatter(source.reshape(-1)) if longest else source[0]
        lengths = [cut[group.rank].size for cut in cuts]
        parts = np.split(summed[: sum(lengths)], np.cumsum(lengths)[:-1])
        for piece, part, cut in zip(pieces, parts, cuts, strict=True):
            piece.give(_after(part.copy(), piece, size).reshape(cut[group.rank].shape))


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_EXECUTIONS: Final[dict[Kind, _Execution]] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}
