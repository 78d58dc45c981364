"""Sums of a part of the ranks, by GOAT, and asynchronous training with a rank on a slow link."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch, switch_here
from fanin import errors
from fanin._participants import among
from fanin.torch import AsynchronousOptimizer
from fanin.torch.optimizers import asynchronous
from fanin.torch.optimizers.coordinator import SLOW_SECONDS, Coordinator
from fanin.torch.optimizers.left_out import Carrier
from fanin.torch.patches import splitting
from layers import flat, give, layer
from ranks import Me, wait_until
from test_asynchronous import as_an_optimizer, in_step, one_late, scheduled
from test_goat import by_goat
from torch import optim

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def goat() -> Iterator[str]:
    """A switch of GOAT, with its root, in this process."""
    with switch_here(protocol="goat") as running:
        yield running.address


def packets_sent(group: dist.ProcessGroup) -> int:
    """How many packets this rank has sent to services."""
    backend: Any = splitting.unwrapped(group, CPU)
    return int(backend._channel._client.statistics()["packets_sent"])


def of_some(me: Me, sets: list[list[int] | None]) -> list[tuple[list[float], int]]:
    me.init()
    sums = dist.group.WORLD
    assert sums is not None
    found = []
    for ranks in sets:
        tensor = torch.full((5000,), float(1 << me.rank))
        before = packets_sent(sums)
        with among(ranks):
            dist.all_reduce(tensor)
        found.append((sorted(set(tensor.tolist())), packets_sent(sums) - before))
        # Before the set changes, all have the sum.
        dist.barrier()
    return found


def test_a_part_of_the_ranks_sums_and_the_others_send_nothing(launch: Launch, goat: str) -> None:
    sets = [[0, 1], [1, 2], None, [2], [0, 1, 2], [2, 0], [2, 0], [1]]
    for rank, found in enumerate(launch(by_goat, 3, of_some, sets, at=goat).results()):
        for ranks, (values, packets) in zip(sets, found, strict=True):
            taking_part = range(3) if ranks is None else ranks
            if rank in taking_part:
                assert values == [float(sum(1 << other for other in taking_part))], ranks
            else:
                assert (values, packets) == ([float(1 << rank)], 0), ranks


def two_to_a_machine(me: Me, body: Callable[..., Any], *args: Any) -> Any:
    """The body by GOAT, where ranks of a machine sum first."""
    os.environ["FANIN_MACHINE"] = f"machine {me.rank // 2}"
    return by_goat(me, body, *args)


def test_of_machines_with_several_ranks_those_without_a_participant_send_nothing(
    launch: Launch, goat: str
) -> None:
    sets = [[0, 1], [1, 2], None, [2], [0, 1, 2], [4], [3, 4], [3, 4], [1]]
    for rank, found in enumerate(launch(two_to_a_machine, 5, of_some, sets, at=goat).results()):
        for ranks, (values, packets) in zip(sets, found, strict=True):
            taking_part = range(5) if ranks is None else ranks
            if rank in taking_part:
                assert values == [float(sum(1 << other for other in taking_part))], ranks
            else:
                assert values == [float(1 << rank)], ranks
            # The first of a machine speaks for it.
            speaks = rank % 2 == 0 and rank // 2 in {other // 2 for other in taking_part}
            assert (packets > 0) == speaks, (rank, ranks)


def of_unlike(me: Me) -> tuple[str, str]:
    me.init()
    tensor = torch.ones(5000)
    try:
        with among([0, 1] if me.rank else None):
            dist.all_reduce(tensor)
    except errors.FaninError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("where", [by_goat, two_to_a_machine], ids=["ranks", "machines"])
def test_unlike_participants_end_the_job_with_names(
    launch: Launch, goat: str, where: Callable[..., Any]
) -> None:
    for kind, text in launch(where, 3, of_unlike, at=goat).results():
        # Rank 2 takes no part in what it began, and has nothing to wait for.
        assert (kind, "disagree about who takes part" in text) in {
            ("CollectiveMismatch", True),
            ("", False),
        }


def refused(me: Me) -> list[str]:
    me.init()
    said = []
    for ranks in ([], [0, 2], [0]):
        with pytest.raises(ValueError, match="participants") as caught, among(ranks):
            dist.all_reduce(torch.ones(4))
        said.append(str(caught.value))
    return said


def test_participants_that_cannot_be_are_refused(launch: Launch) -> None:
    for said in launch(refused, 2).results():
        assert all("a part of them can by GOAT" in text for text in said)


def test_asynchronous_training_on_goats_switches(launch: Launch, goat: str) -> None:
    ranks = launch(by_goat, 4, in_step, at=goat).results()
    alone = layer(0)
    inner = optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        give(alone, 1.5 + step)
        inner.step()
    for got in ranks:
        assert got["epoch"] == 3
        assert torch.equal(got["ended"], ranks[0]["ended"])
        torch.testing.assert_close(got["ended"], flat(alone))
    for ended in launch(by_goat, 2, scheduled, at=goat).results():
        torch.testing.assert_close(ended, flat(layer(0)) - 1.5)
    for rank in launch(by_goat, 2, as_an_optimizer, at=goat).results():
        whole, resumed = rank["ended"]
        torch.testing.assert_close(resumed, whole)


def may_leave_out(me: Me, security: str) -> bool:
    os.environ["FANIN_SECURITY"] = security
    me.init()
    optimizer = AsynchronousOptimizer(optim.SGD(layer(0).parameters(), lr=0.1))
    found = optimizer._carried is not None
    optimizer.close()
    return found


@pytest.mark.parametrize("security", ["tag", "encrypt"])
def test_no_rank_is_left_out_if_its_gradients_would_be_readable(
    launch: Launch, goat: str, security: str
) -> None:
    found = launch(by_goat, 2, may_leave_out, security, at=goat).results()
    assert found == [security == "tag"] * 2


def test_a_late_program_takes_part_with_zeros_on_goats_switches(launch: Launch, goat: str) -> None:
    ranks = launch(by_goat, 3, one_late, 5, at=goat)
    begun = flat(layer(0))
    for rank in (0, 1):
        epoch, model = ranks.hear(rank)
        assert epoch == 5
        torch.testing.assert_close(model, begun - 5.0)
    ranks.tell(0, "close")
    ranks.tell(2, "give")
    ranks.tell(1, "close")
    epoch, model = ranks.hear(2)
    assert epoch == 6
    torch.testing.assert_close(model, begun - 105.0)
    results = ranks.results()
    assert all(torch.equal(got["ended"], results[0]["ended"]) for got in results)


class Fixed(dict[int, float]):
    """The link is slow in name alone: later measurements change nothing."""

    def __setitem__(self, rank: int, seconds: float) -> None:
        pass


def slow_link(coordinator: Coordinator) -> None:
    """All but the first two ranks need five seconds for a gradient, as rank 0 has measured it."""
    if not coordinator._measured:
        coordinator._measured = True
        slow = dict.fromkeys(range(2, coordinator._size), 5.0)
        coordinator._links = Fixed(dict.fromkeys(range(2), 0.001) | slow)


def with_a_slow_link(me: Me, steps: int) -> dict[str, Any]:
    Coordinator._measure_links = slow_link  # type: ignore[method-assign, assignment]
    me.init()
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = AsynchronousOptimizer(inner, wait_for=1)
    last = me.rank >= 2
    give(model, 1.0)
    optimizer.step()
    if last:
        wait_until(lambda: optimizer._is_left_out, "it is left out")
    sent = packets_sent(optimizer._sums)
    me.say("one step")
    me.hear()
    begun = optimizer.epoch
    for _ in range(3 if last else steps):
        optimizer.zero_grad()
        give(model, 1.0)
        optimizer.step()
    me.say(optimizer.epoch - begun)
    me.hear()
    sent = packets_sent(optimizer._sums) - sent
    optimizer.close()
    state = optimizer.state_dict()["state"][0]["momentum_buffer"]
    return {
        "ended": flat(model),
        "momentum": state,
        "counted": (optimizer.steps, optimizer.gradients, optimizer.epoch),
        "sent": sent,
        "left out": optimizer._is_left_out,
    }


@pytest.mark.parametrize(
    ("where", "size"), [(by_goat, 3), (two_to_a_machine, 4)], ids=["ranks", "machines"]
)
def test_who_has_a_slow_link_sends_nothing_to_the_switch_and_nobody_waits_for_it(
    launch: Launch, goat: str, where: Callable[..., Any], size: int
) -> None:
    slow = range(2, size)
    ranks = launch(where, size, with_a_slow_link, 20, at=goat)
    for rank in range(size):
        assert ranks.hear(rank) == "one step"
    # As slow as can be.
    stopped = [ranks.processes[rank].pid for rank in slow]
    for pid in stopped:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    for rank in (0, 1):
        ranks.tell(rank, "step")
    for rank in (0, 1):
        assert ranks.hear(rank) >= 20
    for pid in stopped:
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
    for rank in slow:
        ranks.tell(rank, "step")
    ranks.tell(0, "close")
    ranks.tell(1, "close")
    for rank in slow:
        assert ranks.hear(rank) >= 3
        ranks.tell(rank, "close")
    results = ranks.results()
    assert [got["left out"] for got in results] == [False, False] + [True] * len(slow)
    assert [got["counted"][0] for got in results] == [21, 21] + [4] * len(slow)
    for got in results:
        assert got["counted"][1:] == (42 + 4 * len(slow), results[0]["counted"][2])
        assert torch.equal(got["ended"], results[0]["ended"]), "the same model in the end"
        assert torch.equal(got["momentum"], results[0]["momentum"])
    assert all(results[rank]["sent"] == 0 for rank in slow)
    assert results[0]["sent"] > 0


def with_links(me: Me, links: dict[int, float]) -> bool:
    """Whether this rank is left out, where gradients take so long as rank 0 measures them."""
    Carrier.seconds = lambda _carrier, rank, *_: links[rank]  # type: ignore[method-assign]
    measure = Coordinator._measure_links

    def measure_once(coordinator: Coordinator) -> None:
        if not coordinator._measured:
            measure(coordinator)
            coordinator._links = Fixed(coordinator._links)

    Coordinator._measure_links = measure_once  # type: ignore[method-assign, assignment]
    me.init()
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=1)
    for steps in (1, 20):
        for _ in range(steps):
            optimizer.zero_grad()
            give(model, 1.0)
            optimizer.step()
        # All have given a gradient by now, and may be left out after that.
        me.say(optimizer._carried is not None)
        me.hear()
    optimizer.close()
    return bool(optimizer._is_left_out)


@pytest.mark.parametrize(
    ("where", "links", "outside"),
    [
        (by_goat, {1: 0.001, 2: 0.001, 3: 5.0}, [3]),
        # Its machine sends a sum anyway.
        (two_to_a_machine, {2: 0.001, 3: 5.0}, []),
        # All links are alike. Rank 1 is on the machine of rank 0, which does not measure it.
        (two_to_a_machine, {2: 0.5, 3: 0.5}, []),
        (by_goat, {1: 0.0001, 2: 0.5, 3: 0.5}, [2, 3]),
    ],
)
def test_slow_ranks_are_left_out_and_of_machines_none_or_all(
    launch: Launch,
    goat: str,
    where: Callable[..., Any],
    links: dict[int, float],
    outside: list[int],
) -> None:
    ranks = launch(where, 4, with_links, links, at=goat)
    for _ in range(2):
        assert [ranks.hear(rank) for rank in range(4)] == [True] * 4
        for rank in range(4):
            ranks.tell(rank, "on")
    assert [rank for rank, is_out in enumerate(ranks.results()) if is_out] == outside


def with_a_link_that_becomes_slow(me: Me) -> list[bool]:
    """Rank 2's link, in name: what is sent over it is late, and it is measured so."""
    measured: Counter[int] = Counter()
    is_slow = Event()

    def seconds(_carrier: Carrier, rank: int, *_: Any) -> float:
        measured[rank] += 1
        return 5.0 if rank == 2 and is_slow.is_set() else 0.001

    Carrier.seconds = seconds  # type: ignore[method-assign, assignment]
    at_once = dist.all_reduce

    def late(*args: Any, **options: Any) -> Any:
        if me.rank == 2 and is_slow.is_set():
            # As long as a slow link takes: five times what a sum may be longer by chance.
            time.sleep(5 * SLOW_SECONDS)
        return at_once(*args, **options)

    me.init()
    vars(dist)["all_reduce"] = late  # in this process alone
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=1)
    found = []
    for _ in range(2):
        steps = 0
        # Links are measured again the more rarely, the more sums take long by chance.
        while steps < 30 or (is_slow.is_set() and me.rank == 2 and not optimizer._is_left_out):
            optimizer.zero_grad()
            give(model, 1.0)
            optimizer.step()
            steps += 1
            assert steps < 1000, "it is not left out"
        found.append(optimizer._is_left_out)
        me.say("stepped")
        me.hear()
        is_slow.set()
    optimizer.close()
    if me.rank == 0:
        assert measured[1] >= 2
        assert measured[2] >= 2
    return found


def test_a_rank_whose_link_becomes_slow_is_left_out(launch: Launch, goat: str) -> None:
    ranks = launch(by_goat, 3, with_a_link_that_becomes_slow, at=goat)
    for _ in range(2):
        for rank in range(3):
            assert ranks.hear(rank) == "stepped"
        for rank in range(3):
            ranks.tell(rank, "on")
    assert ranks.results() == [[False, False], [False, False], [False, True]]


def one_step(me: Me) -> Any:
    """The ranks' optimizer after it; rank 2 is left out by then."""
    Coordinator._measure_links = slow_link  # type: ignore[method-assign, assignment]
    me.init()
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=1)
    give(model, 1.0)
    optimizer.step()
    if me.rank == 2:
        wait_until(lambda: optimizer._is_left_out, "it is left out")
    return optimizer


def killed_outside(me: Me) -> str:
    optimizer = one_step(me)
    me.say("one step")
    me.hear()
    try:
        for _ in range(1000):
            optimizer.step()
        optimizer.close()
    except errors.FaninError as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_that_is_left_out_and_killed_ends_the_training_of_all(
    launch: Launch, goat: str
) -> None:
    ranks = launch(by_goat, 3, killed_outside, at=goat)
    for rank in range(3):
        assert ranks.hear(rank) == "one step"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "step")
        assert ranks.result(rank) in ("RankLost", "RankLeft")


def out_of_memory(me: Me) -> str:
    optimizer = one_step(me)
    if me.rank == 2:

        def packed(_: Any) -> list[bytes]:
            raise MemoryError

        vars(asynchronous)["packed"] = packed  # in this process alone
    me.say("one step")
    me.hear()
    try:
        while True:
            optimizer.step()
    except (MemoryError, errors.FaninError) as error:
        name = type(error).__name__
    if me.rank == 2:  # its process lives on
        me.say(name)
        me.hear()
    return name


def test_a_rank_that_is_left_out_and_can_send_nothing_ends_the_training_of_all(
    launch: Launch, goat: str
) -> None:
    ranks = launch(by_goat, 3, out_of_memory, at=goat)
    for rank in range(3):
        assert ranks.hear(rank) == "one step"
    for rank in range(3):
        ranks.tell(rank, "step")
    assert ranks.hear(2) == "MemoryError"
    for rank in (0, 1):
        assert ranks.result(rank) in ("RankLost", "RankLeft")
    ranks.tell(2, "end")
    assert ranks.result(2) == "MemoryError"
