"""Changes to torch itself: each is made once a process, and most programs train without them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import ParamSpec

log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")
_Install = Callable[_Arguments, None]


def once(without: str) -> Callable[[_Install[_Arguments]], _Install[_Arguments]]:
    """Make a function run once in a process. If it fails, warn that `without` it is so.

    Such a function replaces something of torch's that is no public interface, and that another
    version may not have. A program that trains without it is better than one that does not.
    """

    def decorated(install: _Install[_Arguments]) -> _Install[_Arguments]:
        lock, done = threading.Lock(), False

        @functools.wraps(install)
        def run(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
            nonlocal done
            with lock:
                if done:
                    return
                done = True
                try:
                    install(*args, **keywords)
                except Exception as error:
                    from torch import __version__ as version

                    log.warning(
                        "torch %s is not as fanin knows it (%s: %s): %s",
                        version,
                        type(error).__name__,
                        error,
                        without,
                    )

        return run

    return decorated
