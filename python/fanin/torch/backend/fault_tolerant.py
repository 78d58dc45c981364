"""torchft's process group on fanin: `fanin.torch.ProcessGroupFanin`.

torchft makes its groups by classes and not by the name of a backend.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from fanin.torch.backend.fanin_backend import create

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"fanin.torch.ProcessGroupFanin is for torchft, and {missing.name} is not there: install "
        "it with: pip install torchft",
        name=missing.name,
    ) from None

_KIND = ProcessGroup.BackendType.CUSTOM


class ProcessGroupFanin(ProcessGroupWrapper):  # type: ignore[misc]
    """What `torchft.manager.Manager(pg=...)` makes anew whenever a replica group comes or goes.

    Has the settings of the environment (FANIN_SWITCH, ...). `configure` raises the errors of
    `fanin.errors`. Collectives take tensors on the CPU and on CUDA devices.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        options = _DistributedBackendOptions()
        options.store, options.group_id = store, GroupName("torchft")
        options.group_rank, options.group_size = rank, world_size
        options.timeout = self._timeout
        backend = create(options, None)
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(_KIND)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), _KIND, backend)
        return group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return "torchft-fanin"."""
        return "torchft-fanin"
