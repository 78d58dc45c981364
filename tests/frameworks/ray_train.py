"""Ray Train on a cluster of two nodes on this machine: ray_train.py BACKEND [forgotten].

The nodes are somebody else's: they know nothing of FANIN_ variables. `runtime_env` hands them to
the workers, and nothing else does; "forgotten" leaves it out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import results
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig


def train() -> None:
    model = ray.train.torch.prepare_model(results.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(results.data(), batch_size=4)
    losses = []
    for inputs, targets in ray.train.torch.prepare_data_loader(loader):
        loss: Any = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results.write(
        dist.get_rank(),
        backend=dist.get_backend(),
        losses=losses,
        node=ray.get_runtime_context().get_node_id(),
        parameters=results.flat(model),
    )


def main() -> None:
    names = [name for name in os.environ if name.startswith("FANIN_")]
    told = {name: os.environ.pop(name) for name in names}
    environment = {} if "forgotten" in sys.argv else {"env_vars": told}
    # Its sockets lie there, whose names must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray writes a file there without making the folder, wherever its head has its own.
        os.environ["RAY_TMPDIR"] = folder
        own = Path(folder, "ray")
        own.mkdir()
        cluster = Cluster(
            initialize_head=True, head_node_args={"include_dashboard": False, "temp_dir": str(own)}
        )
        cluster.add_node()
        try:
            ray.init(cluster.address, runtime_env=environment)
            ray.train.torch.TorchTrainer(
                train,
                torch_config=ray.train.torch.TorchConfig(backend=sys.argv[1]),
                scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
                run_config=RunConfig(storage_path=os.environ["RESULTS"]),
            ).fit()
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
