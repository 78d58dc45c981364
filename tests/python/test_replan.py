"""Spare machines that come and go while a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from fanin.torch import DistributedOptimizer
from ranks import Me, sums_on_switch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ALONE = ""  # for `launch`: no switch is named
STEPS = 9


@pytest.fixture
def spare() -> Iterator[SwitchProcess]:
    """A machine that only sums, as fast as those of the ranks."""
    with SwitchProcess("--rate", "1gbit") as process:
        yield process


def init(me: Me) -> fanin.torch.Options:
    """Each rank is as on a machine of its own, whose link is as fast as the spare one's."""
    options = fanin.torch.Options(machine=f"m{me.rank}", rate="1gbit", exact=True)
    me.init(pg_options=options)
    return options


def services(group: Any = None) -> list[str]:
    found = fanin.torch.plan(group)
    assert found is not None
    return [service["service"] for service in found["services"]]


def trained(me: Me, plans: dict[int, str | None]) -> dict[str, Any]:
    """The parameters after some steps of DDP, before some of which the sums are planned anew."""
    init(me)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(200, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, summed = [], []
    for number in range(STEPS):
        if number in plans:
            # As rank 0 names it.
            fanin.torch.replan(plans[number] if me.rank == 0 else None)
        optimizer.zero_grad()
        batch = torch.full((4, 200), 0.01 * (me.rank + 1 + number))
        model(batch).square().sum().backward()
        optimizer.step()
        seen.append(services())
        summed.append(sums_on_switch())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"services": seen, "ended": flat, "summed": summed}


def test_a_spare_machine_comes_and_goes_and_no_step_is_lost(
    launch: Launch, spare: SwitchProcess
) -> None:
    moved = launch(trained, 3, {3: spare.address, 6: None}, at=ALONE).results()
    stayed = launch(trained, 3, {}, at=ALONE).results()
    for got in moved:
        assert got["services"] == moved[0]["services"], "all ranks have one plan"
        used = [spare.address in each for each in got["services"]]
        assert used == [False] * 3 + [True] * 3 + [False] * 3
        assert all(len(each) == 3 + uses for each, uses in zip(got["services"], used, strict=True))
        # Each plan has a job of its own, which counts anew: every step's sums were its.
        assert all(summed > 0 for summed in got["summed"])
        assert torch.equal(got["ended"], stayed[0]["ended"])


def with_overlap(me: Me, spare: str) -> dict[str, Any]:
    init(me)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    seen = []
    for number in range(4):
        optimizer.zero_grad()
        model(torch.full((4, 200), 0.01 * (me.rank + 1 + number))).square().sum().backward()
        optimizer.step()
        if spare and number == 1:  # with sums under way
            fanin.torch.replan(spare, optimizer.process_group)
        seen.append(spare in services(optimizer.process_group))
    optimizer.synchronize()
    return {"seen": seen, "ended": torch.cat([p.detach().flatten() for p in model.parameters()])}


def test_sums_that_hide_under_the_next_pass_move_too(launch: Launch, spare: SwitchProcess) -> None:
    moved = launch(with_overlap, 2, spare.address, at=ALONE).results()
    stayed = launch(with_overlap, 2, "", at=ALONE).results()
    for got in moved:
        assert got["seen"] == [False, True, True, True]
        assert torch.equal(got["ended"], stayed[0]["ended"])


def no_room(me: Me, small: str) -> list[str]:
    init(me)
    before = services()
    with pytest.raises(errors.PoolExhausted):
        fanin.torch.replan(small)
    assert services() == before
    tensor = torch.full((100_000,), float(me.rank))
    dist.all_reduce(tensor)
    assert (tensor == 1.0).all(), "the group goes on as it was"
    if me.rank == 0:  # what one names alone is wrong for all
        with pytest.raises(ValueError, match="names a switch twice"):
            fanin.torch.replan("a:1,a:1")
    else:
        with pytest.raises(errors.FaninError, match=r"rank 0: .*names a switch twice"):
            fanin.torch.replan()
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()
    return before


def test_a_plan_that_cannot_be_is_told_to_all_and_changes_nothing(launch: Launch) -> None:
    with SwitchProcess("--pool-units", "1", "--shards", "1", "--rate", "1gbit") as small:
        launch(no_room, 2, small.address, at=ALONE).results()


def others(me: Me, spare: str) -> None:
    options = init(me)
    tensor = torch.full((100_000,), 1.0)
    under_way = dist.all_reduce(tensor, async_op=True)
    another: Any = dist.new_group([0, 1], pg_options=options)
    fanin.torch.replan(spare)
    assert (tensor == 2.0).all(), "what was begun is done first"
    assert under_way is not None
    under_way.wait()
    assert spare in services()
    assert spare not in services(another)
    for group in (None, another):
        dist.all_reduce(tensor, group=group)
    assert (tensor == 8.0).all()
    alone: Any = dist.new_group([me.rank], use_local_synchronization=True)
    fanin.torch.replan(spare, alone)
    fanin.torch.replan(spare)  # the same again
    dist.all_reduce(tensor)
    assert (tensor == 16.0).all()
    gloo: Any = dist.new_group([0, 1], backend="gloo")
    with pytest.raises(ValueError, match="not fanin"):
        fanin.torch.replan(spare, gloo)


def test_other_groups_keep_their_services_and_what_was_begun_is_done(
    launch: Launch, spare: SwitchProcess
) -> None:
    launch(others, 2, spare.address, at=ALONE).results()
