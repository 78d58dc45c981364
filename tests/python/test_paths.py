"""Jobs with a loss bound whose ranks have several ports, behind routers with several paths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import fanin
import numpy as np
import pytest
from conftest import Launch, SwitchProcess
from fanin_lab import netlab
from laboratory import NAME
from paths import LISTEN, Routed
from ranks import Me
from test_bounds import BOUND, ELEMENTS, gradient

MISSING = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
needs_routers = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING),
    reason=f"not root, or missing: {', '.join(MISSING) or 'nothing'} (apt-get install iproute2)",
)
STEPS = 4


def summed(group: fanin.Group, step: int) -> tuple[bytes, int]:
    """The sum, and how many of its elements lack something."""
    ranks = range(group.world_size)
    total = group.all_reduce(gradient(group.rank + step))
    exact = sum(gradient(rank + step).astype(np.float64) for rank in ranks)
    whole = group.all_reduce(np.arange(ELEMENTS, dtype=np.int32) + group.rank)
    expected = len(ranks) * np.arange(ELEMENTS, dtype=np.int32) + sum(ranks)
    np.testing.assert_array_equal(whole, expected)
    return total.tobytes(), int((np.abs(total - exact) > 1e-3).sum())


def over_routers(me: Me, spaces: list[str], paths: int) -> list[tuple[bytes, int]]:
    netlab.enter(spaces[me.rank])
    said: dict[str, Any] = {"loss_bound": BOUND, "paths": paths, "plan": "switch"}
    with fanin.connect(
        me.switch, job="routed", rank=me.rank, world_size=me.world_size, **said
    ) as group:
        found = []
        for step in range(STEPS):
            found.append(summed(group, step))
            me.say(step)
            me.hear()
    return found


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Routed]:
    near, far, links = request.param
    with Routed(near, far, links, name=NAME) as lab:
        yield lab


def played(launch: Launch, lab: Routed, paths: int, dies: range = range(0)) -> int:
    """Sums, of which the last link carries nothing while those in `dies` are made.

    Returns the bytes that it was given then and later.
    """
    given = 0
    popen = partial(lab.popen, "switch")
    world_size = len(lab.ranks)
    # Each shard would have ports of its own.
    with SwitchProcess("--shards", "1", listen=LISTEN, popen=popen):
        spaces = [lab.namespace(member) for member in lab.ranks]
        ranks = launch(over_routers, world_size, spaces, paths, at=LISTEN)
        for step in range(STEPS):
            for rank in range(world_size):
                assert ranks.hear(rank) == step
            if dies and step + 1 in (dies.start, dies.stop):
                lab.set_dead(lab.links - 1, step + 1 in dies)
            if dies and step + 1 == dies.start:
                given = lab.carried()[-1][0]
            for rank in range(world_size):
                ranks.tell(rank, "go on")
        found = ranks.results()
    assert all(got == found[0] for got in found), "the same bits on all ranks"
    assert max(unlike for _, unlike in found[0]) <= world_size * BOUND * ELEMENTS
    return lab.carried()[-1][0] - given


@needs_routers
@pytest.mark.parametrize("lab", [(4, 0, 2)], indirect=True)
def test_the_packets_of_a_rank_with_several_ports_take_all_paths(
    launch: Launch, lab: Routed
) -> None:
    # Fewer than 4 of 32 ports take one of two ways once in 390,000 times.
    played(launch, lab, 8)
    for way in zip(*lab.carried(), strict=True):
        assert min(way) > max(way) / 10, way


@needs_routers
@pytest.mark.parametrize("lab", [(1, 1, 2)], indirect=True)
def test_the_packets_of_a_rank_with_one_port_take_one_path(launch: Launch, lab: Routed) -> None:
    played(launch, lab, 1)
    for way in zip(*lab.carried(), strict=True):
        assert min(way) < max(way) / 20, way


@needs_routers
@pytest.mark.parametrize("lab", [(2, 0, 3)], indirect=True)
@pytest.mark.parametrize("dies", [range(1, STEPS), range(1, 2)], ids=["for good", "for a while"])
def test_a_path_that_dies_holds_no_rank_up(launch: Launch, lab: Routed, dies: range) -> None:
    # The chance is one in 10 million that all 16 ports of a rank take one of three ways.
    assert played(launch, lab, 16, dies) > 10_000, "packets went there and were lost"


@pytest.mark.parametrize("said", [{}, {"loss_bound": 0.0}])
def test_several_paths_are_refused_where_nothing_may_be_lost(switch: str, said: Any) -> None:
    with pytest.raises(ValueError, match=r"FANIN_PATHS.*FANIN_LOSS_BOUND"):
        fanin.connect(switch, job="reliable", rank=0, world_size=1, paths=2, **said)


def test_all_ranks_have_as_many_ports_as_the_one_that_asks_for_most(launch: Launch) -> None:
    launch(with_own_paths, 2).results()


def with_own_paths(me: Me) -> None:
    said: dict[str, Any] = {"loss_bound": BOUND, "paths": 1 + 4 * me.rank, "plan": "switch"}
    with fanin.connect(me.switch, job="own", rank=me.rank, world_size=2, **said) as group:
        summed(group, 0)
        # Ports of sockets that speak to the switch, in each of its shards.
        port = f"{int(me.switch.rpartition(':')[2]):04X}"
        with open("/proc/self/net/udp") as table:
            ours = [line for line in table if line.split()[2].endswith(f":{port}")]
        assert len(ours) >= 2 * 5, ours
        assert len(ours) % 10 == 0, ours
        group.all_reduce(np.zeros(1))  # until then nobody leaves
