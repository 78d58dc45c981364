"""What a forked child of a rank must leave alone.

A child inherits its parent's groups, and not the threads behind them. Gloo's destructor waits for
such threads, for ever: a child that ends with `sys.exit` would hang in it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache

_groups: weakref.WeakSet[object] = weakref.WeakSet()


def never_destroy_in_child(group: object) -> None:
    """Have every child that is forked while `group` lives keep it to its end."""
    _groups.add(group)
    _register()


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_keep)


def _keep() -> None:
    for group in list(_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
