"""Signals as exceptions, so that what was started is also stopped."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the block, as SIGINT raises KeyboardInterrupt.

    Their default action ends the process without a word to Python. Only the main thread may ask for
    it; in another one the block is as it was.
    """
    with _handled(_exit, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Keep an impatient second Ctrl-C from ending a clean-up half-way."""
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before: dict[signal.Signals, Any] = {}
    try:
        for number in numbers:
            with contextlib.suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # the shell's convention
