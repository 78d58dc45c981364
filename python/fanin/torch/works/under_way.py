"""The all-reduces of a group's memberships that are not over, and how long each may take."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable

from fanin.errors import AllReduceTimeout, Closed, FaninError, RankLeft, RankLost, SwitchLost
from fanin.torch.patches.work_methods import FindableWork
from fanin.torch.works.turns import Turns

# Ends the membership, which fails all that is under way.
End = Callable[[], None]
# Changes how long each all-reduce may take, in seconds.
SetTimeout = Callable[[float], None]


class Limited(FindableWork):
    """A work that can be told that it takes too long, or that the membership is over."""

    @abstractmethod
    def late(self, limit: float) -> AllReduceTimeout | None:
        """Return the error of not being done after `limit` seconds; None if it is done."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Note why this work will fail; the first reason is the one that is told."""


class UnderWay:
    """Knows the works of one membership from their start until they are settled.

    The membership itself knows one timeout, the group's. A single all-reduce that has another one
    is watched by a thread here, which lives while there is such an all-reduce.

    A group can have a second membership beside the first (`include`). Both have one order of
    futures, one timeout, and one end.
    """

    def __init__(self, timeout: float, set_timeout: SetTimeout, end: End) -> None:
        self._timeout = self._told = timeout
        self._memberships = [(set_timeout, end)]
        # In the order of their start. Both change by single operations on a dict only, and the lock
        # is re-entrant: works end wherever somebody learns of it, also in the garbage collector.
        self._works: dict[Limited, None] = {}
        self._limits: dict[Limited, tuple[float, float]] = {}
        self._changed = threading.Condition()
        self._watching = False
        self._ended_by: object = None
        self.turns = Turns()

    def include(self, set_timeout: SetTimeout, end: End) -> None:
        """Have another membership of the same ranks wait as long as this one, and end with it."""
        with self._changed:
            self._memberships.append((set_timeout, end))
            set_timeout(self._told)
        if self._ended_by is not None:
            end()

    def works(self) -> list[Limited]:
        """Return those that have begun and are not settled, in the order of their start."""
        return list(self._works)

    def begin(self, work: Limited, limit: float | None) -> None:
        """Note a work before it is under way; `limit` is its own timeout in seconds, if it has one.

        When that has passed the work fails, and the membership ends: the network may write to the
        work's memory as long as it lasts.
        """
        self._works[work] = None
        if limit is None:
            return
        with self._changed:
            self._limits[work] = time.monotonic() + limit, limit
            if not self._watching:
                threading.Thread(target=self._watch, name="fanin-timeouts", daemon=True).start()
                self._watching = True
            self._changed.notify_all()
        self._adjust()

    def over(self, work: Limited) -> None:
        """Note that a work is settled."""
        self._works.pop(work, None)
        if self._limits.pop(work, None) is not None:
            self._adjust()
            with self._changed:
                self._changed.notify_all()

    def set_timeout(self, seconds: float) -> None:
        """Replace the group's timeout."""
        self._timeout = seconds
        self._adjust()

    @property
    def ended_by(self) -> object:
        """The reason that `end` was first given; None if it was not called."""
        return self._ended_by

    def end(self, reason: object) -> None:
        """End the membership; what fails by that says that it is because of `reason`."""
        if self._ended_by is None:
            self._ended_by = reason
        for _, end in self._memberships.copy():
            end()

    def explain(self, error: Exception) -> Exception:
        """Say more about an error of the network than the network knows."""
        reason = self._ended_by
        if not isinstance(error, Closed) or reason is None:
            return hinted(error)
        if isinstance(reason, RankLost | RankLeft | SwitchLost):
            return with_message(reason, f"the group ended, here, because {reason.message}")
        return Closed(f"the group ended, here, because {reason}")

    def _adjust(self) -> None:
        """Let the network wait as long as the most patient all-reduce does."""
        with self._changed:
            # Again, if the garbage collector was here meanwhile and told of something else.
            while (longest := self._longest()) != self._told:
                for set_timeout, _ in self._memberships.copy():
                    set_timeout(longest)
                self._told = longest

    def _longest(self) -> float:
        return max([self._timeout, *(limit for _, limit in self._limits.copy().values())])

    def _watch(self) -> None:
        while True:
            with self._changed:
                limits = self._limits.copy()
                if not limits:
                    self._watching = False
                    return
                now = time.monotonic()
                due = [(work, limit) for work, (end, limit) in limits.items() if end <= now]
                next_end = min(end for end, _ in limits.values())
                limits.clear()  # nothing is kept alive by a thread that waits
                if not due:
                    self._changed.wait(next_end - now)
            while due:
                self._expire(*due.pop())

    def _expire(self, work: Limited, limit: float) -> None:
        self._limits.pop(work, None)
        error = work.late(limit)
        if error is None:
            return
        work.failed(error)
        self.end(error)


def hinted(error: Exception) -> Exception:
    """Name the cause of a timeout that is torch's own: a rank whose all-reduce went to Gloo."""
    if not isinstance(error, AllReduceTimeout) or not error.missing_ranks:
        return error
    called = "the collective" if error.tensor is None else error.tensor.collective
    hint = f"or that rank called {called} with a dtype, op or device that the services do not take"
    return with_message(error, f"{error.message}, {hint}")


def with_message(error: FaninError, message: str) -> FaninError:
    """Return an error with the fields of another one."""
    fields = {name: value for name, value in vars(error).items() if name != "message"}
    return type(error)(message, **fields)
