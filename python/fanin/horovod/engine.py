"""The thread that executes a rank's operations, in the order on which all ranks agree.

A program submits operations under names, in whatever order. Rank 0 hears of all and decides what
is next (`coordinator`); each rank's engine follows. An engine that cannot go on ends, and with it
those of all ranks: whoever waits gets a `HorovodInternalError`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fanin._connections import Followers, Gone, Leader
from fanin._failures import tellable
from fanin.errors import RankLost
from fanin.horovod.agreed import UNNAMED, Agreed
from fanin.horovod.coordinator import Coordinator
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.errors import Disagreement, HorovodInternalError
from fanin.horovod.executor import Executor, Own
from fanin.horovod.requests import (
    Batch,
    Decision,
    Joined,
    Key,
    Kind,
    Operation,
    Over,
    Refused,
    Request,
)
from fanin.horovod.timeline import Timeline

PULSE = 1.0
"""Seconds without an operation after which a sum of nothing shows that all ranks are there."""
UNDER_WAY_MAX = 2
"""So many batches are under way at once, at most."""

_logger = logging.getLogger(__name__)


class Handle:
    """An operation that was submitted; `fanin.horovod.synchronize` returns its result."""

    def __init__(self, request: Request, own: Own, result: Callable[[Own, Any], Any]) -> None:
        self.request = request
        self.own = own
        self._result = result
        self._done = threading.Event()
        self._said: Any = None
        self._error: HorovodInternalError | None = None

    def complete(self, said: Any = None) -> None:
        """Let who waits have the result."""
        self._said = said
        self._done.set()

    def fail(self, error: HorovodInternalError) -> None:
        """Let who waits have an error."""
        self._error = error
        self._done.set()

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Return the result once it is there; raises `HorovodInternalError`."""
        self._done.wait()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error.__cause__
        self.own.taken()
        return self._result(self.own, self._said)


class Recurring:
    """A request that a rank makes again and again: its words are made, and looked up, once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.key = request.key
        self.number: int | None = None
        """Its number, once all ranks have agreed on it before; it is for good."""


class Outbox:
    """Requests of this rank that rank 0 was not told: a bit for each number, and full words."""

    def __init__(self) -> None:
        self._mask = 0
        self._requests: list[Request] = []

    def put(self, request: Request, number: int | None) -> bool:
        """Put a request in, by its number if it has one; return whether it is the first."""
        is_first = not (self._mask or self._requests)
        if number is None:
            self._requests.append(request)
        else:
            self._mask |= 1 << number
        return is_first

    def take(self) -> tuple[int, list[Request]]:
        """Return all that is in it, and empty it."""
        taken = self._mask, self._requests
        self._mask, self._requests = 0, []
        return taken


@dataclass(frozen=True)
class _Begun:
    """A batch whose sums are under way."""

    batch: Batch
    handles: list[Handle | None]
    end: Callable[[], None]
    began: float
    memory: frozenset[int]
    """The addresses of the program's memory that is read or written."""


class Engine:
    """One rank's engine; made by all ranks, whose executors know each other, with their `words`."""

    def __init__(
        self,
        executor: Executor,
        words: Followers | Leader,
        rank: int,
        size: int,
        timeline: Timeline,
        failed: Callable[[list[int]], None],
        settings: EngineSettings,
    ) -> None:
        self._rank = rank
        self._words = words
        self._failed = failed
        self.timeline = timeline
        self.executor = executor
        self._settings = settings
        self._agreed = Agreed()
        self._coordinator = (
            Coordinator(size, executor.reduces, agreed=self._agreed, settings=settings)
            if rank == 0
            else None
        )
        self._outbox = Outbox()
        # Batches under way, which a thread of their own ends in their order. None ends the thread.
        self._begun: queue.Queue[_Begun | None] = queue.Queue()
        self._places = threading.Semaphore(UNDER_WAY_MAX)
        self._memory: frozenset[int] = frozenset()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._handles: dict[Key, Handle] = {}
        self._unnamed: dict[tuple[int, Kind], Iterator[int]] = {}
        self._over: HorovodInternalError | None = None
        self._speaks = threading.Event()
        self._ender = threading.Thread(
            target=self._end_begun, name="fanin-horovod-ends", daemon=True
        )
        self._ender.start()
        self._thread = threading.Thread(target=self._run, name="fanin-horovod", daemon=True)
        self._thread.start()
        if isinstance(words, Leader):
            threading.Thread(target=self._speak, name="fanin-horovod-says", daemon=True).start()

    def name(self, process_set: int, kind: Kind) -> str:
        """Return the name of an operation that has none: its number, as it is on all ranks."""
        with self._lock:
            numbers = self._unnamed.setdefault((process_set, kind), itertools.count())
            return f"{UNNAMED}{next(numbers)}"

    def submit(
        self,
        request: Request,
        inputs: Sequence[Any] = (),
        *,
        in_place: bool = False,
        result: Callable[[Own, Any], Any] = lambda _own, said: said,
    ) -> Handle:
        """Let all ranks know that this one is ready for an operation, and return.

        Raises `ValueError` if one of the same kind and name is under way, and
        `HorovodInternalError` once the engine is over.
        """
        forms = tuple(map(self.executor.form, inputs))
        recurring = Recurring(replace(request, rank=self._rank, tensors=forms))
        return self.submit_again(recurring, inputs, in_place=in_place, result=result)

    def submit_again(
        self,
        recurring: Recurring,
        inputs: Sequence[Any],
        *,
        in_place: bool,
        result: Callable[[Own, Any], Any],
    ) -> Handle:
        """Submit the request of a handle of this engine again, of tensors of the same forms."""
        request, key = recurring.request, recurring.key
        handle = Handle(request, self.executor.own(inputs, in_place), result)
        with self._lock:
            if self._over is not None:
                raise HorovodInternalError(str(self._over)) from self._over.__cause__
            if key in self._handles:
                raise ValueError(
                    f"{key[1].value} {request.name!r} is under way already: wait for it "
                    "with synchronize(), or give this one another name"
                )
            self._handles[key] = handle
            if recurring.number is None:
                recurring.number = self._agreed.number(request)
            is_first = self._outbox.put(request, recurring.number)
        if isinstance(self._words, Followers):
            if is_first:
                self._words.wake()
        elif is_first:
            # Requests of the next moment go with it.
            self._speaks.set()
        return handle

    def _speak(self) -> None:
        """Tell rank 0 what was submitted, not more often than once a cycle."""
        assert isinstance(self._words, Leader)
        while True:
            self._speaks.wait()
            self._speaks.clear()
            with self._lock:
                if self._over is not None:
                    return
                said = self._outbox.take()
            # Not under the lock: it may wait until rank 0 reads.
            with contextlib.suppress(Gone, OSError, ValueError):  # the engine sees it, too
                self._words.say((self._rank, *said))
            # Requests of one backward pass come within a moment: one message has many of them.
            time.sleep(self._settings.cycle)

    def join(self, device: int) -> Handle:
        """Submit a join; zeros for the others' CUDA tensors are on that device, -1 is any."""
        self.executor.join_on(device)
        return self.submit(Request(self._rank, Kind.JOIN))

    def stop(self, *, ends: bool) -> None:
        """End the engines of all ranks, and return once this one has; the process `ends`, too."""
        with contextlib.suppress(HorovodInternalError, ValueError):
            self.submit(Request(self._rank, Kind.END if ends else Kind.SHUTDOWN))
        self._thread.join()
        # It writes into the program's tensors.
        self._ender.join()

    def _run(self) -> None:
        turn = self._lead if isinstance(self._words, Followers) else self._follow
        try:
            while turn():
                pass
        except Exception as error:
            self._end(*self._explained(self._failure or error))

    def _lead(self) -> bool:
        """Decide what is next, tell it, and do it; false once it was the last."""
        words, coordinator = self._words, self._coordinator
        assert isinstance(words, Followers)
        assert coordinator is not None
        end = time.monotonic() + PULSE
        self._hear(words, PULSE)
        while not self._ready() and time.monotonic() < end:
            self._hear(words, max(0.0, end - time.monotonic()))
        if self._ready() and coordinator.waiting:
            self._hear(words, self._settings.cycle)
        with self._lock:
            decisions = coordinator.decide()
            for text in coordinator.stalled():
                _logger.warning("%s", text)
        self.timeline.cycle()
        words.tell(coordinator.shortened)
        return self._do(decisions)

    def _ready(self) -> bool:
        assert self._coordinator is not None
        return self._coordinator.ready

    def _hear(self, words: Followers, seconds: float) -> None:
        assert self._coordinator is not None
        for rank, mask, requests in words.hear(seconds):
            with self._lock:
                self._take(rank, mask, requests)
        with self._lock:
            self._take(self._rank, *self._outbox.take())
        if self._failure is not None:
            raise self._failure

    def _take(self, rank: int, mask: int, requests: list[Request]) -> None:
        assert self._coordinator is not None
        if mask:
            self._coordinator.hear_again(rank, mask)
        for request in requests:
            self._coordinator.hear(request)

    def _follow(self) -> bool:
        assert isinstance(self._words, Leader)
        decisions = self._agreed.whole(self._words.hear())
        with self._lock:
            self._agreed.learn(decisions)
        return self._do(decisions)

    def _do(self, decisions: list[Decision]) -> bool:
        if not decisions:
            self.executor.pulse()
        for decision in decisions:
            match decision:
                case Batch():
                    self._execute(decision)
                case Refused(key, reason):
                    handle = self._taken(key)
                    if handle is not None:
                        handle.fail(Disagreement(reason))
                case Joined(last):
                    handle = self._taken((0, Kind.JOIN, ""))
                    assert handle is not None
                    with self._lock:
                        self._unnamed = {}  # whoever joined early has fewer
                    handle.complete(last)
                case Over(reason, cause, ended):
                    self._begun.join()
                    if cause is None:
                        self._words.part()
                    if ended is not None and ended != self._rank:
                        self._failed([ended])
                    self._end(reason, cause)
                    return False
        return True

    def _taken(self, key: Key) -> Handle | None:
        with self._lock:
            return self._handles.pop(key, None)

    def _execute(self, batch: Batch) -> None:
        one = batch.operations[0].request
        if not self.executor.has(one.process_set):
            return
        handles = [self._taken(operation.request.key) for operation in batch.operations]
        owns = [None if handle is None else handle.own for handle in handles]
        memory = frozenset[int]().union(
            *(self.executor.memory(own) for own in owns if own is not None)
        )
        with self._failing(handles):
            if one.kind is not Kind.ALLREDUCE or not self._memory.isdisjoint(memory):
                # A sum under way may be read here. And the others are over when they return.
                self._begun.join()
            self._sets(batch.operations[0])
            for handle in handles:
                if handle is not None:
                    handle.own.begin()
            self._places.acquire()
            began = time.monotonic()
            with self._lock:
                self._memory |= memory
            end = self.executor.execute(batch, owns)
        begun = _Begun(batch, handles, end or _nothing, began, memory)
        if end is None:
            self._complete(begun)
        else:
            self._begun.put(begun)

    def _end_begun(self) -> None:
        """End the batches that are under way, in their order, until there is nothing more."""
        while (begun := self._begun.get()) is not None:
            try:
                self._complete(begun)
            except Exception as error:
                # The engine's thread may wait for words: it ends with this error.
                self._failure = self._failure or error
                if isinstance(self._words, Followers):
                    self._words.wake()
                else:
                    self._words.shut()
            finally:
                self._begun.task_done()

    def _complete(self, begun: _Begun) -> None:
        """End a batch, and let who waits have the results."""
        with self._failing(begun.handles):
            try:
                begun.end()
                self.executor.settle([each.own for each in begun.handles if each is not None])
            finally:
                with self._lock:
                    self._memory -= begun.memory
                self._places.release()
            if self._coordinator is not None:
                for operation in begun.batch.operations:
                    self.timeline.add(operation.request.key, operation.since, begun.began)
        for operation, handle in zip(begun.batch.operations, begun.handles, strict=True):
            if handle is not None:
                handle.complete(operation.number)

    @contextlib.contextmanager
    def _failing(self, handles: list[Handle | None]) -> Iterator[None]:
        """Let those who wait for handles have what is raised, which is raised again."""
        try:
            yield
        except Exception as error:
            reason, cause = self._explained(error)
            for handle in handles:
                if handle is not None:
                    handle.fail(_internal(reason, cause))
            raise

    def _sets(self, operation: Operation) -> None:
        """Make or leave the group of a process set, if that is what was agreed on."""
        match operation.request.kind:
            case Kind.ADD_PROCESS_SET:
                self.executor.add(operation.number, operation.request.ranks)
            case Kind.REMOVE_PROCESS_SET:
                self.executor.remove(operation.number)

    def _end(self, reason: str, cause: Exception | None) -> None:
        """Fail whatever waits, let all ranks know, and leave the groups: others wait there.

        Each part comes about though one before it fails, as somebody waits for each.
        """
        error = _internal(reason, cause)
        with self._lock:
            self._over = error
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.fail(error)
        self._speaks.set()
        with contextlib.ExitStack() as parts:  # from the last one to the first
            parts.callback(self._begun.put, None)
            parts.callback(self._leave, world=cause is not None)
            parts.callback(self._words.close)
            if cause is None:
                return
            if isinstance(self._words, Followers):
                parts.callback(self._tell, self._words, Over(reason, tellable(cause)))
            self._failed([cause.rank] if isinstance(cause, RankLost) else [])

    def _tell(self, words: Followers, over: Over) -> None:
        with contextlib.suppress(Gone):
            words.tell([over])

    def _leave(self, *, world: bool) -> None:
        with contextlib.suppress(ValueError):  # the program has destroyed them
            self.executor.close(world=world)

    def _explained(self, error: Exception) -> tuple[str, Exception]:
        """Return what happened and why, as fanin knows it: a connection alone says little."""
        if isinstance(error, Gone):
            error = self.executor.why() or error
        if isinstance(error, Gone):
            error = RankLost(f"rank {error.rank} has ended, or its engine has", rank=error.rank)
        return str(error) or type(error).__name__, error


def _nothing() -> None:
    return None


def _internal(reason: str, cause: Exception | None) -> HorovodInternalError:
    error = HorovodInternalError(reason)
    error.__cause__ = cause
    return error
