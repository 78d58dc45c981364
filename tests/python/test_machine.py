"""Sums inside a machine by torch's backend, what is left by fanin. The first is Gloo here."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import MachineState, machine_hook
from fanin.torch.hooks import machine
from ranks import DEADLINE, Me, sums_on_switch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

LENGTHS = (64, 65, 1, 100_003)

WAYS = {
    # The machine of each rank, its domain, and who holds.
    "a machine is a domain": ("aabb", "", None),
    "two domains a machine": ("aaaa", "xxyy", None),
    "two domains on each of two": ("aabbaabb", "xxyyyyxx", None),
    "one holds": ("aabb", "", [1]),
    "domains of unequal size": ("aaabb", "", [1]),
    "two of three hold": ("aaabbb", "", [2, 0]),
    "each rank is a domain": ("abc", "", None),
}


def begin(me: Me, machines: str, domains: str, holders: list[int] | None) -> MachineState:
    os.environ["FANIN_MACHINE"] = machines[me.rank]
    me.init("gloo")
    domain = domains[me.rank] if domains else ""
    return MachineState("gloo", domain=domain, holders=holders, switch=me.switch)


def given(rank: int, length: int, step: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * step + rank))


def averaged(me: Me, *way: Any) -> Any:
    # The longest tensor has several pieces.
    machine.PIECE_BYTES = 1 << 16
    state = begin(me, *way)
    # Two steps: what is kept of the first one is in use again. All of a step are under way at once.
    kept = [torch.empty(length) for length in LENGTHS]
    found = []
    for step in range(2):
        for flat in kept:
            flat.copy_(given(me.rank, flat.numel(), step))
        for future in [state.average(flat) for flat in kept]:
            future.wait()
        found += [flat.clone() for flat in kept]
    across = state._across
    sums = 0 if across is None else sums_on_switch(across)
    dist.barrier()
    return found, sums, state.holders


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_get_the_average_and_holders_alone_send(launch: Launch, way: str) -> None:
    machines, _, holders = WAYS[way]
    size = len(machines)
    results = launch(averaged, size, *WAYS[way]).results()
    expected = [
        torch.stack([given(rank, length, step) for rank in range(size)]).double().mean(dim=0)
        for step in range(2)
        for length in LENGTHS
    ]
    for rank, (found, sums, of_domain) in enumerate(results):
        for average, right, first in zip(found, expected, results[0][0], strict=True):
            assert torch.equal(average, first), "the same bits on all ranks"
            assert (average.double() - right).abs().max() < 1e-6
        assert (sums > 0) == (rank in of_domain)
        assert holders is None or len(of_domain) == len(holders)


def in_stages(me: Me, holders: list[int] | None) -> tuple[bool, list[float]]:
    """Whether a bucket's first piece is back before the last one is reduced; and the average."""
    state = begin(me, "aabb", "", holders)
    flat = torch.full((3 * machine.PIECE_BYTES // 4 - 5,), float(me.rank))
    back = threading.Event()
    reduce, gather = state._reduce, state._gather
    overlapped: list[bool] = []

    def reduce_after_the_first(whole: torch.Tensor, part: torch.Tensor) -> None:
        overlapped.append(len(overlapped) < 2 or back.wait(DEADLINE))
        reduce(whole, part)

    def gather_and_tell(whole: torch.Tensor, part: torch.Tensor) -> None:
        gather(whole, part)
        back.set()

    state._reduce = reduce_after_the_first  # type: ignore[method-assign]
    state._gather = gather_and_tell  # type: ignore[method-assign]
    average = state.average(flat).wait()
    dist.barrier()
    assert len(overlapped) == 3
    assert average.data_ptr() == flat.data_ptr()
    return all(overlapped), torch.unique(average).tolist()


@pytest.mark.parametrize("holders", [None, [1]], ids=["all hold", "one holds"])
def test_a_piece_goes_back_while_another_of_its_bucket_is_not_yet_reduced(
    launch: Launch, holders: list[int] | None
) -> None:
    assert launch(in_stages, 4, holders).results() == [(True, [1.5])] * 4


def remembered(me: Me) -> tuple[int, int]:
    """How many buckets a state has memory for, after some steps, and how many the model has."""
    state = begin(me, "aabb", "", None)
    indices = set()

    def hook(state: MachineState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        indices.add(bucket.index())
        return machine_hook(state, bucket)

    hook.__annotations__ = {}
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), bucket_cap_mb=0.005
    )
    model.register_comm_hook(state, hook)
    for _ in range(4):
        model(torch.ones(2, 32)).sum().backward()
    state.begin_step()
    kept = len(state._buffers)
    dist.barrier()
    return kept, len(indices)


def test_the_buckets_that_ddp_has_replaced_are_forgotten(launch: Launch) -> None:
    for kept, buckets in launch(remembered, 4).results():
        assert kept == buckets > 1


def in_float16(me: Me) -> float:
    state = begin(me, "aabb", "", None)
    flat = torch.full((1000,), 40000.0, dtype=torch.float16)  # the largest is 65504
    state.average(flat).wait()
    dist.barrier()
    assert torch.unique(flat).numel() == 1
    return flat[0].item()


def test_sums_of_large_float16_do_not_overflow(launch: Launch) -> None:
    assert launch(in_float16, 4).results() == [40000.0] * 4


def trained(me: Me) -> Any:
    state = begin(me, "aabb", "", None)
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(50, 301), nn.ReLU(), nn.Linear(301, 7))
        model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        if hooked:
            model.register_comm_hook(state, machine_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x = torch.randn(8, 50, generator=torch.Generator().manual_seed(4 * step + me.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append([each.detach().clone() for each in net.parameters()])
    dist.barrier()
    return found


def test_ddp_trains_as_without_the_hook(launch: Launch) -> None:
    results = launch(trained, 4).results()
    for plain, hooked in results:
        for one, other, first in zip(plain, hooked, results[0][1], strict=True):
            assert torch.equal(other, first)
            assert (one - other).abs().max() < 1e-5


MISTAKES = {
    "a holder outside": ([[2]] * 4, ["gloo"] * 4, "places 0 to 1"),
    "a holder twice": ([[0, 0]] * 4, ["gloo"] * 4, "name each once"),
    "no holder": ([[]] * 4, ["gloo"] * 4, "at least one"),
    "ranks of a domain disagree": ([[0], [1], None, None], ["gloo"] * 4, "different holders"),
    "domains disagree": ([[0], [0], None, None], ["gloo"] * 4, "say as many for all"),
    "backends disagree": ([None] * 4, ["gloo", "gloo", "nccl", "nccl"], "different backends"),
}


def mistaken(me: Me, holders: list[list[int] | None], backends: list[str]) -> str:
    os.environ["FANIN_MACHINE"] = "aabb"[me.rank]
    me.init("gloo")
    try:
        MachineState(backends[me.rank], holders=holders[me.rank], switch=me.switch)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_is_said_on_all_ranks(launch: Launch, mistake: str) -> None:
    holders, backends, text = MISTAKES[mistake]
    for said in launch(mistaken, 4, holders, backends).results():
        assert text in said


def killed(me: Me) -> None:
    state = begin(me, "aabb", "", None)
    flat = torch.ones(1000)
    state.average(flat).wait()
    me.say("summed")
    assert me.hear() == "go on"
    try:
        for _ in range(3):
            state.average(flat).wait()
        me.say("no error")
    except RuntimeError as error:
        me.say(str(error))
    # Nobody learns of it from a process that ends.
    assert me.hear() == "end"


def test_a_rank_that_dies_ends_the_sums_of_all(launch: Launch) -> None:
    ranks = launch(killed, 4)
    for rank in range(4):
        assert ranks.hear(rank) == "summed"
    ranks.kill(3)
    for rank in range(3):
        ranks.tell(rank, "go on")
    said = [ranks.hear(rank) for rank in range(3)]
    for rank in range(3):
        ranks.tell(rank, "end")
    assert "RankLost: rank 1 is lost" in said[1], "of those that hold the second part"
    assert "no error" not in said
