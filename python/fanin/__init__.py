"""fanin sums gradients of data-parallel training: services add what the ranks send, not a ring.

The services are the ranks' own, or machines that only sum (``fanin switch``), or both.

- PyTorch: ``torch.distributed.init_process_group("fanin")`` (see `fanin.torch`)
- NumPy, JAX and everything else: `connect`, then the collectives of `Group`
- command line: ``fanin run``, ``fanin switch``

Importing this package has no effects: no threads, no sockets, no environment reads, no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin import errors as errors
    from fanin._fanin import version as __version__
    from fanin.arrays.connecting import connect as connect
    from fanin.arrays.group import Group as Group
    from fanin.arrays.group import Handle as Handle

# Loaded on first use: `import torch` imports this package through the entry point of the backend,
# and neither NumPy nor the binding should be charged to programs that use something else.
_HOMES = {
    "Group": ("fanin.arrays.group", "Group"),
    "Handle": ("fanin.arrays.group", "Handle"),
    "connect": ("fanin.arrays.connecting", "connect"),
    "__version__": ("fanin._fanin", "version"),
}

__all__ = ["Group", "Handle", "__version__", "connect", "errors"]


def __getattr__(name: str) -> object:
    import importlib

    if name == "errors":
        return importlib.import_module("fanin.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, attribute = _HOMES[name]
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as missing:
        if missing.name != "numpy":
            raise
        text = f"fanin.{name} needs NumPy; install it with: pip install numpy"
        raise ModuleNotFoundError(text, name="numpy") from None
    return getattr(module, attribute)
