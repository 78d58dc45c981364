"""Gradients of a training step that `jax.jit` compiles, reduced while the program runs.

The program calls out by XLA's foreign functions (`fanin.jax.foreign`), and names no rank: it goes
on as it is compiled once ranks have met anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import dispatch  # there is no public way to forget a program that failed

from fanin.arrays.operators import Array
from fanin.horovod.engine import Handle
from fanin.horovod.errors import HorovodInternalError
from fanin.horovod.submission import synchronize
from fanin.jax.collectives import called
from fanin.jax.foreign import copy

Submit = Callable[[int, Array], Handle | None]
"""Submits the array of a place among the gradients; None where there is nobody to reduce with."""

# The error of a program's last call that failed: XLA makes a text of it.
_failed: HorovodInternalError | None = None


class Call:
    """What a compiled program calls, as often as it runs: it is kept as long as the optimizer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Return traced gradients, reduced."""
        return called(self, "horovod", _begun, gradients)

    def begin(self, index: int, gradient: Array, result: Array) -> _Reduced:
        """Submit a gradient; the result may have its memory."""
        with _told():
            return _Reduced(self._submit(index, gradient), gradient, result)


class _Reduced:
    """A gradient under way."""

    def __init__(self, handle: Handle | None, gradient: Array, result: Array) -> None:
        self._handle = handle
        self._gradient = gradient
        self._result = result

    def wait(self) -> None:
        """Wait for it, and write the result."""
        with _told():
            (reduced,) = [self._gradient] if self._handle is None else synchronize(self._handle)
        copy(reduced, self._result)


def _begun(call: Call, index: int, gradient: Array, result: Array) -> _Reduced:
    return call.begin(index, gradient, result)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    global _failed
    try:
        yield
    except HorovodInternalError as error:
        _failed = error
        raise


@contextlib.contextmanager
def as_horovods() -> Iterator[None]:
    """Raise an error of a compiled program as the `HorovodInternalError` that it was."""
    global _failed
    _failed = None
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        failed, _failed = _failed, None
        if failed is None or str(failed) not in str(error):
            raise
        # The next program would wait for the token of the one that failed, and fail as well.
        dispatch.runtime_tokens.clear()
        raise failed from error
