"""DistributedDataParallel on fanin trains as on Gloo."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from ranks import Me, sums_on_switch
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
    elif hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
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
BOUNDS = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-3, "powersgd": 1e-3, "fanin": 1e-6}


@pytest.mark.parametrize("hook", BOUNDS)
def test_training_equals_gloos_within_the_bound(launch: Launch, hook: str) -> None:
    ours = launch(train, 2, "gloo" if hook == "fanin" else "fanin", hook).results()
    gloo = launch(train, 2, "gloo", "none" if hook == "fanin" else hook).results()
    assert differences(ours[0], ours[1]) == 0  # bit-identical on all ranks
    assert differences(ours[0], gloo[0]) <= BOUNDS[hook]


class Branching(nn.Module):
    """A trunk, and branches of which each call uses one: the others' parameters stay unused."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 8) for _ in range(branches))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.head(self.branches[branch](self.trunk(x).tanh()))
        return out


def branching(mode: str, **keywords: Any) -> DistributedDataParallel:
    torch.manual_seed(4)
    # Buckets of 2 kB: several, so that their order matters.
    return DistributedDataParallel(
        Branching(1 if mode in ("no_sync", "bucket view", "join") else 4),
        bucket_cap_mb=0.002,
        **keywords,
    )


KEYWORDS: dict[str, dict[str, Any]] = {
    "no_sync": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "join": {},
}


def train_in_mode(me: Me, mode: str) -> tuple[list[torch.Tensor], int]:
    """Parameters, and how many sums the switch made, after training that `mode` makes special."""
    model = branching(mode, **KEYWORDS[mode])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dice = torch.Generator().manual_seed(me.rank)

    def backward(branch: int = 0) -> None:
        x = torch.randn(16, 32, generator=dice)
        model(x, branch).square().mean().backward()

    def step(number: int) -> None:
        optimizer.zero_grad()
        if mode == "no_sync":
            before = sums_on_switch()
            with model.no_sync():
                backward()
                backward()
            assert sums_on_switch() == before
            backward()
        elif mode == "find_unused":
            # Ranks 0 and 1 never agree, and nobody ever uses the last branch.
            backward((me.rank + number) % 3)
            unused = model.module.branches[3].weight.grad
            assert unused is None or not unused.any()
        elif mode == "static_graph":
            backward(2)  # the same for ever: without static_graph DDP refuses the second step
        else:
            backward()
        optimizer.step()

    if mode == "join":
        # Uneven inputs: rank 1 has 5 batches more, for which rank 0 stands in.
        with model.join():
            for number in range(STEPS + 5 * me.rank):
                step(number)
    else:
        for number in range(STEPS):
            step(number)
    if mode == "bucket view":
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        assert len(storages) < len(gradients)  # they are views of the buckets
    return [parameter.detach().clone() for parameter in model.parameters()], sums_on_switch()


def train_in_mode_on_both(me: Me, mode: str) -> Any:
    return me.on_both(train_in_mode, mode)


@pytest.mark.parametrize("mode", KEYWORDS)
def test_each_mode_of_ddp_trains_as_on_gloo(launch: Launch, mode: str) -> None:
    (gloo, (ours, sums)), (_, (others, _)) = launch(train_in_mode_on_both, 2, mode).results()
    assert differences(ours, others) == 0
    assert differences(ours, gloo[0]) <= BOUNDS["none"]
    # Several buckets a step, but for the first, in which DDP has yet to learn their order.
    assert sums >= 2 * STEPS - 1
    assert gloo[1] == 0


def hook_by_atp(me: Me) -> tuple[list[float], list[int]]:
    me.init("gloo")
    state = fanin.torch.HookState(protocol="atp")
    gradients: list[float] = []
    sums = []
    for dtype in (torch.float64, torch.float32):
        model = DistributedDataParallel(nn.Linear(3, 1).to(dtype))
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
        model(torch.full((1, 3), float(me.rank), dtype=dtype)).sum().backward()
        gradients += model.module.weight.grad.flatten().tolist()
        sums.append(sums_on_switch(state.group))
    state.close()
    state.close()
    return gradients, sums


def test_the_hook_falls_back_for_dtypes_that_the_services_do_not_sum(launch: Launch) -> None:
    with SwitchProcess("--protocol", "atp") as server:
        results = launch(hook_by_atp, 2, at=server.address).results()
    for gradients, sums in results:
        assert gradients == pytest.approx([0.5] * 6)
        assert sums == [0, 1]


def snippet() -> str:
    """What README says about DDP beside another backend."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (found,) = re.findall(r"```python\n((?:(?!```).)*HookState\(\).*?)```", readme, re.DOTALL)
    return str(found)


def as_readme_says(me: Me, code: str, members: list[int] | None) -> list[float]:
    me.init("gloo")
    group: Any = None if members is None else dist.new_group(members)
    if members is not None and me.rank not in members:
        dist.barrier()
        return []
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    if group is None:
        exec(code, {"model": model})
    else:
        state = fanin.torch.HookState(process_group=group)
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
        assert sums_on_switch(state.group) == 0
    model(torch.full((1, 3), float(me.rank))).sum().backward()
    gradients: list[float] = model.module.weight.grad.flatten().tolist()
    dist.barrier()
    return gradients


def test_the_hook_runs_as_readme_has_it_beside_gloo_with_nothing_started(launch: Launch) -> None:
    assert launch(as_readme_says, 2, snippet(), None, at="").results() == [[0.5] * 3] * 2


def test_the_hook_is_for_the_ranks_of_its_process_group(launch: Launch) -> None:
    found = launch(as_readme_says, 4, "", [3, 1], at="").results()
    assert found == [[], [2.0] * 3, [], [2.0] * 3]


def broken_backward(me: Me, hook: str) -> Any:
    me.init(timeout=timedelta(seconds=30))
    model = DistributedDataParallel(nn.Linear(4, 4))
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "fanin":
        state = fanin.torch.HookState()
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
    loss = model(torch.ones(2, 4)).sum()
    me.say("forward done")
    me.hear()
    with pytest.raises(errors.RankLost) as caught:
        loss.backward()
    error = caught.value
    assert error.rank == 2
    assert error.tensor is not None
    assert type(error.__cause__) is RuntimeError  # torch's, with its text
    assert str(error) in str(error.__cause__)
    return str(error)


@pytest.mark.parametrize("hook", ["none", "fp16", "fanin"])
def test_backward_raises_the_typed_error_when_a_rank_is_killed(launch: Launch, hook: str) -> None:
    ranks = launch(broken_backward, 3, hook)
    for rank in range(3):
        assert ranks.hear(rank) == "forward done"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "go")
    for rank in (0, 1):
        message = ranks.result(rank)
        dtype = "float16" if hook == "fp16" else "float32"
        said = rf"this ended the (sum|average) of 20 {dtype} \(all-reduce \d+\)"
        assert re.search(said, message), message


class OwnError(RuntimeError):
    """An error of the program's own."""


def fail(_: torch.Tensor) -> None:
    raise OwnError("not of the network")


def own_error(me: Me) -> None:
    """What else backward raises is raised as ever."""
    me.init()
    y: Any = torch.ones(3, requires_grad=True) * 2
    y.register_hook(fail)
    with pytest.raises(OwnError):
        y.sum().backward()
    without: Any = torch.ones(1)
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        without.backward()
    assert caught.value.__cause__ is None


def test_backward_raises_other_errors_as_ever(launch: Launch) -> None:
    launch(own_error, 1).results()


def another_collective(me: Me, call: str) -> None:
    me.init(timeout=timedelta(seconds=30))
    dist.barrier()
    me.say("ready")
    me.hear()
    tensor = torch.ones(3)
    ranks: list[Any] = [None] * 3
    calls: dict[str, Any] = {
        "max": lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(tensor, src=2),
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object(ranks, me.rank),
        "recv": lambda: dist.recv(tensor, src=2),
        "future": lambda: future_of_max(tensor).wait(),
    }
    with pytest.raises(RuntimeError) as caught:
        calls[call]()
    if call == "future":  # of a typed error torch keeps the text
        assert "RankLost" in str(caught.value)
        assert "rank 2" in str(caught.value)
    else:
        assert isinstance(caught.value, errors.RankLost)
        assert caught.value.rank == 2
        on_switch = call in ("broadcast", "object")
        assert ("on Gloo: " in str(caught.value)) != on_switch


def future_of_max(tensor: torch.Tensor) -> Any:
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    return work.get_future()


@pytest.mark.parametrize("call", ["max", "barrier", "recv", "future", "broadcast", "object"])
def test_every_collective_names_the_rank_that_was_killed(launch: Launch, call: str) -> None:
    ranks = launch(another_collective, 3, call)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "go")
    for rank in (0, 1):
        ranks.result(rank)


def hooks_of_some(me: Me) -> int:
    me.init("gloo")
    pair: Any = dist.new_group([0, 1])
    of_pair = fanin.torch.HookState(process_group=pair) if me.rank < 2 else None
    # Torch names these by how many groups each rank has made.
    everyone: Any = dist.new_group(timeout=timedelta(seconds=20))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=everyone)
    of_all = fanin.torch.HookState(timeout=20.0)
    for state in (of_pair, of_all):
        if state is not None:
            state.close()
    return int(tensor.item())


def test_a_hook_of_some_ranks_leaves_the_names_of_later_groups_alone(launch: Launch) -> None:
    assert launch(hooks_of_some, 3, at="").results() == [3, 3, 3]
