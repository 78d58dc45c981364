"""What torch does not tell about callbacks of futures: whether one runs here, and when it waits.

Two questions of this package need an answer that torch has not:

- Was a collective begun by a callback? `inside` says so. The thread does not: a callback of a
  future that is done already runs in `then`, on the thread that calls it.
- Does a callback wait for another future? `here.turn`, whose callback it is, is told then: others
  may have to run first (`turns`).

So callbacks are wrapped when they are given to `then` or `add_done_callback`, and `wait` looks
whether a callback calls it. The futures of all of torch are looked at, at the cost of a call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fanin.torch.patches.installed import once

Callback = Callable[[Any], Any]


class Pausing(Protocol):
    """The turn of a callback, where callbacks run in an order."""

    def paused(self, is_ready: Callable[[], bool]) -> AbstractContextManager[None]:
        """Let others run as long as the callback of this thread waits, until `is_ready`."""


class _Here(threading.local):
    """What this thread does."""

    inside = False
    turn: Pausing | None = None


here = _Here()


def inside() -> bool:
    """Return whether this thread runs a callback of a future."""
    return here.inside


@once("callbacks that begin collectives, or wait for others, are not told from the program itself")
def install() -> None:
    """Put this in place: when the first group is made, so that others see torch unchanged."""
    # The base of `torch.futures.Future`, and what works return. Any: torch's stubs have methods.
    future: Any = torch._C.Future
    then, add_done_callback = _telling(future.then), _telling(future.add_done_callback)
    wait = future.wait

    @functools.wraps(wait)
    def pausing(self: Any) -> Any:
        turn = here.turn
        if turn is None or self.done():
            return wait(self)
        with turn.paused(self.done):
            return wait(self)

    future.then, future.add_done_callback = then, add_done_callback
    future.wait = pausing


def _telling(add: Callable[[Any, Callback], Any]) -> Callable[[Any, Callback], Any]:
    @functools.wraps(add)
    def adding(self: Any, callback: Callback) -> Any:
        if not callable(callback):
            return add(self, callback)  # raises

        def run(future: Any) -> Any:
            before, here.inside = here.inside, True
            try:
                return callback(future)
            finally:
                here.inside = before

        return add(self, run)

    return adding
