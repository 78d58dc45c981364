"""Makes a group of what `shrink_group` leaves of one of ours.

Torch 2.15's `_finalize_shrunk_group` does three things that are wrong for it:

- It registers whatever backend has shrunk as Gloo's, and `DistributedDataParallel` then reads it as
  a C++ object that it is not: the process ends.
- The new group has a backend for a single device.
- It takes the ranks that are gone, which are counted in the group, for ranks of the default group.
- A default group that has shrunk is said to have the ranks of before, and counts anew.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from fanin.torch.patches.installed import once


@once("a process ends that makes DistributedDataParallel of a group after shrink_group()")
def install(ours: type[c10d.Backend]) -> None:
    """Put this in place for backends of a class: when the first is made."""
    original = distributed_c10d._finalize_shrunk_group
    kind = c10d.ProcessGroup.BackendType.CUSTOM

    @functools.wraps(original)
    def finalize(about: Any, excluded: set[int], backend: c10d.Backend) -> c10d.ProcessGroup:
        if not isinstance(backend, ours):
            return original(about, excluded, backend)
        before = about["process_group"]
        devices = before._device_types
        ranks = distributed_c10d.get_process_group_ranks(before)
        group = original(about, {ranks[rank] for rank in excluded}, backend)
        for device in devices:
            group._register_backend(device, kind, backend)
        group._set_default_backend(kind)
        if about["is_default_group"]:
            counted = {rank: rank for rank in range(group.size())}
            distributed_c10d._world.pg_group_ranks[group] = counted
        return group

    distributed_c10d._finalize_shrunk_group = finalize  # type: ignore[assignment]
