"""Spare machines that come and go while a job runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import _handshake as handshake
from fanin import errors
from fanin._join import join
from fanin.torch import DistributedOptimizer
from fanin.torch.backend import FaninBackend, backend_of
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
    options = fanin.torch.Options(machine=f"m{me.rank}", rate="1gbit")
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
    """Rank 1 has no gradients before rank 0 is told to plan anew: its sums are under way then."""
    init(me)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    seen = []
    for number in range(4):
        replans = bool(spare) and number == 1
        if replans and me.rank == 1:
            me.hear()
        optimizer.zero_grad()
        model(torch.full((4, 200), 0.01 * (me.rank + 1 + number))).square().sum().backward()
        optimizer.step()
        if replans:
            backend = backend_of(optimizer.process_group)
            barrier = backend.barrier

            def begins(opts: Any, backend: FaninBackend = backend, barrier: Any = barrier) -> Any:
                me.say(len(backend._under_way()))
                return barrier(opts)

            if me.rank == 0:
                backend.barrier = begins  # type: ignore[method-assign]
            fanin.torch.replan(spare, optimizer.process_group)
        seen.append(spare in services(optimizer.process_group))
    optimizer.synchronize()
    return {"seen": seen, "ended": torch.cat([p.detach().flatten() for p in model.parameters()])}


def test_sums_that_hide_under_the_next_pass_move_too(launch: Launch, spare: SwitchProcess) -> None:
    ranks = launch(with_overlap, 2, spare.address, at=ALONE)
    assert ranks.hear(0) > 0
    ranks.tell(1, "go on")
    moved = ranks.results()
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
        with pytest.raises(errors.FaninError, match=r"rank 0: ValueError: .*names a switch twice"):
            fanin.torch.replan()
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()
    return before


def test_a_plan_that_cannot_be_is_told_to_all_and_changes_nothing(launch: Launch) -> None:
    with SwitchProcess("--pool-units", "1", "--shards", "1", "--rate", "1gbit") as small:
        launch(no_room, 2, small.address, at=ALONE).results()


def fails_alone(me: Me, spare: str, where: str) -> None:
    """Rank 1 fails while rank 0 waits for it; nobody waits for the timeout of half an hour."""
    init(me)
    before = services()
    with pytest.MonkeyPatch.context() as patch:
        if me.rank == 1:
            patch.setattr(where, _no_memory)
        with pytest.raises(MemoryError if me.rank == 1 else errors.FaninError) as caught:
            fanin.torch.replan(spare)
    if me.rank == 0:
        told = "rank 1: MemoryError: none left; the group goes on as it was"
        assert str(caught.value) == told
    assert services() == before
    tensor = torch.full((100_000,), 1.0)
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()
    fanin.torch.replan(spare)
    assert spare in services()


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("none left")


@pytest.mark.parametrize(
    "where", ["fanin.torch.backend.fanin_backend.agree", "fanin._membership.join"]
)
def test_whatever_one_rank_fails_with_the_others_are_told_at_once(
    launch: Launch, spare: SwitchProcess, where: str
) -> None:
    launch(fails_alone, 2, spare.address, where, at=ALONE).results()


def dies(me: Me, spare: str, where: str) -> int | None:
    init(me)
    if me.rank == 1:
        gather = handshake.gather

        def gather_or_die(*args: Any) -> Any:
            return os._exit(9) if args[3] == where else gather(*args)

        def join_or_die(*args: Any) -> Any:
            return os._exit(9) if where == "join" else join(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake, "gather", gather_or_die)
            patch.setattr("fanin._membership.join", join_or_die)
            fanin.torch.replan(spare)
    # The loss of the dead rank's own service may be seen first, where it is joined.
    with pytest.raises(errors.FaninError if where == "join" else errors.RankLost):
        fanin.torch.replan(spare)
    with pytest.raises(errors.RankLost) as caught:
        dist.all_reduce(torch.full((100_000,), 1.0))
    return caught.value.rank


@pytest.mark.parametrize("where", ["place", "ways", "join", "joined"])
def test_a_rank_that_dies_meanwhile_is_named_at_once(
    launch: Launch, spare: SwitchProcess, where: str
) -> None:
    # The group's timeout is half an hour.
    assert launch(dies, 2, spare.address, where, at=ALONE).result(0) == 1


def patiences(me: Me, spare: str) -> list[float]:
    """How long each wait for the others may take, in their order."""
    init(me)
    agree, gather, given = handshake.agree, handshake.gather, []

    def agreed(*args: Any) -> Any:
        given.append(args[4])
        return agree(*args)

    def gathered(*args: Any) -> Any:
        given.append(args[5])
        return gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "agree", agreed)
        patch.setattr(handshake, "gather", gathered)
        fanin.torch.replan(spare)
    return given


def test_all_waits_of_a_plan_have_the_timeout_of_one(launch: Launch, spare: SwitchProcess) -> None:
    for given in launch(patiences, 2, spare.address, at=ALONE).results():
        assert len(given) >= 3
        assert given == sorted(set(given), reverse=True), "each has what those before it left"


def read_at_another_moment(me: Me, spare: str) -> tuple[list[str], str | None]:
    init(me)
    fanin.torch.replan(spare if me.rank == 0 else "127.0.0.1:1")
    tensor = torch.full((100_000,), 1.0)
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()
    return services(), backend_of(None).settings.switch


def test_rank_0s_list_counts_where_others_read_the_file_at_another_moment(
    launch: Launch, spare: SwitchProcess
) -> None:
    for used, kept in launch(read_at_another_moment, 2, spare.address, at=ALONE).results():
        assert spare.address in used
        assert kept == spare.address, "what groups that are split off are told"


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
