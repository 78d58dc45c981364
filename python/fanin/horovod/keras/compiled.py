"""Gradients of a training step that `jax.jit` compiles, reduced while the program runs.

The program calls out by XLA's foreign functions (`fanin.jax.foreign`), and names no rank: it goes
on as it is compiled once ranks have met anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax._src import dispatch  # there is no public way to forget a program that failed

from fanin.arrays.operators import Array
from fanin.horovod.engine import Handle
from fanin.horovod.programs import Programs
from fanin.horovod.submission import synchronize
from fanin.jax.collectives import called
from fanin.jax.foreign import copy

Submit = Callable[[int, Array], Handle | None]
"""Submits the array of a place among the gradients; None where there is nobody to reduce with."""

# The next program would wait for the token of the one that failed, and fail as well.
PROGRAMS: Final = Programs(jax.errors.JaxRuntimeError, dispatch.runtime_tokens.clear)


class Call:
    """A call in a compiled program, made as often as that runs. The optimizer keeps it."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Return traced gradients, reduced."""
        return called(self, "horovod", _begun, gradients)

    def begin(self, index: int, gradient: Array, result: Array) -> _Reduced:
        """Submit a gradient; the result may have its memory."""
        with PROGRAMS.noting():
            return _Reduced(self._submit(index, gradient), gradient, result)


class _Reduced:
    """A gradient under way."""

    def __init__(self, handle: Handle | None, gradient: Array, result: Array) -> None:
        self._handle = handle
        self._gradient = gradient
        self._result = result

    def wait(self) -> None:
        """Wait for it, and write the result."""
        with PROGRAMS.noting():
            (reduced,) = [self._gradient] if self._handle is None else synchronize(self._handle)
        copy(reduced, self._result)


def _begun(call: Call, index: int, gradient: Array, result: Array) -> _Reduced:
    return call.begin(index, gradient, result)
