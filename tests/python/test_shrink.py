"""Groups that go on without ranks that died: by `shrink_group`, and by `fanin.torch.shrink`."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch import Options
from ranks import Me, sums_on_switch
from torch import nn

SERVICES = {"own services": "machine {}", "memory": "one", "switch": "machine {}"}


def init(me: Me, machine: str) -> None:
    me.init(timeout=timedelta(minutes=10), pg_options=Options(machine=machine.format(me.rank)))


def total(group: Any = None) -> float:
    tensor = torch.full((70_000,), float(dist.get_rank(group) + 1))
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def without_the_dead(me: Me, machine: str) -> dict[str, Any]:
    init(me, machine)
    assert total() == 10.0
    me.say("there")
    me.hear()
    with pytest.raises(errors.RankLost) as lost:
        total()
    group = fanin.torch.shrink()
    said = {
        "lost": lost.value.rank,
        "rank": (dist.get_rank(), dist.get_world_size(), group.rank()),
        "sum": total(),
        "summed": sums_on_switch(),
    }
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, me.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    model(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    weight = model.module.weight.grad
    dist.barrier()
    return {**said, "gathered": gathered, "gradient": weight[0, 0].item()}


@pytest.mark.parametrize("services", SERVICES)
def test_three_go_on_without_one_that_is_killed(launch: Launch, services: str) -> None:
    at = {} if services == "switch" else {"at": ""}
    ranks = launch(without_the_dead, 4, SERVICES[services], **at)
    for rank in range(4):
        assert ranks.hear(rank) == "there"
    ranks.kill(1)
    for rank in (0, 2, 3):
        ranks.tell(rank, "go")
    results = [ranks.result(rank) for rank in (0, 2, 3)]
    assert [each["lost"] for each in results] == [1, 1, 1]
    assert [each["rank"] for each in results] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert [each["sum"] for each in results] == [6.0] * 3
    assert all(each["summed"] > 0 for each in results)
    assert [each["gathered"] for each in results] == [[0, 2, 3]] * 3
    assert [each["gradient"] for each in results] == pytest.approx([8.0 / 3.0] * 3)


def twice(me: Me) -> dict[str, Any]:
    """Ranks 1 and 3 die one after the other: those of a group of its own, too."""
    init(me, "machine {}")
    even: Any = dist.new_group([1, 3, 4])
    said: dict[str, Any] = {"first": total()}
    if me.rank in (1, 3, 4):
        total(even)
    me.say("there")
    me.hear()
    if me.rank == 4:
        with pytest.raises(errors.RankLost):
            total(even)
    if me.rank == 3:
        me.say("dies")
        me.hear()
    if me.rank == 4:
        me.say("waits")
        me.hear()
        alone = fanin.torch.shrink(even, seconds=0.1)
        said["alone"] = (total(alone), dist.get_process_group_ranks(alone))
    with pytest.raises(errors.RankLost):
        total()
    fanin.torch.shrink(seconds=3.0)  # no error names rank 3
    said["second"] = (total(), dist.get_process_group_ranks(dist.group.WORLD))
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        said["pair"] = total(pair)
    tensor = torch.tensor([float(dist.get_rank())])
    dist.broadcast(tensor, src=2)
    return {**said, "root": tensor.item()}


def test_groups_shrink_more_than_once_and_ranks_are_counted_anew(launch: Launch) -> None:
    ranks = launch(twice, 5)
    for rank in range(5):
        assert ranks.hear(rank) == "there"
    ranks.kill(1)
    for rank in (0, 2, 3, 4):
        ranks.tell(rank, "go")
    assert (ranks.hear(3), ranks.hear(4)) == ("dies", "waits")
    ranks.kill(3)
    ranks.tell(4, "go")
    first, second, third = (ranks.result(rank) for rank in (0, 2, 4))
    for each in (first, second, third):
        assert each["first"] == 15.0
        assert each["second"] == (6.0, [0, 1, 2])
        assert each["root"] == 2.0
    assert third["alone"] == (1.0, [4])
    assert (first["pair"], second["pair"]) == (3.0, 3.0)


def overlapped(me: Me) -> dict[str, Any]:
    """Train with momentum; rank 2 dies with a step under way."""
    init(me, "machine {}")
    model = nn.Linear(50_000, 1, bias=False)
    given = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer = fanin.torch.DistributedOptimizer(given, model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((1, 50_000), me.rank + 1.0)).sum().backward()
        optimizer.step()

    step()
    optimizer.synchronize()
    before = model.weight[0, :3].tolist()
    me.say("there")
    if me.rank == 2:
        me.hear()
    with contextlib.suppress(errors.FaninError):
        for _ in range(100_000):
            step()
    fanin.torch.shrink()
    optimizer.go_on_in()
    start = model.weight.detach().clone()
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
    step()
    optimizer.synchronize()
    expected = start - 0.5 * (0.5 * momentum + 1.5)
    torch.testing.assert_close(model.weight.detach(), expected)
    return {"before": before, "start": start[0, :3].tolist(), "momentum": momentum[0, 0].item()}


def test_an_overlapped_optimizer_goes_on_with_those_that_are_left(launch: Launch) -> None:
    ranks = launch(overlapped, 3)
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.kill(2)
    first, second = ranks.result(0), ranks.result(1)
    assert first == second


def with_other_lists(me: Me) -> str:
    init(me, "machine {}")
    total()
    dist.barrier()
    if me.rank > 1:
        return ""
    with pytest.raises(errors.GroupMismatch) as told:
        dist.shrink_group([2, 3] if me.rank == 0 else [3])
    return str(told.value)


def test_lists_that_differ_are_told(launch: Launch) -> None:
    first, second = launch(with_other_lists, 4).results()[:2]
    for told in (first, second):
        assert "rank 0 was given [0, 1]" in told
        assert "rank 1 was given [0, 1, 2]" in told


def late(me: Me) -> str:
    init(me, "machine {}")
    total()
    dist.barrier()
    if me.rank == 2:
        me.hear()
    with contextlib.suppress(errors.FaninError):
        fanin.torch.shrink(seconds=0.2)
        return f"{dist.get_world_size()} ranks, {total():g}"
    with pytest.raises(errors.FaninError) as told:
        fanin.torch.shrink(seconds=0.2)
    return str(told.value)


def test_who_comes_late_is_told_and_others_go_on(launch: Launch) -> None:
    ranks = launch(late, 3)
    assert [ranks.result(rank) for rank in range(2)] == ["2 ranks, 3"] * 2
    ranks.tell(2, "go")
    assert "ranks [0, 1] went on without this one" in ranks.result(2)


def nobody(me: Me) -> str:
    init(me, "machine {}")
    with pytest.raises(errors.FaninError) as told:
        fanin.torch.shrink()
    assert total() == 6.0, "the group is as it was"
    me.say(str(told.value))
    me.hear()
    with pytest.raises(errors.RankLost):
        total()
    fanin.torch.shrink()
    return str(total())


def test_a_group_of_which_nobody_is_gone_stays_and_shrinks_later(launch: Launch) -> None:
    ranks = launch(nobody, 3)
    for rank in range(3):
        assert "no rank is gone" in ranks.hear(rank)
    ranks.kill(2)
    for rank in range(2):
        ranks.tell(rank, "go")
    assert [ranks.result(rank) for rank in range(2)] == ["3.0", "3.0"]
