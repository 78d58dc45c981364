"""Work and futures of what the services sum, gather and spread.

A `FaninWork` is settled exactly once, by whoever learns first that it is done: a thread in `wait`,
or a completion thread. A future that was asked for before that is completed by a completion thread
only, as callbacks may block, and in its turn (`turns`).
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import Work

from fanin import _bounds, _fanin, _layers, _participants
from fanin.errors import AllReduceTimeout, FaninError
from fanin.torch.patches.backward import lose_type
from fanin.torch.patches.work_methods import FindableWork
from fanin.torch.works.under_way import Limited, UnderWay

Tensors = list[torch.Tensor]
TensorsFuture = torch.futures.Future[Tensors]

# How long a wait that has run out of time asks whom the network waits for, in seconds.
A_MOMENT = 1e-3


class Kept(ABC):
    """What a client keeps while an all-reduce is under way, so that the memory outlives it."""

    @abstractmethod
    def completed(self, pending: _fanin.Pending) -> None:
        """For completion threads, which can be here before the submitting thread has `pending`."""


@dataclass(frozen=True)
class Request:
    """A collective as the client takes it, on memory that lies in one piece."""

    memory: Sequence[torch.Tensor]
    """One; or of a reduce_scatter or an all_gather, one a rank."""
    dtype: _fanin.DType | None
    """What is added; None where bytes are moved."""
    collective: _fanin.Collective = "all_reduce"
    root: int = 0
    average: bool = False
    layer: _layers.Layer | None = field(default_factory=_layers.current)
    loss_bound: float | None = field(default_factory=_bounds.current)
    participants: Sequence[int] | None = field(default_factory=_participants.current)

    def gives(self, part: int, rank: int) -> bool:
        """Whether a rank's memory of a part is read."""
        if not self._takes_part(rank):
            return False
        if self.collective == "broadcast":
            return rank == self.root
        return self.collective != "all_gather" or part == rank

    def gets(self, part: int, rank: int) -> bool:
        """Whether a rank's memory of a part is written to."""
        if not self._takes_part(rank):
            return False
        match self.collective:
            case "all_reduce":
                return True
            case "reduce":
                return rank == self.root
            case "reduce_scatter":
                return part == rank
            case _:
                return not self.gives(part, rank)

    def _takes_part(self, rank: int) -> bool:
        return self.participants is None or rank in self.participants

    def submit(self, client: _fanin.Client, kept: Kept, notify: bool) -> _fanin.Pending:
        """Start it. `kept` holds the memory until it is over."""
        moved = self.dtype is None
        parts = [(x.data_ptr(), x.nbytes if moved else x.numel()) for x in self.memory]
        dtype = self.dtype or "uint8"
        return client.submit(
            parts,
            dtype,
            self.collective,
            self.root,
            self.average,
            kept,
            notify,
            self.layer,
            self.loss_bound,
            self.participants,
        )


# Pairs of a tensor that is not in a request's memory, and the one that stands for it there, with
# the same shape.
Back = list[tuple[torch.Tensor, torch.Tensor]]


class Part(Kept):
    """One collective of a work; in the end tensors are written from what stood for them."""

    def __init__(self, request: Request, back: Back) -> None:
        self.request: Request | None = request
        self.back = back
        # For the completion thread, which delivers also what was settled before it came.
        self.work: FaninWork | None = None
        self.pending: _fanin.Pending | None = None

    def completed(self, pending: _fanin.Pending) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.part_completed(self, pending)


def seconds(timeout: timedelta | float | None) -> float | None:
    """Torch's ways of saying "no timeout given" (zero, negative) become None."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return value if value > 0 else None


class CollectiveWork(Limited):
    """What all these works share: what they await, and one outcome, told to all who ask."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[Part], under_way: UnderWay
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        name = next((part.request.collective for part in parts if part.request), "all_reduce")
        self._name = f"{'an' if name.startswith('a') else 'a'} {name}"
        self._under_way = under_way
        self._lock = threading.Lock()
        # How many parts or segments are not over.
        self._awaited = 0
        self._settled = False
        self._error: Exception | None = None
        self._future: TensorsFuture | None = None
        self._delivered = False
        self._awaits_turn = False
        # Somebody was told that it is done.
        self._seen = False

    def take_turn(self) -> None:
        """Have the future completed after those of the works that took their turns before."""
        self._awaits_turn = True
        self._under_way.turns.begin(self)

    def _one_over(self, *, here: bool) -> None:
        """Note that one more of what is awaited is over; the last one settles the work.

        With `here`, this thread may run callbacks then.
        """
        with self._lock:
            self._awaited -= 1
            if self._awaited > 0:
                return
        self._settle()
        self._under_way.turns.done(self, here=here)

    @abstractmethod
    def _settle(self) -> None:
        """Once all that is awaited is over: make the tensors whole, and let go of the memory."""

    def failed(self, error: Exception) -> None:
        with self._lock:
            if self._error is None and not self._settled:
                self._error = self._under_way.explain(error)

    def late(self, limit: float) -> AllReduceTimeout | None:
        # A work may be done and not yet settled: that is no lack of time.
        return None if self._settled or self.is_completed() else self._late(limit)

    @abstractmethod
    def _late(self, limit: float) -> AllReduceTimeout:
        """Make the error of `late`."""

    def passes(self) -> bool:
        """Take the turn, and return True, if nobody has asked for the future."""
        with self._lock:
            if self._future is None:
                self._awaits_turn = False
            return self._future is None

    def deliver(self) -> None:
        """Completes the future, if somebody asked for one. Runs the callbacks: may block."""
        with self._lock:
            self._awaits_turn = False
            future = self._future
            if future is None or self._delivered or not self._settled:
                return
            self._delivered = True
        if self._error is None:
            self._complete(future)
        else:
            future.set_result([])  # `_outcome` raises

    def _completes_at_once(self) -> bool:
        """Whether a future that is asked for now need not wait for its turn."""
        return self._settled and (self._seen or not self._awaits_turn)

    def _complete(self, future: TensorsFuture) -> None:
        future.set_result(self._tensors)

    def _outcome(self, future: TensorsFuture) -> Tensors:
        """Return the value, or raise: for `then`.

        DDP's reducer crashes on a future that was given an exception directly; it handles one whose
        callback raised. And such a future would keep the exception, with all that its traceback
        holds.
        """
        try:
            self._raise_failure()
        except FaninError as error:
            lose_type(error)
            raise
        return future.value()

    def _raise_failure(self) -> None:
        """Raise the error, if there is one, each time as a new object.

        The frames of its traceback have this work in torch's C++ holder, so that the garbage
        collector could not find a cycle: the work must not have the traceback.
        """
        if self._error is not None:
            raise copy.copy(self._error)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> Tensors:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class FaninWork(CollectiveWork):
    """A collective on some tensors, under way or done."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parts: list[Part],
        under_way: UnderWay,
        *,
        notified: bool,
    ) -> None:
        super().__init__(tensors, parts, under_way)
        self._parts = parts
        self._notified = notified
        self._awaited = len(parts)
        self._settled = not parts
        if notified:
            for part in parts:
                part.work = self

    def started(self, part: Part, pending: _fanin.Pending) -> None:
        """Note that a part is under way. It may be done by now, and all of the work settled."""
        with self._lock:
            if not self._settled:
                part.pending = pending

    def failed_to_start(self, error: Exception) -> None:
        """Note that the client refused a part, and so those after it.

        It is reported as all other failures are. The parts before it are under way: the work is
        settled when they are done.
        """
        with self._lock:
            self._error = self._error or self._under_way.explain(error)
            refused = [part for part in self._parts if part.pending is None]
            self._parts = [part for part in self._parts if part.pending is not None]
            for part in refused:
                part.work = None
            self._awaited -= len(refused)
            all_done = not self._parts or (self._notified and self._awaited == 0)
        if all_done:  # by nobody, or completion threads that knew not that nothing more would come
            self._settle()
            self._under_way.turns.done(self, here=False)

    def part_completed(self, part: Part, pending: _fanin.Pending) -> None:
        """For completion threads: one more part is done."""
        self.started(part, pending)
        self._one_over(here=True)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the sum is in the tensors. Raises the typed error of `fanin.errors`.

        Without a timeout (zero) the one of the group applies.
        """
        limit = seconds(timeout)
        for pending in self._pendings():
            try:
                pending.wait(limit)
            except Exception as error:
                if not pending.done():
                    # Only this wait ran out of time: the all-reduce may still complete.
                    raise self._under_way.explain(error) from None
        self._settle()
        self._seen = True
        self._raise_failure()
        return True

    def _pendings(self) -> list[_fanin.Pending]:
        with self._lock:
            return [part.pending for part in self._parts if part.pending is not None]

    def _settle(self) -> None:
        """Copy back what was staged, and let go of the memory; again, does nothing.

        It also cuts the cycle part -> pending -> part, part of which is in Rust.
        """
        with self._lock:
            if self._settled:
                return
            for part in self._parts:
                if self._error is None and part.pending is not None:
                    error = part.pending.exception()
                    self._error = None if error is None else self._under_way.explain(error)
            for part in self._parts:
                try:
                    for target, staged in part.back if self._error is None else ():
                        write(target, staged)
                except Exception as error:  # for the waiter: this thread has nobody to tell
                    self._error = error
                part.request = part.pending = None
                part.back = []
            self._parts = []
            self._settled = True
        self._under_way.over(self)

    def _late(self, limit: float) -> AllReduceTimeout:
        late = (pending for pending in self._pendings() if not pending.done())
        return out_of_time(self._name, limit, next(late, None))

    def _make_future(self) -> TensorsFuture:
        """Return a future of the tensors."""
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = torch.futures.Future()
                watch = not self._settled and not self._notified
                complete = self._completes_at_once()
            else:
                watch = complete = False
        if complete:
            self.deliver()
        elif watch:
            # The caller had said that nobody would ask (a synchronous call), and yet somebody does.
            threading.Thread(target=self._watch, name="fanin-future", daemon=True).start()
        return future.then(self._outcome)

    def _watch(self) -> None:
        for pending in self._pendings():
            with contextlib.suppress(Exception):  # told by the future
                pending.wait()
        self._settle()
        self.deliver()

    def is_completed(self) -> bool:
        if self._settled:
            self._seen = True
            return True
        with self._lock:
            pendings = [part.pending for part in self._parts]
        # A part without a pending is yet to be submitted.
        if not all(pending is not None and pending.done() for pending in pendings):
            return False
        self._settle()  # what was staged is copied back before anybody is told
        self._seen = True
        return True


def out_of_time(what: str, limit: float, pending: _fanin.Pending | None) -> AllReduceTimeout:
    """Say whom the network waits for, of an all-reduce that is not over after `limit` seconds."""
    said = f"{what} was not over after {limit:g} s"
    if pending is None:
        return AllReduceTimeout(f"{said}; nothing of it has left this rank yet", waited=limit)
    try:
        pending.wait(A_MOMENT)
    except FaninError as error:  # it names the tensor; if that has failed, the next wait tells
        missing: list[int] = getattr(error, "missing_ranks", [])
        names = ", ".join(map(str, missing)) or "none that the services know of"
        return AllReduceTimeout(
            f"{said} (switch {error.switch}); ranks not heard from: {names}",
            missing_ranks=missing,
            tensor=error.tensor,
            switch=error.switch,
            waited=limit,
        )
    return AllReduceTimeout(f"{said}; all that has left this rank is summed", waited=limit)


def each_once(target: torch.Tensor, compact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of a tensor and of its sum with which to write each element once.

    An expanded tensor has one element under many indices, and all of them have the same sum.
    """
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target, compact = target.narrow(dimension, 0, 1), compact.narrow(dimension, 0, 1)
    return target, compact


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor of that shape, whatever it is to autograd."""
    target, source = each_once(target.detach(), source.detach())
    with torch.inference_mode():  # also tensors that were made in it may be written to
        target.copy_(source)


class WorkGroup(FindableWork):
    """Several works as one: the end of a coalescing region.

    A `wait` is for all of them, also after a failure; only one of `ends_wait` is raised at once.
    """

    def __init__(self, works: Sequence[Work], ends_wait: tuple[type[Exception], ...] = ()) -> None:
        super().__init__()
        self._works = list(works)
        self._ends_wait = ends_wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for them; raises the first error."""
        first: Exception | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except self._ends_wait:
                raise
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def _make_future(self) -> TensorsFuture:
        collected = torch.futures.collect_all([work.get_future() for work in self._works])
        devices = {device for work in self._works for device in getattr(work, "devices", ())}
        if not devices:
            return collected.then(_flatten)
        # A collected future has no devices, and neither would its followers.
        future: TensorsFuture = torch.futures.Future(devices=list(devices))
        failures: list[Exception] = []
        collected.add_done_callback(partial(_relay, future, failures))
        return future.then(partial(_value_or_first, failures))

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((e for e in (work.exception() for work in self._works) if e), None)

    def result(self) -> Tensors:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        self.wait()


def _relay(
    future: TensorsFuture,
    failures: list[Exception],
    collected: torch.futures.Future[list[TensorsFuture]],
) -> None:
    try:
        flat = _flatten(collected)  # lets the current streams wait for the tensors
    except Exception as error:
        failures.append(error.with_traceback(None))
        flat = []
    future.set_result(flat)


def _value_or_first(failures: list[Exception], future: TensorsFuture) -> Tensors:
    if failures:
        raise failures[0]
    return future.value()


def _flatten(futures: torch.futures.Future[list[TensorsFuture]]) -> Tensors:
    flat: Tensors = []
    for future in futures.value():
        value = future.wait()
        flat.extend(value if isinstance(value, list) else [value])
    return flat
