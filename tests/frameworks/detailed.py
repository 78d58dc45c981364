"""Each way to train that fanin.torch has, beside DDP: detailed.py WAY BACKEND [detail].

With "detail" under TORCH_DISTRIBUTED_DEBUG=DETAIL, for which torch wraps each backend. Torch 2.15
itself then crashes in DDP on Gloo. Ways that keep all of a gradient come to the parameters of plain
DDP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import fanin.torch
import results
import torch
import torch.distributed as dist
from fanin.torch.compression import TopK
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

IN_DETAIL = "detail" in sys.argv
if IN_DETAIL:  # before the first group
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)

Way = Callable[[torch.nn.Module], tuple[Any, Any]]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ddp(model: torch.nn.Module) -> tuple[Any, Any]:
    wrapped = DistributedDataParallel(model)
    return wrapped, sgd(wrapped)


def hooked(state: Callable[[], Any], hook: Callable[..., Any]) -> Way:
    def made(model: torch.nn.Module) -> tuple[Any, Any]:
        wrapped, optimizer = ddp(model)
        wrapped.register_comm_hook(state(), hook)
        return wrapped, optimizer

    return made


ALL = len(results.flat(results.model()))
WAYS: dict[str, Way] = {
    "ddp": ddp,
    "allreduce_hook": hooked(fanin.torch.HookState, fanin.torch.allreduce_hook),
    "machine_hook": hooked(lambda: fanin.torch.MachineState("gloo"), fanin.torch.machine_hook),
    "compression_hook": hooked(
        lambda: fanin.torch.CompressionState(TopK(ALL), min_bytes=1), fanin.torch.compression_hook
    ),
    "DistributedOptimizer": lambda model: (
        model,
        fanin.torch.DistributedOptimizer(sgd(model), model),
    ),
    "AsynchronousOptimizer": lambda model: (
        model,
        fanin.torch.AsynchronousOptimizer(sgd(model), wait_for=dist.get_world_size()),
    ),
}

dist.init_process_group(sys.argv[2])
world: Any = dist.group.WORLD
wrapper = type(world._get_backend(torch.device("cpu"))).__name__
assert ("Wrapper" in wrapper) == IN_DETAIL, wrapper
model, optimizer = WAYS[sys.argv[1]](results.model())
inputs, targets = results.data()[dist.get_rank() :: dist.get_world_size()]
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss: Any = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if hasattr(optimizer, "close"):
    optimizer.close()
results.write(
    dist.get_rank(), backend=dist.get_backend(), losses=losses, parameters=results.flat(model)
)
dist.barrier()
dist.destroy_process_group()
