"""BytePS' interface: its calls as its own programs make them, beside what PyTorch computes."""

from __future__ import annotations

import inspect
import os
from typing import Any

import fanin.byteps.torch as bps
import pytest
import torch
from conftest import Launch
from fanin.byteps.torch.cross_barrier import CrossBarrier
from fanin.byteps.torch.parallel import DistributedDataParallel
from ranks import Me
from torch import nn

ALONE = ""  # for `launch`: no switch is named


def calls(me: Me) -> None:
    bps.init()
    n, rank = bps.size(), bps.rank()
    assert (n, rank) == (me.world_size, me.rank)
    assert (bps.local_size(), bps.local_rank()) == (n, rank)
    assert bps.declare("grad") == 0
    mine = torch.arange(4.0) + rank
    assert bps.push_pull(mine, name="grad").tolist() == [0.5, 1.5, 2.5, 3.5]
    assert bps.push_pull(mine, average=False, name="grad", priority=3).tolist() == [1, 3, 5, 7]
    assert mine.tolist() == [rank, rank + 1, rank + 2, rank + 3]
    handles = [
        bps.push_pull_async(torch.full((3,), float(version + rank)), name="grad", version=version)
        for version in range(3)
    ]
    for version, handle in enumerate(handles):
        assert bps.synchronize(handle).tolist() == [version + 0.5] * 3
        assert bps.poll(handle)
    there = torch.full((2,), float(rank))
    assert bps.push_pull_inplace(there, average=False, name="there") is there
    assert there.tolist() == [1, 1]
    handle = bps.byteps_push_pull(there, average=True, name="again")
    bps.synchronize(handle)
    assert there.tolist() == [1, 1]
    halves = bps.push_pull(mine, name="half", compression=bps.Compression.fp16)
    assert halves.dtype == torch.float32
    assert halves.tolist() == [0.5, 1.5, 2.5, 3.5]
    weight = torch.ones(3, requires_grad=True)
    through: Any = bps.push_pull(weight * (rank + 1), average=False, name="through")
    (through * (rank + 1)).sum().backward()
    assert weight.grad is not None
    # Both ranks' losses, 1 and 2 times the sum, by this rank's factor.
    assert weight.grad.tolist() == [3 * (rank + 1)] * 3
    assert bps.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    with pytest.raises(ValueError, match="push_pull needs a name"):
        bps.push_pull(mine)
    bps.suspend()
    with pytest.raises(ValueError, match=r"resume says rank 0 of 3, and this is rank \d of 2"):
        bps.resume(3, 1, 0)
    bps.resume(2, 1, rank)
    assert bps.push_pull(mine, name="grad").tolist() == [0.5, 1.5, 2.5, 3.5]
    bps.shutdown()


def test_push_pull_is_as_in_byteps(launch: Launch) -> None:
    launch(calls, 2, at=ALONE).results()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(model: Any, optimizer: Any, rank: int) -> list[float]:
    draw = torch.Generator().manual_seed(5)
    for _ in range(5):
        batch = torch.randn(2, 6, 4, generator=draw)
        optimizer.zero_grad()
        model(batch[rank]).square().mean().backward()
        optimizer.step()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    return [float(each) for parameter in model.parameters() for each in parameter.detach().ravel()]


def trains(me: Me) -> list[list[float]]:
    """One training by each of BytePS' ways, from what rank 0 begins with."""
    bps.init()
    found = []
    for way in ("optimizer", "barrier", "ddp"):
        model: Any = net()
        if me.rank:
            nn.init.zeros_(model[0].weight)
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if way == "optimizer":
            optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
            bps.broadcast_optimizer_state(optimizer, root_rank=0)
        elif way == "barrier":
            optimizer = CrossBarrier(model, optimizer, model.named_parameters(), num_steps=5)
        else:
            model = DistributedDataParallel(model)
        found.append(trained(model, optimizer, me.rank))
    with pytest.raises(ValueError, match="compresses nothing itself"):
        CrossBarrier(model, optimizer, compression=bps.Compression.fp16)
    with pytest.raises(ValueError, match="compresses nothing itself"):
        DistributedDataParallel(model, compression=bps.Compression.fp16)
    bps.shutdown()
    return found


def test_all_of_its_ways_train_alike(launch: Launch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(5)
    for _ in range(5):
        batch = torch.randn(2, 6, 4, generator=draw)
        optimizer.zero_grad()
        model(batch.reshape(12, 4)).square().mean().backward()
        optimizer.step()
    alone = [float(each) for parameter in model.parameters() for each in parameter.detach().ravel()]
    for ways in launch(trains, 2, at=ALONE).results():
        for way in ways:
            assert way == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("init", ["lazy"]),
        ("resume", ["num_workers", "num_servers", "global_rank", "context"]),
        ("push_pull", ["tensor", "average", "name", "version", "priority", "compression"]),
        ("push_pull_async", ["tensor", "average", "name", "version", "priority"]),
        ("push_pull_async_inplace", ["tensor", "average", "name", "version", "priority"]),
        ("push_pull_inplace", ["tensor", "average", "name", "version", "priority"]),
        ("broadcast_parameters", ["params", "root_rank", "prefix"]),
        ("broadcast_optimizer_state", ["optimizer", "root_rank", "prefix"]),
        (
            "DistributedOptimizer",
            ["optimizer", "named_parameters", "compression", "backward_passes_per_step"],
        ),
    ],
)
def test_arguments_are_byteps_own(call: str, arguments: list[str]) -> None:
    """As in byteps/torch of commit f5df52f, which is its last state."""
    assert list(inspect.signature(getattr(bps, call)).parameters) == arguments


def test_importing_it_starts_nothing() -> None:
    assert "HOROVOD_RANK" not in os.environ
    with pytest.raises(ValueError, match="not initialized"):
        bps.size()
