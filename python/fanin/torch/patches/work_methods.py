"""Makes `is_completed()` and its kin tell the truth for works of Python backends.

Torch 2.15 wraps the work that a Python backend returns in a C++ object which forwards `wait` and
`get_future` only (`PyWorkHolder` in PyProcessGroup.hpp): its `is_completed()` is False for ever, so
that a program which polls would hang, its `synchronize()` waits for nothing, and its
`source_rank()` raises, so that a receive from any source fails. Here those methods first find the
work inside.

A holder is told by its `OpType`, which is UNKNOWN, where the C++ backends name what their works do:
those are left as they are, at the cost of looking. A holder of another Python backend's work is
asked for its future once, and then left as it is.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from fanin.torch.patches.installed import once

FORWARDED = (
    "is_completed",
    "is_success",
    "exception",
    "result",
    "source_rank",
    "_source_rank",
    "synchronize",
)


class _Question(threading.local):
    """Set while a holder's `get_future` is called for the sake of the work behind it."""

    asked = False
    answer: Work | None = None


_question = _Question()
_no_future: torch.futures.Future[Any] = torch.futures.Future()
# Works that were asked, and are none of ours.
_strangers: weakref.WeakSet[Work] = weakref.WeakSet()
# OpType::UNKNOWN in Work.hpp, which Python does not know by its name.
_unknown_op = -1


class FindableWork(Work):
    """A work that can be found through torch's holder. Subclasses implement `_make_future`."""

    def get_future(self) -> torch.futures.Future[Any]:
        if _question.asked:
            _question.answer = self
            return _no_future
        return self._make_future()

    @abstractmethod
    def _make_future(self) -> torch.futures.Future[Any]:
        """Return the future that `get_future` is asked for."""


@once("is_completed() of a work stays False, and a receive from any source has no source_rank()")
def install() -> None:
    """Put this in place: when the first backend is made, so that others see torch unchanged."""
    global _unknown_op
    _unknown_op = Work()._get_op_type()  # type: ignore[attr-defined]
    for name, replaced in [(name, _forwarding(name, getattr(Work, name))) for name in FORWARDED]:
        setattr(Work, name, replaced)


def _forwarding(name: str, original: Callable[[Work], Any]) -> Callable[[Work], Any]:
    def method(self: Work) -> Any:
        found = _behind(self)
        return original(self) if found is None else getattr(found, name)()

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


def _behind(work: Work) -> Work | None:
    """Return the `FindableWork` that torch wrapped, if it is one."""
    if type(work) is not Work:
        return None
    if work._get_op_type() != _unknown_op or work in _strangers:  # type: ignore[attr-defined]
        return None
    _question.asked, _question.answer = True, None
    try:
        work.get_future()
    except Exception:  # a stranger's own
        pass
    finally:
        _question.asked = False
        found, _question.answer = _question.answer, None
    if found is None:
        _strangers.add(work)
    return found
