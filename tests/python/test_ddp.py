"""DistributedDataParallel on fanin trains as on Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import fanin.torch
import pytest
import torch
from conftest import Launch
from ranks import Me
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def train(me: Me, backend: str, hook: str) -> list[torch.Tensor]:
    """Parameters after a few steps, with data that differs from rank to rank."""
    me.init(backend)
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
    model = DistributedDataParallel(network, bucket_cap_mb=0.01)
    state: Any = None
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fanin":
        state = fanin.torch.HookState()
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dice = torch.Generator().manual_seed(me.rank)
    for _ in range(STEPS):
        x = torch.randn(16, 32, generator=dice)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if hook == "fanin":
        state.close()
    return [parameter.detach() for parameter in model.parameters()]


def differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


# Rounding of the sums, carried through a few steps; fp16 and PowerSGD round, and amplify, more.
BOUNDS = {"none": 1e-6, "fp16": 1e-3, "powersgd": 1e-3, "fanin": 1e-6}


@pytest.mark.parametrize("hook", BOUNDS)
def test_training_equals_gloos_within_the_bound(launch: Launch, hook: str) -> None:
    ours = launch(train, 2, "gloo" if hook == "fanin" else "fanin", hook).results()
    gloo = launch(train, 2, "gloo", "none" if hook == "fanin" else hook).results()
    assert differences(ours[0], ours[1]) == 0  # bit-identical on all ranks
    assert differences(ours[0], gloo[0]) <= BOUNDS[hook]


def hook_with_a_group(me: Me) -> list[float]:
    me.init("gloo")
    with fanin.connect(job="ddp-group", rank=me.rank, world_size=me.world_size) as group:
        model = DistributedDataParallel(nn.Linear(3, 1).double())
        model.register_comm_hook(group, fanin.torch.allreduce_hook)
        model(torch.full((1, 3), float(me.rank), dtype=torch.float64)).sum().backward()
        # float64 is none of the switch's, so Gloo averaged it; float32 comes from the switch.
        gradients = model.module.weight.grad.flatten().tolist()
        model = DistributedDataParallel(nn.Linear(3, 1))
        model.register_comm_hook(group, fanin.torch.allreduce_hook)
        model(torch.full((1, 3), float(me.rank))).sum().backward()
        gradients += model.module.weight.grad.flatten().tolist()
        return [float(gradient) for gradient in gradients]


def test_the_hook_takes_a_group_and_falls_back_for_other_dtypes(launch: Launch) -> None:
    for got in launch(hook_with_a_group, 2).results():
        assert got == pytest.approx([0.5] * 6)


def broken_backward(me: Me) -> tuple[str, str]:
    me.init(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    me.say("forward done")
    me.hear()
    try:
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "nothing", "raised"


def test_backward_raises_cleanly_when_a_rank_is_killed(launch: Launch) -> None:
    ranks = launch(broken_backward, 3)
    for rank in range(3):
        assert ranks.hear(rank) == "forward done"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "go")
    for rank in (0, 1):
        kind, message = ranks.result(rank)
        assert kind == "RuntimeError"
        assert "RankLost" in message
        assert "2" in message


def fully_sharded(me: Me) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    me.init("cpu:fanin")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (me.world_size,)))
    model(torch.full((2, 8), float(me.rank))).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return float(gradient.full_tensor().sum())  # type: ignore[attr-defined]


def test_fully_sharded_training_runs(launch: Launch) -> None:
    first, second = launch(fully_sharded, 2).results()
    assert first == second != 0
