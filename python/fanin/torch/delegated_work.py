"""Works of the Gloo group inside, as works of this backend."""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from fanin.errors import FaninError
from fanin.torch.backward import lose_type
from fanin.torch.handles import FindableWork

# Makes of an error of Gloo one that says more, or returns it.
Explain = Callable[[Exception], Exception]


class DelegatedWork(FindableWork):
    """A work of a C++ backend, returned by a Python one."""

    def __init__(self, inner: Work, explain: Explain) -> None:
        super().__init__()
        self._inner = inner
        self._explain = explain

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return self._inner.wait(timeout)
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error

    def _make_future(self) -> torch.futures.Future[Any]:
        return self._inner.get_future().then(self._outcome)

    def _outcome(self, future: torch.futures.Future[Any]) -> Any:
        try:
            return future.value()
        except RuntimeError as error:
            explained = self._explain(error)
            if isinstance(explained, FaninError):
                lose_type(explained)
            raise explained from None

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


class AveragedWork(DelegatedWork):
    """A sum of integers on Gloo, of which the average is wanted: divided by whoever learns first.

    As with NCCL the quotient is truncated towards zero. `finished` is called with this work then.
    """

    def __init__(
        self,
        inner: Work,
        explain: Explain,
        sums: Sequence[torch.Tensor],
        divisor: int,
        finished: Callable[[AveragedWork], object],
    ) -> None:
        super().__init__(inner, explain)
        self._sums = list(sums)
        self._divisor = divisor
        self._finished = finished
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            done = super().wait(timeout)
        except BaseException:
            if self._inner.is_completed():
                self._finished(self)
            raise
        self._divide()
        return done

    def _outcome(self, future: torch.futures.Future[Any]) -> Any:
        value = super()._outcome(future)
        self._divide()
        return value

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        with contextlib.suppress(RuntimeError):  # raised to whoever waits
            self.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def _divide(self) -> None:
        # In inference mode also tensors that were made in it may be written to. Detached: writing
        # into a leaf that requires grad is no business of autograd here.
        with self._lock, torch.inference_mode():
            while self._sums:
                self._sums.pop().detach().div_(self._divisor, rounding_mode="trunc")
        self._finished(self)
