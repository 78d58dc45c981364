"""Makes `is_completed()` and its kin tell the truth for works of Python backends.

Torch 2.15 wraps the work that a Python backend returns in a C++ object which forwards `wait` and
`get_future` only (`PyWorkHolder` in PyProcessGroup.hpp): its `is_completed()` is False for ever, so
that a program which polls would hang, and its `source_rank()` raises, so that a receive from any
source fails. Here those methods first find the work inside. Works of C++ backends are left as they
are.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

FORWARDED = ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank")


class _Question(threading.local):
    """Set while a holder's `get_future` is called for the sake of the work behind it."""

    asked = False
    answer: Work | None = None


_question = _Question()
_no_future: torch.futures.Future[Any] = torch.futures.Future()
_install_once = threading.Lock()
_installed = False


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


class DelegatedWork(FindableWork):
    """A work of a C++ backend, returned by a Python one."""

    def __init__(self, inner: Work) -> None:
        super().__init__()
        self._inner = inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._inner.wait(timeout)

    def _make_future(self) -> torch.futures.Future[Any]:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def synchronize(self) -> None:
        self._inner.synchronize()


def install() -> None:
    """Put this in place: when the first backend is made, so that others see torch unchanged."""
    global _installed
    with _install_once:
        if _installed:
            return
        _installed = True
        for name in FORWARDED:
            setattr(Work, name, _forwarding(name, getattr(Work, name)))


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
    _question.asked, _question.answer = True, None
    try:
        work.get_future()
    except RuntimeError:  # a C++ work without futures
        return None
    finally:
        _question.asked = False
        found, _question.answer = _question.answer, None
    return found
