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
from collections.abc import Iterator
from concurrent import futures
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, Protocol

from torch._C._distributed_c10d import Work

from fanin.errors import FaninError, RankLeft, RankLost
from fanin.torch.backend.delegated_work import DelegatedWork

# How often the thread looks, in seconds.
PAUSE: Final = 0.1

# How long Gloo has before all that it does is broken off, in seconds. A connection that is refused
# has ended by then. Gloo aborts the process when one that was broken off is refused.
GRACE: Final = 1.0

# The tag of a receive that nobody answers.
TAG: Final = 0x0FA171
A_MOMENT: Final = timedelta(milliseconds=1)


class Group(Protocol):
    """The group, as its watch knows it."""

    def failure(self) -> FaninError | None:
        """Return why the group's job is over, if it is."""

    def left(self) -> dict[int, int]:
        """Return the ranks that left in order: how many collectives on Gloo each took part in."""

    def is_alone(self) -> bool:
        """Whether no other rank is left that could send something on Gloo."""

    def receive(self) -> Work:
        """Begin a receive on Gloo that nobody answers."""


class Watch:
    """What a group has on Gloo. It does not keep the group alive."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        # Re-entrant: the garbage collector may run in here, and end a work.
        self._changed = threading.Condition()
        # By how many there were until then: the same number on all ranks.
        self._collectives: weakref.WeakKeyDictionary[DelegatedWork, int] = (
            weakref.WeakKeyDictionary()
        )
        self.begun = 0
        """How many collectives this rank has begun."""
        # Ranks that threads are connecting to, and those that threads wait for.
        self._connecting: list[int] = []
        self._awaited: list[int] = []
        self._is_watching = False

    def add(self, collective: DelegatedWork) -> None:
        """Watch over a work for which all ranks are needed, until Gloo is done with it."""
        with self._changed:
            self.begun += 1
            self._collectives[collective] = self.begun
            self._start()

    def connecting(self, peer: int) -> AbstractContextManager[None]:
        """Watch over a call that needs a connection to a rank."""
        return self._on(self._connecting, peer)

    def awaiting(self, peer: int) -> AbstractContextManager[None]:
        """Watch over what this thread does meanwhile, for which one rank is needed."""
        return self._on(self._awaited, peer)

    def wait_for_anyone(self, receive: Work, timeout: timedelta) -> bool:
        """Wait for a receive from any rank: Gloo would not end it when nobody is left."""
        outcome: futures.Future[bool] = futures.Future()

        def wait() -> None:
            try:
                outcome.set_result(receive.wait(timeout))
            except BaseException as error:  # for who waits
                outcome.set_exception(error)

        threading.Thread(target=wait, name="fanin-receive", daemon=True).start()
        pause = PAUSE
        while not futures.wait([outcome], pause).done:
            # Ever less often: each question to a rank that lives stays with Gloo.
            pause = min(2 * pause, GRACE)
            group = self._group()
            # Data that came before the last connection ended is there a moment later.
            alone = group is not None and group.is_alone()
            if alone and not futures.wait([outcome], GRACE).done:
                raise RuntimeError("Connection closed by all ranks that could have sent something")
        return outcome.result()

    @contextlib.contextmanager
    def _on(self, peers: list[int], peer: int) -> Iterator[None]:
        with self._changed:
            peers.append(peer)
            self._start()
        try:
            yield
        finally:
            with self._changed:
                peers.remove(peer)

    def _start(self) -> None:
        if self._is_watching:
            return
        # Without a thread to be had Gloo's own timeout is left.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._watch, name="fanin-gone", daemon=True).start()
            self._is_watching = True

    def _watch(self) -> None:
        unanswered: Work | None = None
        until = 0.0
        while True:
            with self._changed:
                self._changed.wait(PAUSE)
                for work in [work for work in self._collectives if work.is_over()]:
                    self._collectives.pop(work, None)
                if not (self._collectives or self._connecting or self._awaited):
                    self._is_watching = False
                    return
            group = self._group()
            if group is None or not self.is_in_vain(group):
                unanswered = None
            elif unanswered is None:
                # It connects to all ranks, which must be over before all is broken off.
                with contextlib.suppress(RuntimeError):
                    unanswered = group.receive()
                    until = time.monotonic() + GRACE
            elif time.monotonic() >= until:
                # A receive that runs out of time fails all that is on Gloo.
                with contextlib.suppress(RuntimeError):
                    unanswered.wait(A_MOMENT)
                unanswered = None
            del group

    def is_in_vain(self, group: Group) -> bool:
        """Whether something waits for a rank that is gone, and Gloo may not notice."""
        failure = group.failure()
        with self._changed:
            connecting, awaited = list(self._connecting), list(self._awaited)
            last = max(self._collectives.values(), default=0)
        if isinstance(failure, RankLost | RankLeft):
            return last > 0 or failure.rank in (*connecting, *awaited)
        if not last and not connecting:
            return False
        # Data that a rank sent before it left may still arrive, if the connection is there. Gloo
        # notices the end of that connection.
        left = group.left()
        return not left.keys().isdisjoint(connecting) or any(
            last > begun for begun in left.values()
        )
