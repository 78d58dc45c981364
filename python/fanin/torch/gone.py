"""Ends what waits on Gloo for a rank that is gone.

Gloo notices that a rank is gone by its connection to it, if it has one. So a rank would wait in
vain for one that it is yet to connect to (five times the group's timeout, where Gloo connects
lazily), or for a living one that has failed because of another. fanin hears of every rank's end:
while a group has something on Gloo, a thread looks for that.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from fanin.errors import RankLeft, RankLost
from fanin.torch.delegated_work import DelegatedWork

# How often the thread looks, in seconds.
PAUSE: Final = 0.1

# How long Gloo has before all that it does is broken off, in seconds. A connection that is refused has
# ended by then. Gloo aborts the process when one that was broken off is refused.
GRACE: Final = 1.0


class Watch:
    """What a group has on Gloo; `failure` returns why its job is over, if it is.

    `break_off` fails all that the group has on Gloo. Neither must keep the group alive.
    """

    def __init__(
        self, failure: Callable[[], Exception | None], break_off: Callable[[], None]
    ) -> None:
        self._failure = failure
        self._break_off = break_off
        # Re-entrant: the garbage collector may run in here, and end a work.
        self._changed = threading.Condition()
        self._collectives: weakref.WeakSet[DelegatedWork] = weakref.WeakSet()
        self._peers: list[int] = []
        self._is_watching = False

    def add(self, collective: DelegatedWork) -> None:
        """Watch over a work for which all ranks are needed, until Gloo is done with it."""
        with self._changed:
            self._collectives.add(collective)
            self._start()

    @contextlib.contextmanager
    def awaiting(self, peer: int) -> Iterator[None]:
        """Watch over what this thread does meanwhile, for which one rank is needed."""
        with self._changed:
            self._peers.append(peer)
            self._start()
        try:
            yield
        finally:
            with self._changed:
                self._peers.remove(peer)

    def _start(self) -> None:
        if self._is_watching:
            return
        # Without a thread to be had Gloo's own timeout is left.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._watch, name="fanin-gone", daemon=True).start()
            self._is_watching = True

    def _watch(self) -> None:
        known_at = None
        while True:
            with self._changed:
                self._changed.wait(PAUSE)
                for work in [work for work in self._collectives if work.is_over()]:
                    self._collectives.discard(work)
                if not self._collectives and not self._peers:
                    self._is_watching = False
                    return
            failure = self._failure()
            if isinstance(failure, RankLost | RankLeft) and (
                self._collectives or failure.rank in self._peers
            ):
                known_at = known_at or time.monotonic()
                if time.monotonic() >= known_at + GRACE:
                    self._break_off()
