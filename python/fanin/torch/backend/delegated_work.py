"""Works of the Gloo group inside, as works of this backend."""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from fanin.errors import FaninError
from fanin.torch.backend.gloo_tensors import Handed
from fanin.torch.patches.backward import lose_type
from fanin.torch.patches.work_methods import FindableWork

# How torch says that a wait ran out of its own time, and the work goes on.
WAITED_TOO_LONG = "Operation timed out!"
# How it says that a work of Gloo's has none: that of a reduce_scatter, a send or a receive.
NO_FUTURE = "getFuture not implemented"


class Owner(Protocol):
    """The backend, as its works know it."""

    def explain(self, error: Exception, peer: int | None) -> Exception:
        """Make of an error of Gloo one that says more, or return it."""

    def wait(self, inner: Work, timeout: timedelta, peer: int | None) -> bool:
        """Wait for a work on Gloo."""

    def over(self, work: DelegatedWork) -> None:
        """Hear that nothing is left to do for a work."""


class DelegatedWork(FindableWork):
    """A work of a C++ backend, returned by a Python one.

    `peer` is the rank that it needs, None for all. What `handed` has left to do is done by whoever
    learns first that Gloo is done.
    """

    def __init__(self, inner: Work, owner: Owner, handed: Handed, peer: int | None) -> None:
        super().__init__()
        self._inner = inner
        self._owner = owner
        self._handed = handed
        self._peer = peer
        # Gloo's works of a reduce_scatter, a send or a receive never say that they are over.
        self._is_over = False
        self._is_done = False
        self._asking = threading.RLock()
        # Of a work to which Gloo gives none.
        self._future: torch.futures.Future[Any] | None = None
        self._has_completed = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        # Gloo tells of a receive once: only one thread may ask it.
        if not self._asking.acquire(timeout=timeout.total_seconds() or -1):
            raise RuntimeError(WAITED_TOO_LONG)
        try:
            return self._wait(timeout)
        finally:
            self._asking.release()

    def _wait(self, timeout: timedelta) -> bool:
        if self._is_done:
            return True
        try:
            done = self._owner.wait(self._inner, timeout, self._peer)
        except RuntimeError as error:
            if WAITED_TOO_LONG in str(error):
                raise
            self._drop()
            explained = self._owner.explain(error, self._peer)
            if explained is error:
                raise
            raise explained from error
        self._finish()
        self._is_done = done
        return done

    def _make_future(self) -> torch.futures.Future[Any]:
        gloos = self._gloos_future()
        if gloos is not None:
            return gloos.then(self._outcome)
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            threading.Thread(target=self._complete, args=(future,), daemon=True).start()
            self._future = future
        return self._future

    def _gloos_future(self) -> torch.futures.Future[Any] | None:
        try:
            return self._inner.get_future()
        except RuntimeError as error:
            if NO_FUTURE not in str(error):
                raise
            return None

    def will_tell(self) -> None:
        """See to it that `has_told` is true one day: of some works Gloo tells a waiter alone."""
        if self._gloos_future() is None:
            self._make_future()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        try:
            self.wait()
        except Exception as error:
            if isinstance(error, FaninError):
                lose_type(error)
            future.set_exception(_without_frames(error))
        else:
            future.set_result([])
        self._has_completed = True

    def _outcome(self, future: torch.futures.Future[Any]) -> Any:
        try:
            value = future.value()
        except RuntimeError as error:
            self._drop()
            explained = self._owner.explain(error, self._peer)
            if isinstance(explained, FaninError):
                lose_type(explained)
            raise explained from None
        self._finish()
        return self._handed.restored(value)

    def is_over(self) -> bool:
        """Whether Gloo is done."""
        return self._is_over or self._inner.is_completed()

    def has_told(self) -> bool:
        """Whether Gloo is done, and the callbacks of all futures that somebody asked for have run.

        Gloo says that it is done after it has completed its future. See `will_tell` for the others.
        """
        return self._inner.is_completed() if self._future is None else self._has_completed

    def is_completed(self) -> bool:
        if not self.is_over():
            return False
        if self._handed.is_unfinished:
            with contextlib.suppress(RuntimeError):  # raised to whoever waits
                self.wait()
        return True

    def is_success(self) -> bool:
        self.is_completed()  # so that what Gloo wrote is where it belongs
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        self.is_completed()
        restored: list[torch.Tensor] = self._handed.restored(self._inner.result())
        return restored

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def synchronize(self) -> None:
        if self._handed.is_unfinished:
            self.wait()
        else:
            self._inner.synchronize()

    def _finish(self) -> None:
        self._handed.finish()
        self._is_over = True
        self._owner.over(self)

    def _drop(self) -> None:
        self._handed.drop()
        self._is_over = True
        self._owner.over(self)


def _without_frames(error: BaseException) -> BaseException:
    """Take tracebacks away: the future that keeps the error must not keep this work."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
