"""The processes of a stage: none of them outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill the process at the end of the block."""
    try:
        yield process
    finally:
        # Not asked to end: a service would wait for ranks to hear of it, and they are gone by now.
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def end_with_parent() -> None:
    """Have the kernel end this process with its parent: PR_SET_PDEATHSIG, which survives exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
