"""All of `fanin.torch` where torch wraps its backend, where that is for CUDA devices alone, and
where the program has tensors made on another device than it trains on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch.backend import FaninBackend, backend_of
from fanin.torch.compression import Dithering, OneBit, RandomK, TopK
from ranks import Me
from torch import nn, optim
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

MODES = ["detail", "cuda alone", "another default device"]
STEPS = 4


def init(me: Me, mode: str) -> None:
    if mode == "detail":  # TORCH_DISTRIBUTED_DEBUG=DETAIL, in a process that has torch
        c10d.set_debug_level(c10d.DebugLevel.DETAIL)
        me.init()
        group: Any = dist.group.WORLD
        assert not isinstance(group._get_backend(torch.device("cpu")), FaninBackend)
    elif mode == "cuda alone":
        me.init("cpu:gloo,cuda:fanin")
    else:  # what is made there holds nothing
        torch.set_default_device("meta")
        me.init()


def train(me: Me, model: nn.Module, optimizer: Any) -> None:
    where = next(model.parameters()).device
    dice = torch.Generator().manual_seed(me.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(8, 40, generator=dice, device="cpu").to(where)
        model(inputs).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def overlapped(me: Me, model: nn.Module, _: str) -> None:
    optimizer = fanin.torch.DistributedOptimizer(sgd(model), model)
    train(me, model, optimizer)
    optimizer.close()


def asynchronous(me: Me, model: nn.Module, _: str) -> None:
    optimizer = fanin.torch.AsynchronousOptimizer(sgd(model), wait_for=me.world_size)
    train(me, model, optimizer)
    optimizer.close()


def by_deltas(me: Me, model: nn.Module, service: str) -> None:
    optimizer = fanin.torch.DeltaOptimizer(sgd(model), service)
    train(me, model, optimizer)
    optimizer.close()


def hooked(make: Callable[[], tuple[Any, Any]]) -> Callable[[Me, nn.Module, str], None]:
    def run(me: Me, model: nn.Module, _: str) -> None:
        state, hook = make()
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, hook)
        train(me, wrapped, sgd(wrapped))

    return run


WAYS: dict[str, Callable[[Me, nn.Module, str], None]] = {
    "DistributedOptimizer": overlapped,
    "AsynchronousOptimizer": asynchronous,
    "DeltaOptimizer": by_deltas,
    "machine_hook": hooked(lambda: (fanin.torch.MachineState("gloo"), fanin.torch.machine_hook)),
    **{
        f"compression_hook by {type(compressor).__name__}": hooked(
            lambda compressor=compressor: (  # type: ignore[misc]  # mypy infers no lambda's default
                fanin.torch.CompressionState(compressor, min_bytes=1),
                fanin.torch.compression_hook,
            )
        )
        for compressor in (TopK(0.5), RandomK(0.5), OneBit(), Dithering(7))
    },
    "allreduce_hook": hooked(lambda: (fanin.torch.HookState(), fanin.torch.allreduce_hook)),
}


def trained(me: Me, mode: str, way: str, service: str) -> tuple[list[torch.Tensor], bool]:
    where = torch.get_default_device()
    init(me, mode)
    torch.manual_seed(3)
    with where:
        model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 8))
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    WAYS[way](me, model, service)
    ended = [parameter.detach().clone() for parameter in model.parameters()]
    dist.barrier()
    return ended, not any(map(torch.equal, begun, ended))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_train_does(
    launch: Launch, parameter_service: str, mode: str, way: str
) -> None:
    (first, moved), (second, _) = launch(trained, 2, mode, way, parameter_service).results()
    assert moved
    assert all(map(torch.equal, first, second))


def asked(me: Me, mode: str) -> dict[str, Any]:
    init(me, mode)
    seen: dict[str, Any] = {"lost": fanin.torch.lost()}
    for _ in range(2):
        plan: Any = fanin.torch.plan()
        seen["services"] = [each["service"] for each in plan["services"]]
        fanin.torch.replan(me.switch)
    pair: Any = dist.new_group([0, 1])
    seen["of another group"] = fanin.torch.plan(pair) is not None
    other: Any = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="the group's backend is gloo, and not fanin"):
        fanin.torch.plan(other)
    dist.barrier()
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_group_tells_its_plan_and_is_planned_anew(launch: Launch, switch: str, mode: str) -> None:
    expected = {"lost": (0, 0), "services": [switch], "of another group": True}
    assert launch(asked, 2, mode).results() == [expected] * 2


def destroyed(me: Me) -> bool:
    init(me, "detail")
    pair: Any = dist.new_group([0, 1])
    backend = weakref.ref(backend_of(pair))
    dist.all_reduce(torch.ones(3), group=pair)
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    dist.barrier()
    return backend() is None


def test_a_group_that_was_destroyed_is_not_kept_for_the_sake_of_debugging(launch: Launch) -> None:
    assert launch(destroyed, 2).results() == [True, True]
