"""The order in which the futures of one membership are completed: that of the submissions.

A future's callbacks run where it is completed. A callback may begin collectives, and all ranks must
begin these in one order. The network does not give one: of two all-reduces that are under way, the
second may be over first on one rank and last on another. So the works take turns, in the order in
which they were begun. A work whose turn has not come waits for it, although it is done; one
callback runs at a time.

The order is that of the works that the services sum, gather or spread, be their tensors on the CPU
or on devices. It is not that of:

- `wait()` and `is_completed()` of a work, which look at this work alone. A future that is asked for
  after them is completed at once.
- Works that Gloo serves: Gloo's own threads complete them, when they are done.
- Callbacks that are given to a future that is complete: `then` runs them itself. Where they begin
  collectives, give them before the next collective is begun, as DDP's hooks do.

A callback may wait for another future. Where that future is one of what callbacks began (`inners`,
see `fanin_backend`), nothing but the wait happens here: PowerSGD's callback for one bucket comes to
its end before the next bucket's begins. Where all `inners` have come to rest and the callback still
waits, it waits for a work behind its own. Then the turns go on, on another thread, until the future
is complete; the callback goes on before the next turn. If several wait, the one with the earliest
turn goes on first. A callback that waits for a later one in another way, by a lock or an event,
waits for ever: wait for its future. A wait for what no backend of this package serves looks like
one for a later work.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fanin.torch.patches.callbacks import here

# Gloo tells nobody that a work is over, so it must be asked again and again. The pauses between are
# so long, in seconds: the first one, and the longest.
PAUSE, PAUSE_MAX = 1e-3, 0.05

log = logging.getLogger(__name__)


class Deliverable(Protocol):
    """A work with a turn."""

    def passes(self) -> bool:
        """Take the turn, and return True, if nobody has asked for the future."""

    def deliver(self) -> None:
        """Complete the future, if somebody asked for one. Runs the callbacks: may block."""


class Beside(Protocol):
    """A work of Gloo."""

    def has_told(self) -> bool:
        """Whether Gloo is done, and the callbacks of all futures that somebody asked for have run.

        It never waits. `is_completed` may wait for services, to name who is gone.
        """


class Turns:
    """The works of one membership whose futures are not complete, in the order of their beginning.

    `inners` are the turns of what these works' callbacks begin, once they have begun anything: that
    is their own group's, and those of other groups. No `inner` has one.
    """

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may run in here.
        self._changed = threading.Condition()
        # Whether each is done.
        self._works: dict[Deliverable, bool] = {}
        self._running = False
        # How many turns have begun.
        self._begun = 0
        # Callbacks that wait for a future: whether that is complete, by their turns.
        self._paused: dict[int, Callable[[], bool]] = {}
        # Works of Gloo that were begun beside these. A thread looks at them, or not.
        self._others: list[Beside] = []
        self._looks = False
        self._inners: weakref.WeakSet[Turns] = weakref.WeakSet()
        self._outers: weakref.WeakSet[Turns] = weakref.WeakSet()

    def add_inner(self, inner: Turns) -> None:
        """Note that callbacks of these works begin something there, unless these are `inner`."""
        with self._changed:
            if not self._outers:
                self._inners.add(inner)
        with inner._changed:
            if inner in self._inners:
                inner._outers.add(self)

    def begin(self, work: Deliverable) -> None:
        """Give a work its turn, before it is under way."""
        with self._changed:
            self._works[work] = False

    def beside(self, work: Beside) -> None:
        """Note a work of Gloo that a callback may wait for."""
        with self._changed:
            self._others = [*self._others_under_way(), work]
            # If there is no thread left, they are looked at when something else happens.
            with contextlib.suppress(RuntimeError):
                if not self._looks:
                    look = partial(_look_at_others, weakref.ref(self))
                    threading.Thread(target=look, name="fanin-on-gloo", daemon=True).start()
                    self._looks = True

    def done(self, work: Deliverable, *, here: bool) -> None:
        """Note that a work is done. With `here`, this thread may run callbacks."""
        with self._changed:
            if work in self._works:
                self._works[work] = True
        if here:
            self._go_on()
        else:
            self._stir()

    @contextlib.contextmanager
    def paused(self, turn: int, is_ready: Callable[[], bool]) -> Iterator[None]:
        """Let others run as long as this turn's callback waits, until `is_ready`."""
        with self._changed:
            self._running = False
            self._paused[turn] = is_ready
        self._stir()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._may_return_to(turn))
                del self._paused[turn]
                self._running = True

    def _may_return_to(self, turn: int) -> bool:
        return not self._running and (turn == min(self._paused) or self._all_wait(before=turn))

    def _go_on(self) -> None:
        """Complete the futures whose turn it is."""
        while (work := self._next()) is not None:
            before, here.turn = here.turn, Turn(self, self._begun)
            try:
                work.deliver()
            except Exception:
                log.exception("the future of a collective could not be completed")
            finally:
                here.turn = before
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
                self._stir_outers()

    def _next(self) -> Deliverable | None:
        with self._changed:
            if not self._may_go_on():
                return None
            work = next(iter(self._works))
            del self._works[work]
            self._running = True
            self._begun += 1
            return work

    def _may_go_on(self) -> bool:
        if self._running or not next(iter(self._works.values()), False):
            return False
        # A callback that need not wait any more goes on before the next turn, on all ranks.
        return not self._paused or self._all_wait()

    def _all_wait(self, before: float = math.inf) -> bool:
        """Whether the callbacks of the turns before this one wait for what `inners` do not have."""
        # Ask `inners` first: they complete what a callback waits for, and rest then. Asked the
        # other way round, both answers could be no.
        rest = all(inner._rests() for inner in list(self._inners))
        waiting = (is_ready for turn, is_ready in self._paused.items() if turn < before)
        return rest and not any(is_ready() for is_ready in waiting)

    def _rests(self) -> bool:
        """Whether no future will be completed here without one from elsewhere."""
        with self._changed:
            busy = self._others_under_way() or self._works or self._running
            return not busy and self._all_wait()

    def _others_under_way(self) -> list[Beside]:
        return [work for work in self._others if not work.has_told()]

    def _stir(self) -> None:
        """Go on, on a thread that may block, if there is anything to do; and so the outer ones."""
        with self._changed:
            self._changed.notify_all()
            while (goes_on := self._may_go_on()) and next(iter(self._works)).passes():
                del self._works[next(iter(self._works))]
        if goes_on:
            try:
                threading.Thread(target=self._go_on, name="fanin-callbacks", daemon=True).start()
            except RuntimeError:  # there is no thread left: one inside another is better than never
                self._go_on()
        self._stir_outers()

    def _stir_outers(self) -> None:
        if not self._outers:
            return
        with self._changed:
            outers = list(self._outers)
        for outer in outers:
            outer._stir()

    def _still_looks(self) -> bool:
        """Look once at what is on Gloo, and say whether to look again."""
        with self._changed:
            self._others = self._others_under_way()
            self._looks = bool(self._others)
            if self._looks:
                return True
        self._stir_outers()
        return False


@dataclass(frozen=True)
class Turn:
    """The turn of a callback, or of several of one future."""

    of: Turns
    number: int

    def paused(self, is_ready: Callable[[], bool]) -> AbstractContextManager[None]:
        """Let others run as long as the callback waits, until `is_ready`."""
        return self.of.paused(self.number, is_ready)


def _look_at_others(of: weakref.ref[Turns]) -> None:
    """Stir the outer turns when all that is on Gloo is over. Gloo does not tell."""
    pause = PAUSE
    while True:
        time.sleep(pause)  # there is nothing to wait for: see `PAUSE`
        pause = min(2 * pause, PAUSE_MAX)
        turns = of()
        if turns is None or not turns._still_looks():
            return
        del turns
