"""torch.compile, with Inductor's C++ code: collectives inside a graph, and DDP around one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from ranks import Me, sums_on_switch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

# Both ranks compile, in processes that begin without anything compiled.
COMPILING = 150.0
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where all compile: what one rank's compiler asked the machine for, no other one's asks."""
    return str(tmp_path_factory.mktemp("inductor"))


def prepare(folder: str) -> None:
    """Compile here, in this process, into the folder."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    # Without vectors, as Inductor would first compile a program for each kind to try it.
    inductor.cpp.vec_isa_ok = False


class Inductor:
    """The default compiler, which also keeps what it was given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self.graphs.append(graph)
        return compile_fx(graph, inputs)

    def all_reduces(self) -> int:
        """How many all-reduces are inside the graphs, in place of between them."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return sum("all_reduce" in str(node.target) for node in nodes)


def compiled_function(me: Me, folder: str) -> list[int]:
    prepare(folder)
    me.init()
    group = dist.group.WORLD
    assert group is not None
    inductor = Inductor()

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        dist.all_reduce(y)
        summed: torch.Tensor = collectives.all_reduce(x * 2, "sum", group)
        return summed.relu() + y

    compiled: Any = torch.compile(both_ways, fullgraph=True, backend=inductor)
    for turn in range(3):
        ours = torch.arange(1000.0).add(me.rank + turn)
        total = sum(torch.arange(1000.0).add(rank + turn) for rank in range(me.world_size))
        # fanin's bound for the sums of x * 3 and of x * 2 (n / f of the next power of two), which
        # is less than a float32 of this size can resolve: hence its rounding, too.
        assert (compiled(ours) - 5 * total).abs().max() <= 5 * 2048 * 2**-22
    return [len(inductor.graphs), inductor.all_reduces(), sums_on_switch()]


def test_a_compiled_function_sums_on_the_switch(launch: Launch, folder: str) -> None:
    # A single graph, which has both all-reduces in it, and both sums for each of three calls.
    results = launch(compiled_function, 2, folder).results(COMPILING)
    assert results == [[1, 2, 6]] * 2


class Network(nn.Module):
    """Two layers. No bare nn.Sequential: TorchDynamo begins no graph in torch's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh())
        return out


def train(me: Me, inductor: Inductor | None) -> tuple[list[torch.Tensor], int]:
    distributed: Any = dist
    torch.manual_seed(5)
    network = Network()
    # Two buckets: TorchDynamo's DDPOptimizer cuts the graph where the first ends.
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 2000
    ddp = DistributedDataParallel(network, bucket_cap_mb=0.002)
    model: Any = torch.compile(ddp, backend=inductor) if inductor else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    dice = torch.Generator().manual_seed(me.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=dice)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()], sums_on_switch()


def compiled_ddp(me: Me, folder: str) -> tuple[float, int, int]:
    prepare(folder)
    (eager, _), _ = me.on_both(train, None)
    inductor = Inductor()
    me.init()
    ours, sums = train(me, inductor)
    difference = max((a - b).abs().max().item() for a, b in zip(eager, ours, strict=True))
    return difference, sums, len(inductor.graphs)


def test_a_compiled_ddp_model_trains_as_an_eager_one_on_gloo(launch: Launch, folder: str) -> None:
    for difference, sums, graphs in launch(compiled_ddp, 2, folder).results(COMPILING):
        assert difference <= 1e-6
        assert graphs == 2  # one a bucket, so that sums begin before backward ends
        assert sums >= STEPS * graphs - 1  # in the first step DDP has yet to learn the order
