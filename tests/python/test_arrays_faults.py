"""Ends of arrays' groups: ranks that die, leave, come late, do other things, or close."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from typing import Any

import fanin
import numpy as np
import pytest
from array_ranks import ALONE, joined
from conftest import Launch, free_address
from fanin import errors
from fanin.arrays import peers
from ranks import Me, wait_until


def out_of_step(me: Me, way: str, meet: str) -> tuple[str, str, float]:
    with joined(me, way, meet) as group:
        began = time.monotonic()
        call: Any = [
            lambda: group.all_to_all(np.zeros((3, 4))),
            lambda: group.all_reduce(np.zeros(4), "max"),
            lambda: group.all_to_all(np.zeros((3, 4))),
        ][me.rank]
        with pytest.raises(errors.CollectiveMismatch) as caught:
            call()
        with pytest.raises(errors.CollectiveMismatch) as again:
            group.all_to_all(np.zeros(3))
        return str(caught.value), str(again.value), time.monotonic() - began


def test_ranks_that_are_out_of_step_are_all_told(launch: Launch) -> None:
    for told, again, waited in launch(
        out_of_step, 3, "services", free_address(), at=ALONE
    ).results():
        assert "all_to_all" in told
        assert "all_reduce max" in told
        assert "all_reduce max" in again
        assert waited < 20


def of_other_shapes(me: Me, meet: str) -> str:
    with joined(me, "memory", meet) as group:
        with pytest.raises(errors.CollectiveMismatch) as caught:
            group.reduce_scatter(np.zeros((2 * (1 + me.rank),), np.int16))
        return str(caught.value)


def test_arrays_of_unlike_shapes_are_a_mismatch(launch: Launch) -> None:
    for told in launch(of_other_shapes, 2, free_address(), at=ALONE).results():
        assert "shape" in told


def waits_for_the_dead(me: Me, way: str, meet: str) -> tuple[str, int, float]:
    with joined(me, way, meet) as group:
        large = np.zeros((3, 1_000_000))
        group.all_to_all(large)
        me.say("ready")
        if me.rank == 1:
            me.hear()  # it is killed here
        began = time.monotonic()
        with pytest.raises(errors.RankLost) as caught:
            for _ in iter(lambda: group.all_to_all(large), None):
                pass
        return str(caught.value), caught.value.rank, time.monotonic() - began


@pytest.mark.parametrize("way", ["memory", "services"])
def test_a_rank_that_is_killed_is_named_soon(launch: Launch, way: str) -> None:
    ranks = launch(waits_for_the_dead, 3, way, free_address(), at=ALONE)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(1)
    for rank in (0, 2):
        _, lost, waited = ranks.result(rank)
        assert lost == 1
        assert waited < 25


def waits_for_who_left(me: Me, meet: str) -> str:
    with joined(me, "services", meet) as group:
        if me.rank == 1:
            return ""
        with pytest.raises(errors.FaninError) as caught:
            group.receive(1)
        assert isinstance(caught.value, errors.RankLeft | errors.RankLost)
        assert caught.value.rank == 1
        return type(caught.value).__name__


def test_a_rank_that_left_is_not_waited_for(launch: Launch) -> None:
    assert launch(waits_for_who_left, 2, free_address(), at=ALONE).result(0) == "RankLeft"


def runs_out_of_time(me: Me, meet: str) -> list[Any]:
    with fanin.connect(rank=me.rank, world_size=3, rendezvous=meet, timeout=20) as group:
        group.client.set_timeout(2.0)
        if me.rank == 2:
            me.hear()
            with pytest.raises(errors.AllReduceTimeout) as caught:
                group.all_to_all(np.zeros(3))
        else:
            with pytest.raises(errors.AllReduceTimeout) as caught:
                group.all_to_all(np.zeros(3))
            me.say("over")
            me.hear()
        return [caught.value.missing_ranks, str(caught.value)]


def test_a_timeout_names_whom_it_waited_for(launch: Launch) -> None:
    ranks = launch(runs_out_of_time, 3, free_address(), at=ALONE)
    for rank in (0, 1):
        assert ranks.hear(rank) == "over"
    ranks.tell(2, "go on")
    for rank in (0, 1):
        ranks.tell(rank, "go on")
    said = ranks.results()
    assert [each[0] for each in said[:2]] == [[2], [2]]
    assert all("all_to_all" in text for _, text in said)


def fails_elsewhere(me: Me, meet: str) -> tuple[str, float]:
    """Rank 0 fails before it has connected to rank 2; ranks 1 and 2 have long arrays under way."""
    with joined(me, "services", meet) as group:
        beside = group.receive_async((me.rank + 1) % 3)
        began = time.monotonic()
        if me.rank == 0:
            group.gather(np.zeros(1), 1)
        else:
            with pytest.raises(errors.CollectiveMismatch):
                group.all_to_all(np.zeros((3, 1_000_000)))
        with pytest.raises(errors.CollectiveMismatch) as caught:
            beside.wait()
        return str(caught.value), time.monotonic() - began


def test_all_hear_of_a_mismatch_whatever_they_do(launch: Launch) -> None:
    for told, waited in launch(fails_elsewhere, 3, free_address(), at=ALONE).results():
        assert "gather to rank 1" in told
        assert "all_to_all" in told
        assert waited < 15


def roots_that_differ(me: Me, meet: str) -> str:
    with joined(me, "memory", meet) as group:
        with pytest.raises(errors.CollectiveMismatch) as caught:
            _ = [group.scatter(np.arange(2), root=root) for root in (me.rank, 0, 1)]
        return str(caught.value)


def test_roots_that_differ_are_a_mismatch(launch: Launch) -> None:
    for told in launch(roots_that_differ, 2, free_address(), at=ALONE).results():
        assert "scatter from rank" in told


def leaves_when_done(me: Me, meet: str) -> Any:
    with joined(me, "services", meet) as group:
        if me.rank == 2:
            # Longer than services wait for a rank that has left: nothing tells that they gave up.
            time.sleep(7)
        return group.gather(np.array([me.rank]), 0)


def test_a_rank_may_leave_when_it_has_sent_all(launch: Launch) -> None:
    first, *others = launch(leaves_when_done, 3, free_address(), at=ALONE).results()
    assert first.tolist() == [0, 1, 2]
    assert others == [None, None]


class Quiet:
    """A membership in which nothing happens."""

    timeout = 30.0

    def failure(self) -> None:
        return None

    def left(self) -> list[int]:
        return []


def test_many_ranks_connect_at_once() -> None:
    count = 2 * peers.STRANGERS_MAX
    client: Any = Quiet()
    ranks = [peers.Peers(rank, count, "127.0.0.1", client) for rank in range(count)]
    told = [each.said for each in ranks]
    for each in ranks:
        each.heard(told)

    def body_of(rank: int) -> peers.Body:
        return lambda exchange: exchange.to_root(np.array([rank]), 0)

    # Rank 0 comes last, and finds all others at its door.
    sent = [each.collective("gather", body_of(each.rank)) for each in ranks[1:]]
    for transfer in sent:
        transfer.wait(30)
    got = ranks[0].collective("gather", body_of(0))
    got.wait(30)
    assert [int(each[0]) for each in got.result()] == list(range(count))
    for each in ranks:
        each.close()


def ends_with_things_under_way(me: Me, meet: str) -> str:
    group = joined(me, "memory", meet)
    if me.rank == 0:
        handle = group.receive_async(1)
        group.close()
        with pytest.raises(errors.Closed):
            handle.wait()
        with pytest.raises(errors.Closed):
            group.all_to_all(np.zeros(2))
    else:
        handle = group.receive_async(0)
        del handle, group
        gc.collect()
    wait_until(lambda: not any("peers" in each.name for each in threading.enumerate()), "the end")
    return "ended"


def test_closing_ends_what_is_under_way(launch: Launch) -> None:
    assert (
        launch(ends_with_things_under_way, 2, free_address(), at=ALONE).results() == ["ended"] * 2
    )


def test_strangers_at_a_ranks_port_do_no_harm(launch: Launch) -> None:
    ranks = launch(listens, 2, free_address(), at=ALONE)
    host, port = ranks.hear(0)
    for hello in (b"", b"x" * 100, os.urandom(21)):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(hello)
    ranks.tell(0, "go on")
    ranks.tell(1, "go on")
    assert ranks.results() == [[0, 0], [10, 10]]


def listens(me: Me, meet: str) -> list[int]:
    with joined(me, "memory", meet) as group:
        group.all_to_all(np.zeros(2))
        if me.rank == 0:
            assert group._peers is not None
            me.say(group._peers._listener.getsockname()[:2])
        me.hear()
        return [int(each) for each in group.all_to_all(np.array([0, 10]))]
