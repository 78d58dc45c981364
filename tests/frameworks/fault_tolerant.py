"""Two replica groups under torchft: fault_tolerant.py gloo | fanin.

Torchft makes its groups by torch's classes and not by name, so FANIN_AS does not reach them: a
group on fanin is the six lines of `ProcessGroupFanin`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from typing import Any

import results
import torch
import torch.distributed as dist
from fanin.torch.backend import create
from torch._C._distributed_c10d import (
    Store,
    TCPStore,
    _DistributedBackendOptions,
)
from torch.distributed.distributed_c10d import GroupName
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper

CPU = torch.device("cpu")
CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class ProcessGroupFanin(ProcessGroupWrapper):  # type: ignore[misc]
    """What torchft makes anew whenever a replica group comes or goes."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = _DistributedBackendOptions()
        options.store, options.group_id = store, GroupName("torchft")
        options.group_rank, options.group_size = rank, world_size
        options.timeout = self._timeout
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(CUSTOM)
        group._register_backend(CPU, CUSTOM, create(options, None))
        return group

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-fanin"


def replica(number: int, backend: str, lighthouse: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = results.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = ProcessGroupFanin if backend == "fanin" else ProcessGroupGloo
    manager = Manager(
        pg=kind(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
        hostname="localhost",
    )
    try:
        parallel: Any = DistributedDataParallel(manager, model)
        wrapped = OptimizerWrapper(manager, optimizer)
        losses = []
        inputs, targets = results.data()[number::2]
        while manager.current_step() < 4:
            wrapped.zero_grad()
            loss: Any = torch.nn.functional.mse_loss(parallel(inputs), targets)
            loss.backward()
            wrapped.step()
            losses.append(loss.item())
        results.write(
            number,
            backend=backend,
            losses=losses,
            participants=manager.num_participants(),
            parameters=results.flat(model),
        )
    finally:
        manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    os.environ["TORCHFT_LIGHTHOUSE"] = address = lighthouse.address()
    context = multiprocessing.get_context("spawn")
    replicas = [
        context.Process(target=replica, args=(number, sys.argv[1], address)) for number in (0, 1)
    ]
    try:
        for each in replicas:
            each.start()
        for each in replicas:
            each.join()
    finally:
        lighthouse.shutdown()
    sys.exit(any(each.exitcode for each in replicas))


if __name__ == "__main__":
    main()
