"""Ranks that are gone while others wait for them on Gloo: a typed error that names them, soon."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch import Options
from fanin.torch.backend.gloo_watch import Watch
from ranks import Me, Ranks

# As much as no socket holds.
MANY = 5_000_000


def init(me: Me, machine: str) -> None:
    me.init(timeout=timedelta(minutes=10), pg_options=Options(machine=machine))


def reduce_by_a_future() -> None:
    work: Any = dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX, async_op=True)
    with pytest.raises(RuntimeError, match="rank 2"):
        work.get_future().wait()
    work.wait()


WAITS: dict[str, Callable[[], Any]] = {
    "send": lambda: dist.send(torch.ones(MANY), dst=2),
    "receive": lambda: dist.recv(torch.ones(3), src=2),
    "reduce": lambda: dist.all_reduce(torch.ones(6)[::2], op=dist.ReduceOp.MAX),
    "future": reduce_by_a_future,
}


def lose_rank_2(ranks: Ranks) -> None:
    """Kill it once all three are there, and let the others go on."""
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.kill(2)
    for rank in range(2):
        ranks.tell(rank, "go")


def waits_for_the_dead(me: Me, what: str, machine: str) -> int:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    init(me, machine.format(me.rank))
    me.say("there")
    me.hear()
    with pytest.raises(errors.RankLost) as lost:
        WAITS[what]()
    return lost.value.rank


@pytest.mark.parametrize("machine", ["one for all", "machine {}"])
@pytest.mark.parametrize("what", WAITS)
def test_a_first_connection_to_a_rank_that_died_ends_at_once(
    launch: Launch, what: str, machine: str
) -> None:
    ranks = launch(waits_for_the_dead, 3, what, machine, at="")
    lose_rank_2(ranks)
    assert [ranks.result(rank) for rank in range(2)] == [2, 2]


def waits_for_who_left(me: Me, what: str, machine: str) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    init(me, machine.format(me.rank))
    if me.rank == 2:
        dist.destroy_process_group()
        return
    me.hear()
    with pytest.raises(errors.RankLeft) as left:
        WAITS[what]()
    me.say(left.value.rank)
    me.hear()  # who leaves now would be named, too


@pytest.mark.parametrize("machine", ["one for all", "machine {}"])
@pytest.mark.parametrize("what", WAITS)
def test_a_first_connection_to_a_rank_that_left_ends_soon(
    launch: Launch, what: str, machine: str
) -> None:
    ranks = launch(waits_for_who_left, 3, what, machine, at="")
    ranks.result(2)
    ranks.processes[2].join()
    for rank in range(2):
        ranks.tell(rank, "go")
    assert [ranks.hear(rank) for rank in range(2)] == [2, 2]
    for rank in range(2):
        ranks.tell(rank, "leave")
        ranks.result(rank)


class Group:
    """A group of which rank 2 left when it had begun two collectives on Gloo."""

    def failure(self) -> None:
        return None

    def left(self) -> dict[int, int]:
        return {2: 2}

    def receive(self) -> Any:
        raise RuntimeError("there is no Gloo here")


class UnderWay:
    """A work that Gloo is not done with."""

    def is_over(self) -> bool:
        return False


def test_what_a_rank_took_part_in_before_it_left_is_not_broken_off() -> None:
    group: Any = Group()
    watch = Watch(group)
    works: list[Any] = [UnderWay() for _ in range(3)]
    found = []
    for work in works:
        watch.add(work)
        found.append(watch.is_in_vain(group))
    assert found == [False, False, True]


def between_the_living(me: Me) -> float:
    init(me, f"machine {me.rank}")
    me.say("there")
    me.hear()
    tensor = torch.full((3,), float(me.rank))
    if me.rank == 0:
        dist.recv(tensor, src=1)
    else:
        with pytest.raises(errors.RankLost):
            dist.all_reduce(torch.ones(3))  # the death is known from here on
        dist.send(tensor, dst=0)
    return tensor[0].item()


def test_the_living_send_to_each_other_when_another_is_dead(launch: Launch) -> None:
    ranks = launch(between_the_living, 3, at="")
    lose_rank_2(ranks)
    assert [ranks.result(rank) for rank in range(2)] == [1.0, 1.0]


def sends_and_leaves(me: Me, machine: str, anybody: bool) -> int:
    init(me, machine.format(me.rank))
    if me.rank == 1:
        work = dist.isend(torch.ones(MANY), dst=0)
        assert work is not None
        dist.destroy_process_group()
        return 1
    me.hear()
    with pytest.raises(errors.RankLeft, match="rank 1 left") as left:
        dist.recv(torch.ones(MANY), src=None if anybody else 1)
    return left.value.rank


@pytest.mark.parametrize("anybody", [False, True])
@pytest.mark.parametrize("machine", ["one for all", "machine {}"])
def test_a_rank_that_leaves_takes_along_what_it_sent_and_is_named(
    launch: Launch, machine: str, anybody: bool
) -> None:
    ranks = launch(sends_and_leaves, 2, machine, anybody, at="")
    assert ranks.result(1) == 1
    ranks.processes[1].join()
    ranks.tell(0, "go")
    assert ranks.result(0) == 1


def receives_from_anybody(me: Me, machine: str) -> list[float]:
    init(me, machine.format(me.rank))
    got = torch.zeros(1)
    if me.rank > 0:
        me.say("there")
        while me.hear() == "send":
            dist.send(torch.tensor([float(me.rank)]), dst=0)
        dist.destroy_process_group()
        return []
    found: list[float] = []
    while True:
        me.say("receives")
        try:
            dist.recv(got, src=None)
        except (errors.RankLost, errors.RankLeft) as gone:
            me.say(type(gone))
            return [*found, float(gone.rank)]
        found.append(got.item())


@pytest.mark.parametrize("machine", ["one for all", "machine {}"])
@pytest.mark.parametrize("ends", [errors.RankLost, errors.RankLeft])
def test_a_receive_from_anybody_ends_when_nobody_is_left(
    launch: Launch, machine: str, ends: type[Exception]
) -> None:
    ranks = launch(receives_from_anybody, 3, machine, at="")
    for rank in (1, 2):
        assert ranks.hear(rank) == "there"
    assert ranks.hear(0) == "receives"

    def end(rank: int) -> None:
        if ends is errors.RankLost:
            ranks.kill(rank)
        else:
            ranks.tell(rank, "leave")
            ranks.result(rank)
            ranks.processes[rank].join()

    end(2)
    for _ in range(2):
        ranks.tell(1, "send")
        assert ranks.hear(0) == "receives"
    end(1)
    assert ranks.hear(0) is ends
    *found, gone = ranks.result(0)
    assert found == [1.0, 1.0]
    assert gone in (1.0, 2.0)
