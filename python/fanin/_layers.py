"""Which layer of a model the gradients of a collective are of.

DLCP's packets say it to the queues on their way (§3.2.2): front layers go first, as the next
forward pass needs them first. A layer is its place, counted from the input, and how many there are.
`None` is one of which nothing is known: it goes first as well.

What begins a collective may be far from what knows the layer, with torch's dispatcher between them.
So the layer is the calling thread's until the collective has begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

from fanin import _fanin

Layer: TypeAlias = tuple[int, int]

_current: ContextVar[Layer | None] = ContextVar("layer", default=None)


def current() -> Layer | None:
    """Return the layer of what this thread begins now."""
    return _current.get()


@contextlib.contextmanager
def of_layer(layer: Layer | None) -> Iterator[None]:
    """Let what this thread begins within be of a layer; None: of the one that was said before."""
    token = _current.set(_current.get() if layer is None else layer)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def priority(number: int) -> Iterator[None]:
    """Give a priority to the collectives that this thread begins within.

        with fanin.torch.priority(3):
            work = torch.distributed.all_reduce(gradient, async_op=True)

    From 0, which goes first and which all have without it, to 6. It counts in groups with a
    `loss_bound`: their packets say it to routers (docs/operations.md), and ranks and switches send
    in this order. All ranks give a collective the same. fanin's hooks and optimizers know the
    layers of a model, and give their gradients priorities of their own.

    Raises `ValueError` for another number.
    """
    with of_layer(of_priority(number)):
        yield


def of_priority(number: int) -> Layer:
    """Return the layer that stands for a priority."""
    if number not in range(_fanin.priorities):
        raise ValueError(
            f"priority {number!r}: a whole number from 0, which goes first, to "
            f"{_fanin.priorities - 1}"
        )
    return int(number), _fanin.priorities


def foremost(layers: Iterable[Layer | None]) -> Layer | None:
    """Return the layer of what is sent together: the one that goes first."""
    known = []
    for layer in layers:
        if layer is None:
            return None
        known.append(layer)
    return min(known, key=lambda layer: layer[0] / layer[1], default=None)
