"""What rank 0 decides: which operations all ranks have asked for, and which cannot be.

Ranks ask in any order; each operation is executed by all in the one order that is decided here.
A state machine: it is told what ranks said, and says what is to be done; it knows no network.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from fanin.horovod.agreed import Agreed, numbers_in
from fanin.horovod.engine_settings import SHUTDOWN, EngineSettings
from fanin.horovod.requests import (
    Batch,
    Decision,
    DType,
    Joined,
    Key,
    Kind,
    Operation,
    Over,
    ReduceOp,
    Refused,
    Request,
)

_FUSED: Final = {Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER}
# The kinds that are cut or joined at their first dimension.
_CUT: Final = {Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER}
# The operations in which a rank that has joined can take part, with zeros.
_SUMS: Final = {ReduceOp.Sum, ReduceOp.Average}


class Coordinator:
    """Hears requests, and decides. Process sets are known here by number and ranks.

    `reduces` says of a dtype and an operator whether ranks' tensors can be reduced so.
    """

    def __init__(
        self,
        size: int,
        reduces: Callable[[DType, ReduceOp], bool],
        now: Callable[[], float] = time.monotonic,
        agreed: Agreed | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        self._reduces = reduces
        self._now = now
        self._settings = settings or EngineSettings()
        self._agreed = Agreed() if agreed is None else agreed
        # For each rank the numbers that it asks for, as bits.
        self._masks = [0] * size
        self._any = 0
        self._since_numbers: dict[int, float] = {}
        # The latest number of each key, and those that ranks ask for in full words meanwhile.
        self._numbers: dict[Key, int] = {}
        self._outdated = 0
        self._in_full = 0
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._sets_made = 0
        self._asked: dict[Key, dict[int, Request]] = {}
        self._since: dict[Key, float] = {}
        self._joined: list[int] = []
        self._ready: list[Operation] = []
        self._decided: list[Decision] = []
        self._told: set[Key] = set()
        self.shortened: list[Decision] = []
        """The last decisions, for those who know what was agreed on before."""

    @property
    def waiting(self) -> bool:
        """Whether some ranks have asked for what others have not."""
        return bool(self._asked or self._any)

    @property
    def ready(self) -> bool:
        """Whether there is something to decide."""
        return bool(self._ready or self._decided)

    def hear(self, request: Request) -> None:
        """Take what a rank asks for."""
        if request.kind is Kind.JOIN:
            self._join(request.rank)
        elif request.kind is Kind.SHUTDOWN:
            self._decided += self._fused()
            self._decided.append(Over(f"rank {request.rank} has called shutdown"))
        elif request.kind is Kind.END:
            self._decided += self._fused()
            self._decided.append(Over(f"rank {request.rank} has ended", ended=request.rank))
        elif request.process_set not in self._sets:
            self._decided.append(Refused(request.key, _removed(request.process_set)))
        else:
            self._hear_in_full(request)

    def hear_again(self, rank: int, mask: int) -> None:
        """Take what a rank asks for by numbers: a bit for each."""
        in_full = mask if self._joined else mask & (self._outdated | self._in_full)
        for number in numbers_in(in_full):
            self._hear_in_full(replace(self._agreed[number], rank=rank))
        mask &= ~in_full
        now = self._now()
        for number in numbers_in(mask & ~self._any):
            self._since_numbers[number] = now
        self._masks[rank] |= mask
        self._any |= mask
        ready = functools.reduce(int.__and__, self._masks)
        if ready:
            self._masks = [each & ~ready for each in self._masks]
            self._any &= ~ready
            self._ready += [
                Operation(self._agreed[number], self._since_numbers.pop(number))
                for number in numbers_in(ready)
            ]

    def decide(self) -> list[Decision]:
        """Return what was decided since the last call, in the order that all ranks keep."""
        decided = [*self._decided, *self._fused()]
        self._decided = []
        # Before it is learned what is new: those who hear it do not know that yet.
        self.shortened = self._agreed.shortened(decided)
        for number in self._agreed.learn(decided):
            key = self._agreed[number].key
            if key in self._numbers:
                self._in_words(self._numbers[key])
                self._outdated |= 1 << self._numbers[key]
            self._numbers[key] = number
            if key in self._asked:
                self._in_full |= 1 << number
        return decided

    def _hear_in_full(self, request: Request) -> None:
        number = self._numbers.get(request.key)
        if number is not None:
            self._in_words(number)
        asked = self._asked.setdefault(request.key, {})
        asked[request.rank] = request
        self._since.setdefault(request.key, self._now())
        self._judge(request.key)

    def _in_words(self, number: int) -> None:
        """Take as full words what ranks asked for by a number, as others may ask otherwise."""
        bit, request = 1 << number, self._agreed[number]
        self._in_full |= bit
        if not self._any & bit:
            return
        self._since.setdefault(request.key, self._since_numbers.pop(number))
        asked = self._asked.setdefault(request.key, {})
        for rank, mask in enumerate(self._masks):
            if mask & bit:
                asked[rank] = replace(request, rank=rank)
        self._masks = [mask & ~bit for mask in self._masks]
        self._any &= ~bit

    def stalled(self) -> list[str]:
        """Say which operations some ranks have waited for, and for whom; each once.

        After `shutdown_seconds` the next decision is that all is over.
        """
        told = []
        shutdown = self._settings.shutdown_seconds or float("inf")
        for number, since in list(self._since_numbers.items()):
            if self._now() - since > min(self._settings.stall_seconds, shutdown):
                self._in_words(number)
        for key, asked in self._asked.items():
            waited = self._now() - self._since[key]
            since = min(self._settings.stall_seconds, waited)
            text = (
                f"{_called(key)} waits for {_named(self._absent(key))}: {_named(sorted(asked))} "
                f"asked for it more than {since:g} s ago. Does every rank call it?"
            )
            if waited > self._settings.stall_seconds and key not in self._told:
                self._told.add(key)
                told.append(text)
            if 0 < self._settings.shutdown_seconds < waited:
                self._decided.append(Over(text, RuntimeError(f"{SHUTDOWN} is over")))
        return told

    def _join(self, rank: int) -> None:
        self._joined.append(rank)
        for number in numbers_in(self._any):
            self._in_words(number)
        for key in list(self._asked):
            self._judge(key)
        if len(self._joined) == len(self._sets[0]):
            self._decided += self._fused()
            self._decided.append(Joined(rank))
            self._joined = []

    def _absent(self, key: Key) -> list[int]:
        asked = self._asked[key]
        return [r for r in self._sets[key[0]] if r not in asked and r not in self._joined]

    def _judge(self, key: Key) -> None:
        """Decide about an operation, if all ranks of its process set have asked or joined."""
        if self._absent(key):
            return
        asked = self._asked.pop(key)
        self._in_full &= ~(1 << self._numbers[key]) if key in self._numbers else -1
        ranks = self._sets[key[0]]
        requests = [asked[rank] for rank in ranks if rank in asked]
        since = self._since.pop(key)
        self._told.discard(key)
        reason = disagreement(requests) or self._objection(requests)
        if reason is not None:
            self._decided.append(Refused(key, f"{_called(key)}: {reason}"))
            return
        self._ready.append(self._operation(requests, since))

    def _objection(self, requests: list[Request]) -> str | None:
        """Say what is wrong with an operation that all ranks ask for alike."""
        one = requests[0]
        ranks = self._sets[one.process_set]
        if len(requests) < len(ranks):
            joined = _named([rank for rank in ranks if rank in self._joined])
            if one.kind is Kind.ALLREDUCE and one.op not in _SUMS:
                return f"{joined} joined, and has no tensor: that is zeros in sums and averages"
            if one.kind not in (Kind.ALLREDUCE, Kind.BARRIER):
                return f"{joined} joined, and takes part in dense allreduce and barrier only"
        if one.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            for form in one.tensors:
                if not self._reduces(form.dtype, one.op):
                    return f"there is no {one.op.name} of {form.dtype}: convert the tensor first"
        if one.kind is Kind.BROADCAST and one.root not in ranks:
            return f"the root is rank {one.root}, which is not among {_named(list(ranks))}"
        if one.kind is Kind.ADD_PROCESS_SET:
            return self._no_set(one.ranks)
        if one.kind is Kind.REMOVE_PROCESS_SET and self._number(one.ranks) is None:
            return f"there is no process set of {_named(list(one.ranks))}"
        if one.kind in _CUT and any(not form.shape for form in one.tensors):
            return "a tensor has no dimension, and the first one is cut or joined"
        return None

    def _no_set(self, ranks: tuple[int, ...]) -> str | None:
        world = self._sets[0]
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(world):
            return f"{list(ranks)} are not distinct ranks below {len(world)}, one at least"
        if ranks in self._sets.values():
            return f"there is a process set of {_named(list(ranks))} already"
        return None

    def _operation(self, requests: list[Request], since: float) -> Operation:
        one = requests[0]
        if one.kind is Kind.ALLGATHER:
            dimensions = (tuple(form.shape[0] for form in each.tensors) for each in requests)
            return Operation(one, since, of_all=tuple(dimensions))
        if one.kind is Kind.ALLTOALL:
            return Operation(one, since, of_all=tuple(each.splits for each in requests))
        if one.kind is Kind.ADD_PROCESS_SET:
            self._sets_made += 1
            self._sets[self._sets_made] = one.ranks
            return Operation(one, since, number=self._sets_made)
        if one.kind is Kind.REMOVE_PROCESS_SET:
            number = self._number(one.ranks)
            assert number is not None
            del self._sets[number]
            self._refuse_all(number)
            return Operation(one, since, number=number)
        return Operation(one, since)

    def _refuse_all(self, number: int) -> None:
        """Refuse what some ranks of a process set that was removed have asked for."""
        for key in [key for key in self._asked if key[0] == number]:
            del self._asked[key]
            del self._since[key]
            self._decided.append(Refused(key, _removed(number)))

    def _number(self, ranks: tuple[int, ...]) -> int | None:
        """Return the number of a process set that can be removed; None if there is none."""
        return next((n for n, of in self._sets.items() if of == ranks and n), None)

    def _fused(self) -> list[Batch]:
        # In the order in which they are ready, where priorities are equal.
        ordered = sorted(self._ready, key=lambda operation: -operation.request.priority)
        batches = fuse(ordered, self._settings.fused_bytes_max)
        self._ready = []
        return batches


def fuse(operations: Iterable[Operation], most: int) -> list[Batch]:
    """Put together what can be one collective, in the order of the first of each."""
    open_batches: dict[object, list[Operation]] = {}
    sizes: dict[object, int] = {}
    batches: list[list[Operation]] = []
    for operation in operations:
        one = operation.request
        size = sum(form.size_bytes for form in one.tensors)
        devices = frozenset(form.device for form in one.tensors)
        kind = (one.kind, one.process_set, one.op, one.root, devices)
        fits = kind in open_batches and sizes[kind] + size <= most
        if one.kind in _FUSED and fits:
            open_batches[kind].append(operation)
            sizes[kind] += size
        else:
            batches.append([operation])
            open_batches[kind], sizes[kind] = batches[-1], size
    return [Batch(tuple(batch)) for batch in batches]


def disagreement(requests: list[Request]) -> str | None:
    """Say in what two ranks differ that ask for one operation; None if they agree."""
    one = requests[0]
    # Gathered and exchanged tensors may differ in their first dimension.
    cut = 1 if one.kind in (Kind.ALLGATHER, Kind.ALLTOALL) else 0
    aspects: list[tuple[str, Callable[[Request], object]]] = [
        (
            "layout (DistributedOptimizer's sparse_as_dense=True makes all gradients dense)",
            lambda each: "a sparse tensor" if each.sparse else "a dense one",
        ),
        ("number of tensors", lambda each: len(each.tensors)),
        ("dtype", lambda each: [str(form.dtype) for form in each.tensors]),
        ("device", lambda each: [form.device for form in each.tensors]),
        ("number of dimensions", lambda each: [len(form.shape) for form in each.tensors]),
        ("shape", lambda each: [form.shape[cut:] for form in each.tensors]),
        ("op", lambda each: each.op.name),
        ("factors before and after the sum", lambda each: each.scales),
        ("root rank", lambda each: each.root),
        ("ranks of the process set", lambda each: list(each.ranks)),
    ]
    for aspect, value in aspects:
        for other in requests[1:]:
            if value(other) != value(one):
                return (
                    f"ranks disagree about the {aspect}: rank {one.rank} has {_said(value(one))}, "
                    f"and rank {other.rank} {_said(value(other))}"
                )
    return None


def _said(value: object) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return str(value)


def _called(key: Key) -> str:
    number, kind, name = key
    where = f" of process set {number}" if number else ""
    return f"{kind.value} {name!r}{where}"


def _removed(number: int) -> str:
    return f"process set {number} is not there any more"


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
