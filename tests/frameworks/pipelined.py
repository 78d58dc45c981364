"""torch.distributed.pipelining, with the schedule 1F1B: pipelined.py [BACKEND].

Two stages of two replicas each. Activations are sent between stages, and DDP's gradients are summed
between replicas. GPipe would not do: in torch 2.15 its backward passes end in an assertion of
DDP's, on Gloo, too. Under TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1 torch makes a group for each
direction between two stages.
"""

from __future__ import annotations

import sys
from typing import Any

import results
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
pipeline, replicas = mesh["stage"].get_group(), mesh["replica"].get_group()
number = dist.get_rank(pipeline)
whole: Any = results.model()
part = whole[:2] if number == 0 else whole[2:]
model = DistributedDataParallel(part, process_group=replicas)
stage = PipelineStage(model, number, 2, torch.device("cpu"), group=pipeline)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

inputs, targets = results.data()[dist.get_rank(replicas) :: 2]
losses = []
for _ in range(4):
    optimizer.zero_grad()
    found: list[torch.Tensor] = []
    if number == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=found)
    # Gradients of all four micro-batches are summed here, whatever DDP did for each of them.
    optimizer.step()
    mean = torch.stack(found).mean().detach() if found else torch.zeros(())
    dist.all_reduce(mean)
    losses.append(mean.item() / 2)
results.write(
    dist.get_rank(),
    backend=dist.get_backend(),
    losses=losses,
    parameters=results.flat(model),
    edges=len(stage._p2p_edge_groups),
)
dist.barrier()
dist.destroy_process_group()
