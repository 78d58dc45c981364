"""What Horovod's tests import, and those for PyTorch do not call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_thread(target: Callable[..., Any], args: tuple[Any, ...] = ()) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
