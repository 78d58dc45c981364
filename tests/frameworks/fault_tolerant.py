"""Two replica groups under torchft: fault_tolerant.py gloo | fanin.

Torchft makes its groups by classes and not by name, so FANIN_AS does not reach them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from typing import Any

import results
import torch
from fanin.torch import ProcessGroupFanin
from torch._C._distributed_c10d import TCPStore
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo


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
