"""Keeps `split_group` from asking a backend written in Python on ranks that are in no split.

`ProcessGroup.split_group` asks every backend on every rank, and those of C++ answer with no
backend where the rank is not meant. The answer None of a Python backend is a null pointer that
torch 2.15 dereferences (`PyBackend::initSlotAndCast` in PyBackend.hpp). Here such a rank asks only
the backends of devices that are not ours, which may need all ranks (NCCL does); those of the CPU do
not. Groups without ours are split as ever.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from fanin.torch.patches.installed import once


@once("split_group() with a rank in no split ends the process")
def install(ours: type[c10d.Backend]) -> None:
    """Put this in place for backends of a class: when the first is made."""
    original = c10d.ProcessGroup.split_group

    @functools.wraps(original)
    def split_group(
        group: c10d.ProcessGroup, ranks: list[int], *args: Any, **keywords: Any
    ) -> c10d.ProcessGroup | None:
        left_out = group.rank() not in ranks
        others = [
            device
            for device in group._device_types
            if not isinstance(unwrapped(group, device), ours)
        ]
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


def unwrapped(group: c10d.ProcessGroup, device: torch.device) -> c10d.Backend:
    """Return a group's backend for a device: what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps."""
    backend = group._get_backend(device)
    inside: c10d.Backend = getattr(backend, "wrapped_pg", backend)
    return inside
