"""Errors of collectives that a framework's compiled program calls.

The framework makes an error of its own of each, with the text alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fanin.horovod.errors import HorovodInternalError


class Programs:
    """The compiled programs of a framework, whose errors are of one class."""

    def __init__(self, raises: type[Exception], forget: Callable[[], None]) -> None:
        """`forget` is called before an error is raised as Horovod's."""
        self._raises = raises
        self._forget = forget
        self._last: HorovodInternalError | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Keep an error for `as_horovods`."""
        try:
            yield
        except HorovodInternalError as error:
            self._last = error
            raise

    @contextlib.contextmanager
    def as_horovods(self) -> Iterator[None]:
        """Raise an error of a program's call as the `HorovodInternalError` that it was."""
        self._last = None
        try:
            yield
        except HorovodInternalError:
            raise
        except self._raises as error:
            last, self._last = self._last, None
            if last is None or str(last) not in str(error):
                raise
            self._forget()
            raise last from error
