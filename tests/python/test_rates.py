"""What links carry that nobody tells: measured as ranks join, and what a plan makes of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess, switch_here
from fanin import _fanin, _rates, _services, errors
from fanin._rates import Measured, measured
from fanin._services import Links, Place, split, untold
from fanin.torch.backend.options import Options
from fanin_lab import netlab
from fanin_lab.netlab import Netlab, address
from laboratory import NAME, needs_lab
from places import GIGABIT, place
from ranks import DEADLINE, Me
from torch._C._distributed_c10d import FileStore

MEGABIT = 1_000_000


def spare(*rates: int | None) -> dict[str, Any]:
    return {
        "switches": [f"10.0.1.{number}:4800" for number, _ in enumerate(rates)],
        "switch_rates": list(rates),
    }


# Which links are measured


def test_links_are_measured_that_nobody_told_the_rate_of() -> None:
    assert untold([place(i) for i in range(3)]) == [0, 1, 2]
    assert untold([place(i, **spare(None, None)) for i in range(2)]) == [0, 1, 2, 3]
    rates = [GIGABIT, None, GIGABIT]
    some = [place(i, rate_bps=rate, **spare(GIGABIT, None)) for i, rate in enumerate(rates)]
    assert untold(some) == [1, 4]


@pytest.mark.parametrize(
    "places",
    [
        [place(i, rate_bps=GIGABIT, **spare(GIGABIT)) for i in range(3)],
        [place(0)] * 4,
        [place(i, address="127.0.0.1") for i in range(2)],
        [place(i, address="10.0.0.1") for i in range(2)],
        [place(i, measures=i > 0) for i in range(2)],
        [place(i, plan=None) for i in range(2)],
        [place(i, plan="switch", **spare(None)) for i in range(2)],
        # Racks, each with a link for its own ranks.
        [place(i, switches=[f"10.0.1.{i}:4800"], switch_rates=[None]) for i in range(2)],
    ],
    ids=["told", "one", "loopback", "one address", "assumed", "atp", "one switch", "racks"],
)
def test_nothing_is_measured_where_no_plan_follows_from_it(places: list[Place]) -> None:
    assert untold(places) == []

    def gather(*_: str) -> list[str]:
        raise AssertionError("nobody asks")

    assert measured(places, 0, "10.0.0.1", _fanin.Trust(), gather) is None


# What follows from figures


def judged(
    places: list[Place], rates: dict[tuple[int, int], int], causes: dict[tuple[int, int], str]
) -> Measured:
    return _rates._Network.of(places, untold(places)).judged(rates, causes)


def test_a_machine_is_as_fast_as_the_faster_of_its_flows() -> None:
    # Machine 1 has half the rate, and its neighbours' flows with it.
    slow = {(0, 1): 500, (1, 2): 510, (2, 3): 1000, (3, 0): 990}
    found = judged([place(i) for i in range(4)], slow, {})
    assert found == Measured(Links([1000, 510, 1000, 1000], []))


def test_what_a_switch_received_is_no_machine_s_rate() -> None:
    flows = {(0, 1): 100, (1, 0): 100, (0, 2): 180, (1, 2): 200}
    found = judged([place(i, **spare(None)) for i in range(2)], flows, {})
    assert found == Measured(Links([100, 100], [200]))


def test_links_of_more_than_10_gbit_count_as_equal() -> None:
    places = [place(i) for i in range(2)]
    network = _rates._Network.of(places, untold(places))
    found = network.judged({(0, 1): 29 * GIGABIT, (1, 0): 11 * GIGABIT}, {})
    assert found.links == Links([10 * GIGABIT] * 2, [])
    assert not found.is_uneven


def test_a_second_ring_tells_fast_machines_between_slow_ones() -> None:
    network = _rates._Network.of([place(i) for i in range(4)], [0, 1, 2, 3])
    first, second, again = network.phases({})
    assert first == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert second == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert again == first, "no flow was measured"
    rate = [100, 1000, 100, 1000]
    flows = {flow: min(rate[end] for end in flow) for flow in [*first, *second]}
    assert network.judged(flows, {}).links.machines == rate


@pytest.mark.parametrize(
    ("of_machines", "again"),
    [
        ([100, 60, 100], []),
        ([100, 58, 100], [(1, 0), (0, 1)]),
        ([100, 0, 100], [(1, 0), (0, 1)]),
        ([50, 100, 100, 50, 100], [(0, 1), (1, 0), (3, 2), (2, 3)]),
        ([50, 100, 50], []),
        # A machine whose link is down may have kept all others from being measured.
        ([0, 0, 0], [(0, 1), (1, 2), (2, 0)]),
        # Links of more than 10 Gbit/s count as equal.
        ([100 * GIGABIT, 10 * GIGABIT, 90 * GIGABIT], []),
    ],
    ids=str,
)
def test_a_machine_that_seems_slow_is_tried_again(
    of_machines: list[int], again: list[tuple[int, int]]
) -> None:
    network = _rates._Network.of([place(i) for i, _ in enumerate(of_machines)], [0])
    assert network._of_slow({(i, i): rate for i, rate in enumerate(of_machines)}) == again


def test_a_machine_that_was_busy_is_as_fast_as_when_it_is_tried_again() -> None:
    network = _rates._Network.of([place(i, **spare(None)) for i in range(3)], [0, 1, 2, 3])
    rates: dict[tuple[int, int], int] = {}
    phases = network.phases(rates)
    assert next(phases) == [(0, 1), (1, 2), (2, 0)]
    rates.update({(0, 1): 300, (1, 2): 310, (2, 0): 1000})
    assert next(phases) == [(1, 0), (0, 1)]
    rates.update({(1, 0): 990, (0, 1): 600})
    assert next(phases) == [(0, 3), (1, 3), (2, 3)]
    assert network.judged(rates, {}).links.machines == [1000] * 3


def test_machines_that_tell_their_rates_fill_switches_alone() -> None:
    places = [place(i, rate_bps=GIGABIT, **spare(None, None, None)) for i in range(2)]
    phases = list(_rates._Network.of(places, untold(places)).phases({}))
    assert phases == [[(0, 2), (1, 2), (0, 3), (1, 3)], [(0, 4), (1, 4)]]


def test_nonsense_names_machine_and_interface_and_is_no_figure() -> None:
    rates = [MEGABIT, None, GIGABIT]
    places = [place(i, rate_bps=rate) for i, rate in enumerate(rates)]
    flows = {(0, 1): 11 * MEGABIT, (1, 2): 12 * GIGABIT, (2, 0): MEGABIT}
    found = judged(places, flows, {})
    assert found.links == Links([None] * 3, [])
    assert found.wrong == [
        "the link of rank 1's machine (m1, eth0) could not be measured: 0.011 Gbit/s arrived where "
        "0.001 Gbit/s were told, which cannot be"
    ]


def test_a_link_that_is_not_measured_is_taken_for_the_slowest_that_is() -> None:
    places = [place(i, **spare(None)) for i in range(3)]
    causes = {(i, 3): "no answer from 10.0.1.0:9 over UDP within 300 ms" for i in range(3)}
    flows = {(0, 1): GIGABIT, (1, 2): GIGABIT, (2, 0): GIGABIT}
    found = judged(places, flows, causes)
    assert found.links == Links([GIGABIT] * 3, [None])
    assert found.wrong == [f"the link of 10.0.1.0:4800 could not be measured: {causes[0, 3]}"]
    planned = split(places, found.links)
    assert planned is not None
    assert planned.is_assumed
    assert planned.links == (
        "rank 0's machine, rank 1's machine and 1 more were measured, 1 Gbit/s; 10.0.1.0:4800 "
        "tells no rate: taken for 1 Gbit/s, the slowest that is known"
    )
    # BytePS Eqs. 1 and 2 for n = 3, k = 1.
    assert planned.switch_shares == pytest.approx([0.4])


def test_a_plan_says_what_was_told_and_what_was_measured() -> None:
    places = [place(i, **spare(None)) for i in range(3)]
    planned = split(places, Links([GIGABIT] * 3, [2 * GIGABIT]))
    assert planned is not None
    assert (planned.links, planned.is_assumed) == (
        "all links were measured, 1 Gbit/s to 2 Gbit/s",
        False,
    )
    assert planned.prediction is not None
    places = [place(i, rate_bps=GIGABIT, **spare(None)) for i in range(3)]
    planned = split(places, Links([None] * 3, [GIGABIT // 2]))
    assert planned is not None
    assert planned.links == (
        "10.0.1.0:4800 was measured, 0.5 Gbit/s; the others tell their rates, 1 Gbit/s"
    )
    assert not planned.is_assumed


def test_a_rate_that_was_told_counts_whatever_was_measured() -> None:
    places = [place(i, rate_bps=GIGABIT) for i in range(3)]
    assert split(places, Links([5, 6, 7], [])) == split(places)


@pytest.mark.parametrize(
    ("rates", "levelled"),
    [
        ([1000, 960, 940, None], [960, 960, 960, None]),
        ([1000, 500, 490, 100], [1000, 490, 490, 100]),
        ([None], [None]),
    ],
)
def test_rates_that_hardly_differ_are_equal(
    rates: list[int | None], levelled: list[int | None]
) -> None:
    assert _services.levelled(rates) == levelled


# Cores


def test_cores_count_where_links_are_faster() -> None:
    # Eight machines at 100 Gbit/s, one of which has a core that sums 5 GB/s.
    fast: dict[str, Any] = {"rate_bps": 100 * GIGABIT, "summed_bytes_per_s": 5 * GIGABIT}
    equal = split([place(i, cores=65, **fast) for i in range(8)])
    assert equal is not None
    assert equal == split([place(i, rate_bps=100 * GIGABIT) for i in range(8)])
    slow = split([place(i, cores=65 if i else 1, **fast) for i in range(8)])
    assert slow is not None
    share_of = dict(zip(slow.machines, slow.own_shares, strict=True))
    assert 0 < share_of[0] < 0.9 * share_of[1]
    assert [share_of[i] for i in range(2, 8)] == pytest.approx([share_of[1]] * 6)
    # Its other ranks have the cores beside.
    both = split([place(i // 8, cores=8, **fast) for i in range(16)])
    assert both is not None
    assert both.prediction is not None
    assert both.prediction[1].startswith("the cores of ")


def test_a_switch_tells_what_its_cores_sum() -> None:
    said = {"switches": ["s:4800"], "switch_rates": [100 * GIGABIT], "rate_bps": 10 * GIGABIT}
    found = [
        split([place(i, switch_sums=sums, **said) for i in range(4)])
        for sums in ([], [None], [100 * GIGABIT], [GIGABIT])
    ]
    shares = [each.switch_shares[0] for each in found if each is not None]
    assert shares[:3] == [1.0] * 3
    assert 0 < shares[3] < 0.5


def test_cores_do_not_count_where_a_rate_is_assumed() -> None:
    places = [place(i, cores=2, summed_bytes_per_s=1000 * (i + 1)) for i in range(4)]
    assert split(places) == split([place(i) for i in range(4)])


# Ranks agree


def test_what_one_rank_alone_knows_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rates, "_known", {})
    monkeypatch.setattr(_rates, "PHASE", 0.0)
    places = [place(i, address=f"127.0.0.{i + 1}") for i in range(2)]
    monkeypatch.setattr(_rates, "untold", lambda _: [0, 1])
    monkeypatch.setattr(_fanin, "fill", lambda *_: GIGABIT)
    rounds: list[str] = []

    def gather(name: str, text: str) -> list[str]:
        rounds.append(name)
        if name == "rates known":
            return [text, text if knows else ""]
        return [text, "{}" if name == "gauges" else json.dumps([[1, 0, GIGABIT, ""]])]

    def found() -> Measured | None:
        rounds.clear()
        return measured(places, 0, "127.0.0.1", _fanin.Trust(), gather)

    knows = False
    first = found()
    assert first is not None
    assert first.links == Links([GIGABIT, GIGABIT], [])
    assert rounds == ["rates known", "gauges", "rates 0"]
    knows = True
    assert found() == first
    assert rounds == ["rates known"]
    # A link carries as much whoever else is in the group, and whatever else was told.
    places = [place(0, address="127.0.0.1"), place(5, address="127.0.0.6")]
    assert found() == first
    assert rounds == ["rates known", "gauges", "rates 0"]
    places[1] = place(1, address="127.0.0.2", rate_bps=10 * GIGABIT)
    monkeypatch.setattr(_rates, "untold", lambda _: [0])
    again = found()
    assert again is not None
    assert again.links == Links([GIGABIT, None], [])
    assert rounds == ["rates known"]
    monkeypatch.setattr(_rates, "untold", lambda _: [0, 1])
    knows = False
    assert found() == first
    assert rounds == ["rates known", "gauges", "rates 0"]


# A switch measures its link


def test_a_switch_opens_a_gauge_for_those_alone_who_asked() -> None:
    with switch_here() as running:
        host = running.address.rpartition(":")[0]
        port, ticket = _fanin.gauge_at(running.address, 5.0)
        with pytest.raises(OSError, match="no answer"):
            _fanin.fill(f"{host}:{port}", ticket ^ 1, 0.1, 100_000)
        assert _fanin.fill(f"{host}:{port}", ticket, 1.0, 100_000) > 0
    with pytest.raises(errors.SwitchUnreachable):
        _fanin.gauge_at("127.0.0.1:9", 0.2)


# Real links


def joined(me: Me, namespaces: list[str], meeting: str, **said: Any) -> Any:
    netlab.enter(namespaces[me.rank])
    me.init(
        "fanin",
        store=FileStore(meeting, me.world_size),
        rank=me.rank,
        world_size=me.world_size,
        pg_options=Options(**said),
    )
    tensor = torch.full((100_000,), me.rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert (tensor == 6).all()
    return fanin.torch.plan()


def shares(me: Me, *where: Any) -> tuple[str, dict[int | None, float]]:
    plan = joined(me, *where)
    known = dict(_rates._known)
    with pytest.MonkeyPatch.context() as patch:
        if known:
            patch.setattr(_fanin, "fill", unexpected)
        again: Any = dist.new_group(backend="fanin")
        if known:
            assert fanin.torch.plan(again)["links"] == plan["links"]  # type: ignore[index]
    dist.barrier()  # others may still connect to each other
    return plan["links"], {each["host"]: each["share"] for each in plan["services"]}


def unexpected(*_: Any) -> int:
    raise AssertionError("nothing is to be sent")


@contextlib.contextmanager
def laboratory(**rates: int) -> Iterator[tuple[list[str], str]]:
    """Three workers and a spare machine, whose links tell no rate."""
    with Netlab(3, spares=1, rate_bps=100 * MEGABIT, rates=rates, name=NAME) as lab:
        listen = f"{address('s0')}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, "s0")):
            yield [lab.namespace(f"w{i}") for i in range(3)], listen


# A busy machine does not measure the rates to the last digit.
@needs_lab
@pytest.mark.parametrize("rates", [{}, {"s0": 300 * MEGABIT}, {"w1": 50 * MEGABIT}], ids=str)
def test_shares_follow_from_rates_that_nobody_tells(
    launch: Launch, tmp_path: Path, rates: dict[str, int]
) -> None:
    with laboratory(**rates) as (spaces, listen):
        ranks = launch(shares, 3, spaces, str(tmp_path / "store"), at=listen)
        found = ranks.results()
    assert all(each == found[0] for each in found)
    links, of_hosts = found[0]
    assert "measured" in links
    assert sum(of_hosts.values()) == pytest.approx(1)
    if "s0" in rates:
        # It carries what all others do.
        assert of_hosts[None] > 0.6
    elif "w1" in rates:
        assert of_hosts.get(1, 0) < min(of_hosts[0], of_hosts[2])
    else:
        assert len(of_hosts) == 4
        assert 0.25 < of_hosts[None] < 0.6


def kept(me: Me, *where: Any) -> str:
    """What links carry, as other processes measured it; then as this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fanin, "fill", unexpected)
        links = str(joined(me, *where)["links"])
        # As if all links had become slower.
        patch.setattr(_fanin, "fill", lambda *_: 20 * MEGABIT)
        fanin.torch.replan(me.switch)
    plan = fanin.torch.plan()
    assert plan is not None
    assert plan["links"] == "all links were measured, 0.02 Gbit/s"
    tensor = torch.full((100_000,), me.rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert (tensor == 6).all()
    return links


@needs_lab
def test_the_next_processes_measure_nothing_and_a_new_plan_measures_anew(
    launch: Launch, tmp_path: Path, kept_rates: Path
) -> None:
    with laboratory() as (spaces, listen):
        first = launch(joined, 3, spaces, str(tmp_path / "first"), at=listen).results()
        assert len(json.loads(kept_rates.read_text())["links"]) == 4
        second = launch(kept, 3, spaces, str(tmp_path / "second"), at=listen).results()
    assert second == [plan["links"] for plan in first]
    # Namespaces of the same names and addresses are other machines.
    with laboratory() as (spaces, listen):
        launch(joined, 3, spaces, str(tmp_path / "third"), at=listen).results()
    assert len(json.loads(kept_rates.read_text())["links"]) == 7


def alone(me: Me, namespaces: list[str], meeting: str) -> tuple[Any, list[str]]:
    def refuses(*_: Any) -> tuple[int, int]:
        raise errors.FaninError("no port is open there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fanin, "gauge_at", refuses)
        patch.setattr(_fanin, "fill", lambda *_: 100 * MEGABIT)
        said = io.StringIO()
        patch.setattr(sys, "stderr", said)
        plan = joined(me, namespaces, meeting)
    return plan, [line for line in said.getvalue().splitlines() if "measured: " in line]


@needs_lab
def test_a_link_that_cannot_be_measured_is_named_and_ends_no_joining(
    launch: Launch, tmp_path: Path
) -> None:
    with laboratory() as (spaces, listen):
        found = launch(alone, 3, spaces, str(tmp_path / "store"), at=listen).results()
    for plan, _ in found:
        assert plan["links"].endswith(
            f"{listen} tells no rate: taken for 0.1 Gbit/s, the slowest that is known"
        )
        assert [each["share"] for each in plan["services"]] == pytest.approx([0.2] * 3 + [0.4])
    assert [said for _, said in found[1:]] == [[], []]
    assert found[0][1] == [
        f"fanin: rank 0: the link of {listen} could not be measured: no port is open there. Say "
        "what they carry: FANIN_RATE=1gbit to ranks, --rate 1gbit to `fanin switch`, or let UDP "
        "through between the machines"
    ]


def silent(me: Me, namespaces: list[str], meeting: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fanin, "fill", unexpected)
        said = {"rate": "assumed"} if me.rank == 1 else {}
        return joined(me, namespaces, meeting, **said)


@needs_lab
def test_nothing_is_sent_if_a_rank_is_told_to_assume(launch: Launch, tmp_path: Path) -> None:
    with laboratory() as (spaces, listen):
        plans = launch(silent, 3, spaces, str(tmp_path / "store"), at=listen).results()
    for plan in plans:
        assert plan["links"] == "no link tells its rate: all are taken for equal"
        assert [each["share"] for each in plan["services"]] == pytest.approx([0.2] * 3 + [0.4])


# Rates that are wrong

SEEDS = 8


def wrong(seed: int, *of: Any) -> int:
    """A rate of 100 Mbit/s that is 0.1 to 10 times what it should be."""
    return round(100 * MEGABIT * 10 ** Random(f"{seed} {of}").uniform(-1, 1))


def summed(me: Me, seed: int, group: Any = None) -> tuple[list[float], str]:
    """The shares of the plan, and the bits of sums of which each rank checks what is exact."""
    plan = fanin.torch.plan(group)
    assert plan is not None
    generator = torch.Generator().manual_seed(SEEDS * me.rank + seed)
    bits = ""
    for length in (1, 5_000, 300_000):
        whole = torch.arange(length, dtype=torch.int32) * (me.rank + 1)
        dist.all_reduce(whole, group=group)
        assert torch.equal(whole, torch.arange(length, dtype=torch.int32) * 6), seed
        real = torch.randn(length, generator=generator)
        dist.all_reduce(real, group=group)
        bits += f"{torch.hash_tensor(real).item()} "
    return [each["share"] for each in plan["services"]], bits


def told_wrongly(me: Me) -> list[tuple[list[float], str]]:
    def options(seed: int) -> Options:
        return Options(machine=f"m{me.rank}", rate=f"{wrong(seed, me.rank)}bit")

    me.init(pg_options=options(0))
    # A group that is made later takes the options of its own.
    groups = [None, *(dist.new_group(pg_options=options(seed)) for seed in range(1, SEEDS))]
    return [summed(me, seed, group) for seed, group in enumerate(groups)]


def measured_wrongly(me: Me, namespaces: list[str], meeting: str) -> list[tuple[list[float], str]]:
    joined(me, namespaces, meeting)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for seed in range(SEEDS):
            patch.setattr(_fanin, "fill", lambda *said, seed=seed: wrong(seed, me.rank, said[0]))
            fanin.torch.replan(me.switch)
            found.append(summed(me, seed))
    return found


def agreed(found: list[list[tuple[list[float], str]]]) -> None:
    assert all(each == found[0] for each in found), "each rank has the same plans and bits"
    shares = [shares for shares, _ in found[0]]
    assert len(shares) == SEEDS
    # Equal links have three equal shares.
    assert any(len(each) != 3 or max(each) > 2 * min(each) for each in shares), shares


def test_sums_are_exact_by_plans_of_rates_that_were_told_wrongly(launch: Launch) -> None:
    agreed(launch(told_wrongly, 3, at="").results())


@needs_lab
def test_sums_are_exact_by_plans_of_rates_that_were_measured_wrongly(
    launch: Launch, tmp_path: Path
) -> None:
    with laboratory(w1=25 * MEGABIT, s0=200 * MEGABIT) as (spaces, listen):
        where = (spaces, str(tmp_path / "store"))
        agreed(launch(measured_wrongly, 3, *where, at=listen).results())


# The plan does not fit


def trained(
    me: Me, namespaces: list[str], meeting: str, stderr: str, late_s: float
) -> tuple[Any, list[str]]:
    """What rank 0 says of the plan while ranks sum, until it does or has done enough."""
    said = Path(stderr)
    if me.rank == 0:
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
    plan = joined(me, namespaces, meeting, rate="100mbit")

    def lines() -> list[str]:
        return [line for line in said.read_text().splitlines() if "does not fit" in line]

    end = time.monotonic() + DEADLINE / 2
    # The first element ends it on all ranks at once.
    tensor = torch.zeros(300_000)
    enough = 16 if late_s else None
    for step in range(1000):
        if me.rank == 1:
            # The fault: it computes for so long.
            time.sleep(late_s)
        is_over = step == enough or bool(lines()) or time.monotonic() > end
        tensor[0] = float(me.rank == 0 and is_over)
        dist.all_reduce(tensor)
        if tensor[0] > 0:
            break
    measured: Any = fanin.torch.plan()
    return plan | {"measured": measured["measured"]}, lines()


@needs_lab
@pytest.mark.parametrize("late_s", [0.0, 0.5], ids=["slow link", "late rank"])
def test_a_plan_that_does_not_fit_is_told_and_a_late_rank_is_no_link(
    launch: Launch, tmp_path: Path, late_s: float
) -> None:
    rates = {} if late_s else {"w1": 25 * MEGABIT}
    with Netlab(3, spares=1, rate_bps=100 * MEGABIT, rates=rates, name=NAME) as lab:
        listen = f"{address('s0')}:4800"
        told = ("--rate", "100mbit")
        with SwitchProcess(*told, listen=listen, popen=partial(lab.popen, "s0")):
            spaces = [lab.namespace(f"w{i}") for i in range(3)]
            where = (spaces, str(tmp_path / "store"), str(tmp_path / "stderr"), late_s)
            plan, said = launch(trained, 3, *where, at=listen).result(0)
    # The wait for a late rank is in what is measured, too.
    assert plan["measured"] > 2 * plan["predicted"]
    if late_s:
        assert said == []
        return
    (line,) = said
    assert line.startswith("fanin: rank 0: the plan does not fit: ")
    predicted = f"{1e9 * plan['predicted']:.3f} ms/MB is planned, bound by {plan['bound']}"
    assert f"{predicted} (all tell their rates, 0.1 Gbit/s)" in line
