"""How much of a tensor may be lost on its way, if not as much as its job says (DLCP §3.2.1).

As with a layer (`_layers`), it is the calling thread's until a collective has begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[float | None] = ContextVar("loss_bound", default=None)


def current() -> float | None:
    """Return the bound of what this thread begins now; None: the job's."""
    return _current.get()


def checked(fraction: float) -> float:
    """Return a loss bound that can be one.

    Raises `ValueError`.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"loss_bound {fraction!r}: a fraction of at least 0 and below 1")
    return fraction


@contextlib.contextmanager
def losing(fraction: float | None) -> Iterator[None]:
    """Let so much be lost of what this thread begins within; None: as much as was said before.

    Raises `ValueError` for what is no fraction.
    """
    token = _current.set(_current.get() if fraction is None else checked(fraction))
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def loss_bound(fraction: float) -> Iterator[None]:
    """Give a loss bound of their own to the collectives that this thread begins within.

        with fanin.torch.loss_bound(0.0):
            torch.distributed.all_reduce(statistics)  # nothing of it is lost

    At least 0 and below 1; all ranks give a collective the same. It counts in groups that have a
    `loss_bound`: others lose nothing, and neither do integers. Horovod's collectives refuse it.

    Raises `ValueError` for another number.
    """
    with losing(fraction):
        yield
