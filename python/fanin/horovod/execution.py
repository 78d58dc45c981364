"""Executes what all ranks have agreed on, on torch's groups of fanin's backend.

Sums and averages are fanin's; what moves bytes, and other reductions, is as the backend serves it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import ProcessGroup, Work

from fanin._layers import foremost, of_layer
from fanin.errors import AllReduceTimeout, FaninError
from fanin.horovod import executor
from fanin.horovod.adasum import adasum
from fanin.horovod.requests import Batch, DType, Form, Kind, Operation, ReduceOp
from fanin.torch.backend.channel import LOSS_TIMEOUT
from fanin.torch.works.collectives import DTYPES

# A dtype that Gloo and fanin cannot add is added as one that has room for it.
_ADDED_AS: Final = {torch.bool: torch.uint8, torch.int16: torch.int32}
_ADDED: Final = {*DTYPES, *_ADDED_AS}
# As pairs of numbers; torch divides no complex32.
_ADDED_IN_PAIRS: Final = {
    torch.complex32: {ReduceOp.Sum},
    torch.complex64: {ReduceOp.Sum, ReduceOp.Average, ReduceOp.Adasum},
    torch.complex128: {ReduceOp.Sum, ReduceOp.Average, ReduceOp.Adasum},
}
_OPS: Final = {
    ReduceOp.Average: distributed.ReduceOp.SUM,
    ReduceOp.Sum: distributed.ReduceOp.SUM,
    ReduceOp.Min: distributed.ReduceOp.MIN,
    ReduceOp.Max: distributed.ReduceOp.MAX,
    ReduceOp.Product: distributed.ReduceOp.PRODUCT,
}

# Averaged by what sums them, in one pass.
_AVERAGED: Final = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_DONE: Final = {**_OPS, ReduceOp.Average: distributed.ReduceOp.AVG}
ALONE_BYTES: Final = 1 << 20
"""Tensors from this size on are summed where they are."""


def reduces(dtype: DType, op: ReduceOp) -> bool:
    """Return whether fanin's services or Gloo can make one tensor of several."""
    known = cast("torch.dtype", dtype)
    return known in _ADDED or op in _ADDED_IN_PAIRS.get(known, ())


class Own(executor.Own):
    """The tensors of this rank for an operation, and where results go."""

    inputs: list[Tensor]
    results: list[Tensor]

    def __init__(self, inputs: Sequence[Tensor], in_place: bool) -> None:
        super().__init__([tensor.detach() for tensor in inputs], in_place)
        # Work that the program has queued on the device comes before.
        self._queued = [
            torch.cuda.current_stream(tensor.device).record_event()
            for tensor in self.inputs
            if tensor.is_cuda
        ]

    def begin(self) -> None:
        """Wait for what the program has queued on devices before it submitted."""
        for event in self._queued:
            event.synchronize()

    def taken(self) -> None:
        """Let the thread that waited use the results."""
        for tensor in self.results:
            if tensor.is_cuda and not self.in_place:
                # The engine's stream owns the memory, and keeps it until this thread's has used it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def give(self, position: int, values: Tensor) -> None:
        """Take the values of one result, which may be in a memory that others share."""
        if self.in_place:
            target = self.inputs[position]
            if target.data_ptr() != values.data_ptr():
                target.copy_(values.reshape(target.shape))
            self.results[position] = target
        else:
            self.results[position] = values


class Groups:
    """The groups of the process sets that this rank is in."""

    def __init__(self, world: ProcessGroup, rank: int, size: int, room_bytes: int) -> None:
        self._rank = rank
        self._room_bytes = room_bytes
        self._groups: dict[int, tuple[tuple[int, ...], ProcessGroup]] = {
            0: (tuple(range(size)), world)
        }
        self.joined_on = -1
        """The number of the CUDA device where a rank that has joined adds zeros."""
        self._rooms: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def room(self, like: Tensor, elements: int) -> Tensor:
        """Return memory for so many elements, until it is `returned`.

        It is used again and again, as the kernel would fill new memory with zeros.
        """
        kept = self._rooms.setdefault((like.dtype, like.device), [])
        if elements > (usual := self._room_bytes // like.element_size()):
            return like.new_empty(elements)
        return kept.pop() if kept else like.new_empty(usual)

    def returned(self, room: Tensor) -> None:
        """Take memory back, from any thread."""
        if room.nbytes <= self._room_bytes:
            self._rooms[room.dtype, room.device].append(room)

    def zeros(self, form: Form) -> Tensor:
        """Return what a rank that has joined adds."""
        return torch.zeros(form.shape, dtype=dtype_of(form), device=self.device_of(form))

    def device_of(self, form: Form) -> torch.device:
        """Return where this rank has tensors of its own for others' of a form."""
        if form.device == "cpu" or self.joined_on < 0:
            return torch.device(form.device)
        return torch.device(form.device, self.joined_on)

    def has(self, process_set: int) -> bool:
        """Whether this rank is in it."""
        return process_set in self._groups

    def of(self, process_set: int) -> tuple[ProcessGroup, int, int]:
        """Return a set's group, the place of this rank in it, and its size."""
        ranks, group = self._groups[process_set]
        return group, ranks.index(self._rank), len(ranks)

    def place(self, process_set: int, rank: int) -> int:
        """Return the place of a rank in a set."""
        return self._groups[process_set][0].index(rank)

    def add(self, process_set: int, ranks: tuple[int, ...]) -> None:
        """Make a set's group; all ranks of the world call it."""
        world, _, _ = self.of(0)
        of_world = distributed.get_process_group_ranks(world)
        members = [of_world[rank] for rank in ranks]
        group = distributed.new_group(members, backend="fanin")
        if self._rank in ranks:
            assert isinstance(group, ProcessGroup)
            self._groups[process_set] = ranks, group

    def remove(self, process_set: int) -> None:
        """Leave a set's group."""
        kept = self._groups.pop(process_set, None)
        if kept is not None:
            distributed.destroy_process_group(kept[1])

    def close(self, *, world: bool) -> None:
        """Leave all of them, but for the world's unless asked."""
        for number in [*self._groups]:
            if number or world:
                _, group = self._groups.pop(number)
                distributed.destroy_process_group(group)


class TorchExecutor(executor.Executor):
    """Executes on a group of fanin's backend, and on groups of some of its ranks."""

    def __init__(self, world: ProcessGroup, rank: int, size: int, room_bytes: int) -> None:
        self.world = world
        self._groups = Groups(world, rank, size, room_bytes)

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether fanin's services or Gloo can make one tensor of several."""
        return reduces(dtype, op)

    def own(self, inputs: Sequence[Any], in_place: bool) -> Own:
        """Return this rank's part of an operation that is submitted now."""
        return Own(inputs, in_place)

    def form(self, tensor: Any) -> Form:
        """Return a tensor's form."""
        return form_of(tensor)

    def memory(self, own: executor.Own) -> set[int]:
        """Return the addresses of the tensors' storages."""
        return {tensor.untyped_storage().data_ptr() for tensor in own.inputs}

    def of_words(self, words: bytes) -> Tensor:
        """Return bytes as a tensor of uint8."""
        if not words:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def to_words(self, tensor: Any) -> bytes:
        """Return the bytes of a tensor of uint8."""
        return bytes(tensor.numpy().tobytes())

    def execute(
        self, batch: Batch, mine: Sequence[executor.Own | None]
    ) -> Callable[[], None] | None:
        """Execute operations of one kind. See `executor.Executor`."""
        execution = _EXECUTIONS.get(batch.operations[0].request.kind)
        if execution is None:
            return None
        with torch.no_grad():
            return execution(batch.operations, cast("Sequence[Own | None]", mine), self._groups)

    def join_on(self, device: int) -> None:
        """Add zeros on that CUDA device once this rank has joined; -1 is any."""
        self._groups.joined_on = device

    def settle(self, owns: Sequence[executor.Own]) -> None:
        """Wait for what this thread has queued on devices."""
        for device in {t.device for own in owns for t in own.inputs if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def has(self, process_set: int) -> bool:
        """Return whether this rank is in a process set."""
        return self._groups.has(process_set)

    def add(self, process_set: int, ranks: tuple[int, ...]) -> None:
        """Make a process set's group; all ranks of the job call it."""
        self._groups.add(process_set, ranks)

    def remove(self, process_set: int) -> None:
        """Leave a process set's group."""
        self._groups.remove(process_set)

    def close(self, *, world: bool) -> None:
        """Leave all groups, but for the world's unless asked."""
        self._groups.close(world=world)

    def pulse(self) -> None:
        """Make a sum of nothing with all ranks."""
        distributed.all_reduce(torch.zeros(1, device="cpu"), group=self.world)

    def why(self) -> Exception | None:
        """Return the error of a rank that is gone, if a service knows of one soon."""
        try:
            work = distributed.all_reduce(
                torch.zeros(1, device="cpu"), group=self.world, async_op=True
            )
            assert work is not None
            work.wait(timedelta(seconds=LOSS_TIMEOUT))
        except AllReduceTimeout:
            pass  # fanin does not know either
        except FaninError as cause:
            return cause
        except (RuntimeError, ValueError):
            pass
        return None


def form_of(tensor: Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def dtype_of(form: Form) -> torch.dtype:
    """Return the dtype of a tensor of torch's."""
    return cast("torch.dtype", form.dtype)


_Execution = Callable[
    [Sequence[Operation], Sequence[Own | None], Groups], Callable[[], None] | None
]


class _Piece:
    """One tensor of a batch, and whose it is."""

    def __init__(
        self, operation: Operation, own: Own | None, position: int, groups: Groups
    ) -> None:
        self.request = operation.request
        self.form = operation.request.tensors[position]
        self.own = own
        self.position = position
        self.tensor = own.inputs[position] if own is not None else groups.zeros(self.form)

    def scaled(self) -> Tensor:
        return scaled(self.tensor, self.request.scales[0])

    def give(self, values: Tensor) -> None:
        if self.own is not None:
            self.own.give(self.position, values)


def _pieces(
    operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups
) -> Collection[tuple[torch.dtype, list[_Piece]]]:
    """Return the tensors of operations, those of one dtype together, on all ranks alike."""
    alike: dict[torch.dtype, list[_Piece]] = {}
    for operation, own in zip(operations, mine, strict=True):
        for position, form in enumerate(operation.request.tensors):
            alike.setdefault(dtype_of(form), []).append(_Piece(operation, own, position, groups))
    return alike.items()


@dataclass
class _Sum:
    """A sum under way, of tensors of one dtype."""

    work: Work
    summed: Tensor
    pieces: list[_Piece]
    room: Tensor | None
    """Memory in which several tensors are one."""
    is_result: bool
    """Whether nothing is to be done to what was summed."""

    def end(self, size: int) -> None:
        self.work.wait()
        pieces = self.pieces
        dtype = dtype_of(pieces[0].form)
        parts: Sequence[Tensor] = torch.split(
            self.summed, [piece.tensor.numel() for piece in pieces]
        )
        if self.is_result and self.room is not None:
            parts = self._given(parts)
        for piece, part in zip(pieces, parts, strict=True):
            result = part if self.is_result else _after(part, piece, size)
            result = result.to(dtype).view(piece.form.shape)
            # Not a view of what all others are in, nor of memory that is used again.
            kept = piece.own is not None and not piece.own.in_place
            shared = kept and self.room is not None and result.data_ptr() == part.data_ptr()
            piece.give(result.clone() if shared else result)

    def _given(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Write results where they go in place, all at once; return all parts, as they are now."""
        given = list(parts)
        placed = [
            (index, piece.tensor)
            for index, piece in enumerate(self.pieces)
            if piece.own is not None and piece.own.in_place and piece.tensor.is_contiguous()
        ]
        targets = [tensor.view(-1) for _, tensor in placed]
        if targets:
            torch._foreach_copy_(targets, [parts[index] for index, _ in placed])
        for (index, _), target in zip(placed, targets, strict=True):
            given[index] = target
        return given


def _allreduce(
    operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups
) -> Callable[[], None]:
    request = operations[0].request
    group, _, size = groups.of(request.process_set)
    sums: list[_Sum] = []
    alike = _pieces(operations, mine, groups)
    shared = _shared([piece for _, pieces in alike for piece in pieces])
    for dtype, pieces in _cut(alike, request.op):
        if request.op is ReduceOp.Adasum:
            _adasum(pieces, group, size)
            continue
        # A tensor that is alone, and its own result, is summed where it is.
        alone = pieces[0].own if len(pieces) == 1 and pieces[0] not in shared else None
        tensor = pieces[0].tensor
        in_place = alone is not None and alone.in_place and tensor.is_contiguous()
        room = None
        if in_place and request.scales[0] == 1.0 and not (tensor.is_conj() or tensor.is_neg()):
            flat = tensor.view(-1)
        elif len(pieces) == 1:
            flat = pieces[0].scaled().reshape(-1).clone()  # it will be the result
        else:
            parts = [piece.scaled().reshape(-1) for piece in pieces]
            room = groups.room(parts[0], sum(part.numel() for part in parts))
            flat = torch.cat(parts, out=room[: sum(part.numel() for part in parts)])
        summed = flat.to(_ADDED_AS.get(dtype, dtype))
        # The service divides averages, unless a factor follows the sum.
        is_result = dtype in _AVERAGED and all(piece.request.scales[1] == 1.0 for piece in pieces)
        op = (_DONE if is_result else _OPS)[request.op]
        with of_layer(foremost(piece.request.layer for piece in pieces)):
            work = distributed.all_reduce(summed, op=op, group=group, async_op=True)
        assert work is not None
        sums.append(_Sum(work, summed, pieces, room, is_result))

    def end() -> None:
        with torch.no_grad(), contextlib.ExitStack() as waiting:
            # Also where one of them fails: nothing writes into the program's tensors afterwards.
            for each in sums:
                waiting.callback(_waited, each.work)
            for each in sums:
                each.end(size)
                if each.room is not None:
                    groups.returned(each.room)

    return end


def _waited(work: Work) -> None:
    """Wait until a sum is over, whatever came of it."""
    with contextlib.suppress(FaninError, RuntimeError, ValueError):
        work.wait()


def _cut(
    alike: Collection[tuple[torch.dtype, list[_Piece]]], op: ReduceOp
) -> Iterator[tuple[torch.dtype, list[_Piece]]]:
    """Yield what is one sum: long tensors are alone, as to copy them takes longer than a sum."""
    for dtype, pieces in alike:
        alone = math.inf if op is ReduceOp.Adasum else ALONE_BYTES
        short = [piece for piece in pieces if piece.form.size_bytes < alone]
        if short:
            yield dtype, short
        yield from ((dtype, [piece]) for piece in pieces if piece.form.size_bytes >= alone)


def _shared(pieces: Sequence[_Piece]) -> set[_Piece]:
    """Return the pieces whose memory has elements of others: sums begin beside each other."""
    shared = set()
    widest, reach = None, 0
    for piece in sorted(pieces, key=lambda piece: piece.tensor.data_ptr()):
        begin = piece.tensor.data_ptr()
        if widest is not None and begin < reach:
            shared |= {piece, widest}
        if (end := begin + _span(piece.tensor)) > reach:
            widest, reach = piece, end
    return shared


def _span(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * step for size, step in steps))


def _after(summed: Tensor, piece: _Piece, size: int) -> Tensor:
    """Return the average of a sum, if that is asked for, times the factor after it."""
    factor = piece.request.scales[1]
    if piece.request.op is ReduceOp.Average:
        if not summed.is_floating_point() and not summed.is_complex():
            summed = summed.div(size, rounding_mode="trunc")
        elif factor == 1.0:
            return summed.div_(size)
        else:
            factor /= size
    return scaled(summed, factor)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor times a factor: in float64 for integers, float32 for halves."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point() and not tensor.is_complex():
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype.itemsize < 4:
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor


def _adasum(pieces: list[_Piece], group: ProcessGroup, size: int) -> None:
    flat = torch.cat([piece.scaled().reshape(-1) for piece in pieces])
    lengths = [piece.tensor.numel() for piece in pieces]
    gathered = _gathered(_bytes(flat), group, size)
    of_ranks = [torch.split(row.view(flat.dtype), lengths) for row in gathered]
    for position, piece in enumerate(pieces):
        result = adasum([each[position] for each in of_ranks])
        piece.give(scaled(result, piece.request.scales[1]).view(piece.form.shape))


def _allgather(operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups) -> None:
    group, _, size = groups.of(operations[0].request.process_set)
    # For each tensor, the bytes of each rank.
    lengths = [
        [of_rank[position] * form.row_bytes for of_rank in operation.of_all]
        for operation in operations
        for position, form in enumerate(operation.request.tensors)
    ]
    owns = [own for own in mine if own is not None]
    ours = torch.cat([_bytes(tensor) for own in owns for tensor in own.inputs])
    longest = max(sum(length[place] for length in lengths) for place in range(size))
    padded = ours.new_zeros(longest)
    padded[: ours.numel()] = ours
    rows = _gathered(padded, group, size)
    begins = [0] * size
    of_tensors = iter(lengths)
    for operation, own in zip(operations, owns, strict=True):
        for position, form in enumerate(operation.request.tensors):
            length = next(of_tensors)
            parts = [
                row[begin : begin + n] for row, begin, n in zip(rows, begins, length, strict=True)
            ]
            begins = [begin + n for begin, n in zip(begins, length, strict=True)]
            total = sum(of_rank[position] for of_rank in operation.of_all)
            own.give(position, _values(torch.cat(parts), form, total))


def _gathered(ours: Tensor, group: ProcessGroup, size: int) -> list[Tensor]:
    """Return each rank's bytes, of which all have as many."""
    out = ours.new_empty(size * ours.numel())
    if out.numel():
        distributed.all_gather_into_tensor(out, ours, group=group)
    return list(out.view(size, -1)) if out.numel() else [ours] * size


def _broadcast(operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups) -> None:
    request = operations[0].request
    group, rank, _ = groups.of(request.process_set)
    root = groups.place(request.process_set, request.root)
    owns = [own for own in mine if own is not None]
    inputs = [tensor for own in owns for tensor in own.inputs]
    if rank == root:
        flat = torch.cat([_bytes(tensor) for tensor in inputs])
    else:
        flat = torch.empty(
            sum(tensor.nbytes for tensor in inputs), dtype=torch.uint8, device=inputs[0].device
        )
    if flat.numel():
        distributed.broadcast(flat, group_src=root, group=group)
    parts = iter(torch.split(flat, [tensor.nbytes for tensor in inputs]))
    for operation, own in zip(operations, owns, strict=True):
        for position, form in enumerate(operation.request.tensors):
            own.give(position, next(parts).clone().view(dtype_of(form)).view(form.shape))


def _alltoall(operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups) -> None:
    for operation, own in zip(operations, mine, strict=True):
        assert own is not None
        group, rank, _ = groups.of(operation.request.process_set)
        form = operation.request.tensors[0]
        own.received = tuple(splits[rank] for splits in operation.of_all)
        sent = [rows * form.row_bytes for rows in operation.of_all[rank]]
        got = [rows * form.row_bytes for rows in own.received]
        source = _bytes(own.inputs[0])[: sum(sent)]
        out = source.new_empty(sum(got))
        distributed.all_to_all_single(out, source, got, sent, group=group)
        own.give(0, _values(out, form, sum(own.received)))


def _reducescatter(
    operations: Sequence[Operation], mine: Sequence[Own | None], groups: Groups
) -> None:
    request = operations[0].request
    group, rank, size = groups.of(request.process_set)
    for dtype, pieces in _pieces(operations, mine, groups):
        # The part for each rank, in one piece; the first ranks get a row more, the others zeros.
        cuts = [torch.split(piece.scaled(), rows(piece.form, size)) for piece in pieces]
        columns = [torch.cat([cut[place].reshape(-1) for cut in cuts]) for place in range(size)]
        longest = columns[0].numel()
        source = columns[0].new_zeros(size, longest, dtype=_ADDED_AS.get(dtype, dtype))
        for row, column in zip(source, columns, strict=True):
            row[: column.numel()] = column
        summed = source.new_empty(longest)
        if longest:
            distributed.reduce_scatter_tensor(
                summed, source.view(-1), op=distributed.ReduceOp.SUM, group=group
            )
        lengths = [cut[rank].numel() for cut in cuts]
        parts = torch.split(summed[: sum(lengths)], lengths)
        for piece, part, cut in zip(pieces, parts, cuts, strict=True):
            result = _after(part, piece, size).to(dtype).view(cut[rank].shape)
            piece.give(result.clone() if len(pieces) > 1 else result)


def rows(form: Form, size: int) -> list[int]:
    """Return how many rows of a tensor each rank gets."""
    least, more = divmod(form.shape[0], size)
    return [least + 1] * more + [least] * (size - more)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _values(flat: Tensor, form: Form, first: int) -> Tensor:
    """Return bytes as what they are of, with another first dimension."""
    return flat.view(dtype_of(form)).view(first, *form.shape[1:])


_EXECUTIONS: Final[dict[Kind, _Execution]] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}
