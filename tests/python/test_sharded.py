"""Parameters and optimizer states spread over ranks, on meshes of one and of two dimensions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch.works.work import Request
from ranks import Me, sums_on_switch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def alone(world_size: int, make: Any) -> list[torch.Tensor]:
    """The same training without any communication: one process that has all ranks' batches."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(batch(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


# float32 sums in another order, carried through a few steps.
BOUND = 1e-6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fully_sharded(me: Me, shape: tuple[int, ...]) -> tuple[list[torch.Tensor], int, int]:
    """FSDP2; over a mesh of two dimensions, sharded in one and replicated in the other (HSDP).

    The parameters, how many reduce-scatters the services did, and how many all-reduces.
    """
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        begun = count_begun(patch)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(me.rank, step)).square().mean().backward()
            optimizer.step()
    shards = mesh.get_group("shard" if len(shape) == 2 else 0)
    assert begun["reduce_scatter"] + begun["all_gather"] <= others_on_switch(shards)
    whole = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() < parameter.numel()
        whole.append(parameter.full_tensor().detach())
    sums = sums_on_switch(mesh.get_group("replicate")) if len(shape) == 2 else 0
    return whole, begun["reduce_scatter"], sums


def count_begun(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what this rank asks the services for, by its kind."""
    begun: Counter[str] = Counter()
    submit = Request.submit

    def counted(request: Request, *args: Any) -> Any:
        begun[request.collective] += 1
        return submit(request, *args)

    patch.setattr(Request, "submit", counted)
    return begun


def others_on_switch(group: Any) -> int:
    """How many collectives other than all-reduces the services have done for a group."""
    backend: Any = group._get_backend(torch.device("cpu"))
    if isinstance(backend, dist.ProcessGroupGloo):
        return 0
    return int(backend._channel._client.statistics()["others_completed"])


def fully_sharded_on_both(me: Me, shape: tuple[int, ...]) -> Any:
    return me.on_both(fully_sharded, shape)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["FSDP2", "FSDP2, replicated"])
def test_fully_sharded_training_equals_gloos_and_that_of_one_process(
    launch: Launch, shape: tuple[int, ...]
) -> None:
    world_size = torch.Size(shape).numel()
    expected = alone(world_size, sgd)
    assert furthest(expected, list(network().parameters())) > 1e-2  # it moved
    for gloo, ours in launch(fully_sharded_on_both, world_size, shape).results():
        assert furthest(ours[0], gloo[0]) <= BOUND
        assert furthest(ours[0], expected) <= BOUND
        # The gradients of each of the three layers are scattered by the services, in each step.
        assert ours[1] == 3 * STEPS
        # So are the all-reduces between replicas.
        assert (ours[2] >= STEPS) == (len(shape) == 2)
        assert gloo[1:] == (0, 0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


def zero(me: Me) -> tuple[list[torch.Tensor], list[int], int]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.Adam,
        parameters_as_bucket_view=True,
        lr=0.01,
        eps=1e-3,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(me.rank, step)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    states = optimizer.state_dict()["state"] if me.rank == 1 else {}
    moments = sorted(int(state["exp_avg"].numel()) for state in states.values())
    return [p.detach().clone() for p in model.parameters()], moments, sums_on_switch()


def zero_on_both(me: Me) -> Any:
    return me.on_both(zero)


def test_a_zero_redundancy_optimizer_equals_gloos_and_that_of_one_process(launch: Launch) -> None:
    results = launch(zero_on_both, 2).results()
    expected = alone(2, adam)
    for gloo, ours in results:
        assert furthest(ours[0], gloo[0]) <= BOUND
        assert furthest(ours[0], expected) <= BOUND
        assert ours[2] >= STEPS
    # Rank 1 got the states of all parameters, those too that rank 0 had.
    assert results[1][1][1] == sorted(parameter.numel() for parameter in expected)


def tensor_parallel(me: Me) -> tuple[list[torch.Tensor], int]:
    """Data-parallel in one dimension of a mesh, and layers cut in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    replica, _ = divmod(me.rank, 2)
    model = network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(replica, step)).square().mean().backward()
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, op=dist.ReduceOp.AVG, group=mesh.get_group("data"))
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [parameter.detach() for parameter in whole], sums_on_switch(mesh.get_group("model"))


def tensor_parallel_on_both(me: Me) -> Any:
    return me.on_both(tensor_parallel)


def test_layers_cut_over_ranks_train_as_on_gloo_and_in_one_process(launch: Launch) -> None:
    expected = alone(2, sgd)
    for (gloo, _), (ours, sums) in launch(tensor_parallel_on_both, 4).results():
        assert furthest(ours, gloo) <= BOUND
        assert furthest(ours, expected) <= BOUND
        assert sums >= STEPS  # what the rows' layer sums, at least


def meshes(me: Me) -> None:
    me.init()
    line = init_device_mesh("cpu", (me.world_size,))
    ours = torch.full((4, 6), float(me.rank))
    partial = DTensor.from_local(ours, line, [Partial()])
    assert (partial.full_tensor() == 6).all()  # 0 + 1 + 2 + 3
    sharded = partial.redistribute(line, [Shard(0)])
    assert sharded.to_local().tolist() == [[6.0] * 6]
    assert sums_on_switch(line.get_group()) == 1

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    row, column = divmod(me.rank, 2)
    assert grid.get_coordinate() == (row, column)
    # Along "column" the ranks of a row meet, along "row" those of a column.
    for name, expected in (("column", 2 * row + 2 * row + 1), ("row", column + column + 2)):
        group = grid.get_group(name)
        tensor = torch.full((1000,), me.rank, dtype=torch.int32)
        dist.all_reduce(tensor, group=group)
        assert (tensor == expected).all()
        assert dist.get_backend(group) == "fanin"
        assert sums_on_switch(group) == 1
    # Both dimensions at once, and by a sub-mesh that joins them.
    both = DTensor.from_local(ours, grid, [Partial(), Partial()])
    assert (both.redistribute(grid, [Replicate(), Replicate()]).to_local() == 6).all()
    flat: Any = grid["row", "column"]._flatten("all")
    tensor = torch.full((3,), me.rank, dtype=torch.int32)
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor.tolist() == [6] * 3


def test_device_meshes_of_one_and_two_dimensions(launch: Launch) -> None:
    launch(meshes, 4).results()
