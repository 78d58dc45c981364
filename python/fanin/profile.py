"""A training script's word to `fanin profile`: how well the model does, after each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

Metric = Literal["accuracy", "loss"]

_listeners: Final[list[Callable[[Metric, float], None]]] = []


def report(*, accuracy: float | None = None, loss: float | None = None) -> None:
    """Say, once after each epoch, how well the model does on data that was held back.

    Either an ``accuracy``, of which more is better, or a ``loss``, of which less is; in any unit,
    always the same one. All ranks may call it; rank 0 is heard. Does nothing in a script that runs
    without `fanin profile`. Raises `ValueError` unless it is told one of the two.
    """
    said: list[tuple[Metric, float | None]] = [("accuracy", accuracy), ("loss", loss)]
    given = [(name, float(value)) for name, value in said if value is not None]
    if len(given) != 1:
        raise ValueError("fanin.profile.report takes either accuracy=... or loss=...")
    for listener in _listeners:
        listener(*given[0])


def listen(listener: Callable[[Metric, float], None]) -> None:
    """Call this with all that is reported in this process. The profiler's own."""
    _listeners.append(listener)
