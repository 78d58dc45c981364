"""Which ranks sum, if not all of a group do (GOAT §V).

As with a layer (`_layers`), it is the calling thread's until a collective has begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_current: ContextVar[Sequence[int] | None] = ContextVar("participants", default=None)


def current() -> Sequence[int] | None:
    """Return the ranks that sum what this thread begins now; None: all."""
    return _current.get()


@contextlib.contextmanager
def among(ranks: Sequence[int] | None) -> Iterator[None]:
    """Let these ranks alone sum what this thread begins within; None: as was said before.

    All ranks begin the same within the same set. The others contribute nothing, and keep what they
    have.
    A set may differ from the one before only once all ranks of that one have its sums.
    """
    token = _current.set(_current.get() if ranks is None else ranks)
    try:
        yield
    finally:
        _current.reset(token)
