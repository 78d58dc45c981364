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

A callback may wait for another future. Where that future is one of what callbacks began (`inner`,
see `fanin_backend`), nothing but the wait happens here: PowerSGD's callback for one bucket comes to
its end before the next bucket's begins. Where `inner` has come to rest and the callback still
waits, it waits for a work behind its own, or for another group's, which looks the same here. Then
the turns go on, on another thread, until the future is complete; the callback goes on before the
next turn. A callback that waits for a later one in another way, by a lock or an event, waits for
ever: wait for its future.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from fanin.torch.patches.callbacks import here

# How long to wait before another look at what is on Gloo, in seconds: first, and at most.
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
        """Whether Gloo is done, and each future that somebody asked for is complete.

        It never waits. `is_completed` may wait for services, to name who is gone.
        """

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future. Of some works Gloo tells nothing until somebody asks for one."""


class Turns:
    """The works of one membership whose futures are not complete, in the order of their beginning.

    `inner` are the turns of what these works' callbacks begin, once they have begun anything.
    """

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may run in here.
        self._changed = threading.Condition()
        # Whether each is done.
        self._works: dict[Deliverable, bool] = {}
        self._running = False
        # Callbacks that wait for a future: whether that is complete.
        self._paused: list[Callable[[], bool]] = []
        # Works of Gloo that were begun beside these; whether a thread looks at them.
        self._others: list[Beside] = []
        self._looks = False
        self._inner: Turns | None = None
        self._outer: Turns | None = None

    def set_inner(self, inner: Turns | None) -> None:
        """Note who serves what callbacks begin from now on."""
        self._inner = inner
        if inner is not None:
            inner._outer = self

    def begin(self, work: Deliverable) -> None:
        """Give a work its turn, before it is under way."""
        with self._changed:
            self._works[work] = False

    def beside(self, work: Beside) -> None:
        """Note a work of Gloo that a callback may wait for."""
        work.get_future()
        with self._changed:
            self._others.append(work)
            # Without a thread to be had, the next work that ends says that they are over.
            with contextlib.suppress(RuntimeError):
                if not self._looks:
                    threading.Thread(target=self._look_at_others, daemon=True).start()
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
    def paused(self, is_ready: Callable[[], bool]) -> Iterator[None]:
        """Let others run as long as a callback of these works waits, until `is_ready`."""
        with self._changed:
            self._running = False
            self._paused.append(is_ready)
            self._changed.notify_all()
        self._stir()
        self._stir_outer()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._running)
                self._paused.remove(is_ready)
                self._running = True

    def _go_on(self) -> None:
        """Complete the futures whose turn it is."""
        while (work := self._next()) is not None:
            before, here.turns = here.turns, self
            try:
                work.deliver()
            except Exception:
                log.exception("the future of a collective could not be completed")
            finally:
                here.turns = before
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
            self._stir_outer()

    def _next(self) -> Deliverable | None:
        with self._changed:
            if not self._may_go_on():
                return None
            work = next(iter(self._works))
            del self._works[work]
            self._running = True
            return work

    def _may_go_on(self) -> bool:
        if self._running or not next(iter(self._works.values()), False):
            return False
        if not self._paused:
            return True
        # A callback that need not wait any more goes on before the next turn, on all ranks. Whether
        # one need not is asked last: `inner` completes what it waits for, and then comes to rest.
        return (self._inner is None or self._inner._rests()) and not self._some_is_ready()

    def _some_is_ready(self) -> bool:
        return any(is_ready() for is_ready in self._paused)

    def _rests(self) -> bool:
        """Whether no future will be completed here without one from elsewhere."""
        with self._changed:
            told = all(work.has_told() for work in self._others)
            return told and not self._works and not self._running and not self._some_is_ready()

    def _stir(self) -> None:
        """Go on, on a thread that may block, if there is anything to do."""
        with self._changed:
            while self._may_go_on():
                work = next(iter(self._works))
                if not work.passes():
                    break
                del self._works[work]
            else:
                return
        try:
            threading.Thread(target=self._go_on, name="fanin-callbacks", daemon=True).start()
        except RuntimeError:  # there is no thread left: one inside another is better than never
            self._go_on()

    def _stir_outer(self) -> None:
        if self._outer is not None:
            self._outer._stir()

    def _look_at_others(self) -> None:
        """Say when what is on Gloo is over, of which nobody tells."""
        pause = PAUSE
        while True:
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX)
            with self._changed:
                self._others = [work for work in self._others if not work.has_told()]
                self._looks = bool(self._others)
                if not self._looks:
                    break
        self._stir_outer()
