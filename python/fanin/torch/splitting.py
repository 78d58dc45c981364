"""Keeps `split_group` from asking a backend written in Python on ranks that are in no split.

`ProcessGroup.split_group` asks every backend on every rank, and those of C++ answer with no
backend where the rank is not meant. The answer None of a Python backend is a null pointer that
torch 2.15 dereferences (`PyBackend::initSlotAndCast` in PyBackend.hpp). Here such a rank asks only
the backends of devices that are not ours, which may need all ranks (NCCL does); those of the CPU do
not. Groups without ours are split as ever.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

_install_once = threading.Lock()
_installed = False


def install(ours: type[c10d.Backend]) -> None:
    """Put this in place for backends of a class: when the first is made."""
    global _installed
    with _install_once:
        if _installed:
            return
        _installed = True
        original = c10d.ProcessGroup.split_group

        @functools.wraps(original)
        def split_group(
            group: c10d.ProcessGroup, ranks: list[int], *args: Any, **keywords: Any
        ) -> c10d.ProcessGroup | None:
            left_out = group.rank() not in ranks
            others = [device for device in group._device_types if not _is(ours, group, device)]
            if left_out and len(others) < len(group._device_types):
                # `device_types` is the fifth parameter after `ranks`.
                given = args[4] if len(args) > 4 else keywords.pop("device_types", None)
                kept = [
                    device
                    for device in others
                    if device.type != "cpu" and (given is None or device in given)
                ]
                if not kept:
                    return None
                args, keywords["device_types"] = args[:4], kept
            return original(group, ranks, *args, **keywords)

        c10d.ProcessGroup.split_group = split_group  # type: ignore[method-assign, assignment]


def _is(ours: type[c10d.Backend], group: c10d.ProcessGroup, device: torch.device) -> bool:
    backend = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend into one that checks the calls.
    return isinstance(getattr(backend, "wrapped_pg", backend), ours)
