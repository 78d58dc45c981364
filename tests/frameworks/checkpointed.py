"""torch.distributed.checkpoint: a model and its optimizer saved, loaded into others, trained on.

checkpointed.py ddp | fsdp [BACKEND]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def made() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = results.model()
    if sys.argv[1] == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    inputs, targets = results.data()[dist.get_rank() :: dist.get_world_size()]
    loss: Any = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean)


def state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


dist.init_process_group(sys.argv[2] if len(sys.argv) > 2 else "gloo")
folder = Path(os.environ["RESULTS"])
model, optimizer = made()
step(model, optimizer)
save(state(model, optimizer), checkpoint_id=folder / "now")
saving: Any = async_save(state(model, optimizer), checkpoint_id=folder / "beside")
saving.result()
losses = [step(model, optimizer) for _ in range(3)]
for name in ("now", "beside"):
    model, optimizer = made()
    loaded = state(model, optimizer)
    load(loaded, checkpoint_id=folder / name)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert [step(model, optimizer) for _ in range(3)] == losses, "it went on from another place"
results.write(
    dist.get_rank(),
    backend=dist.get_backend(),
    losses=losses,
    parameters=results.flat(model),
)
dist.destroy_process_group()
