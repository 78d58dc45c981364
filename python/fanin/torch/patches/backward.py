"""Lets `backward()` raise the error that a rank's all-reduce ended with, not only its text.

DDP waits for its buckets' futures in C++, where an exception of Python is but a text: torch raises
a RuntimeError. Here the errors that take this way are remembered, and the call that ran the
backward pass raises the one that it finds again, with torch's error as its cause.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from typing import Any

import torch.autograd.graph

from fanin.errors import FaninError
from fanin.torch.patches.installed import once

# The buckets of a model fail together: one of their errors is told, one of the first.
REMEMBERED_MAX = 64

_lost: deque[FaninError] = deque(maxlen=REMEMBERED_MAX)


def lose_type(error: FaninError) -> None:
    """Note that torch is about to make a text of this error."""
    remembered = copy.copy(error)  # without the traceback, and all that its frames hold
    if not any(str(known) == str(remembered) for known in _lost.copy()):
        _lost.append(remembered)


def found_in(error: RuntimeError) -> FaninError | None:
    """Return the error whose text this one quotes, if it is one of ours."""
    text = str(error)
    return next((copy.copy(known) for known in reversed(_lost.copy()) if str(known) in text), None)


@once("backward() raises a RuntimeError with the text of fanin's errors, in place of these")
def install() -> None:
    """Put this in place: when the first group is made, so that others see torch unchanged."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **keywords: Any) -> Any:
        try:
            return original(*args, **keywords)
        except RuntimeError as error:
            typed = None if isinstance(error, FaninError) else found_in(error)
            if typed is None:
                raise
            raise typed from error

    # As torch does where it replaces it itself (torch/compiler): it has two names.
    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = run_backward  # type: ignore[attr-defined]
