"""The shares that services get, planned from what ranks say of their links and switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fanin._services import Place, Split, asked, columns, split
from fanin.errors import JoinRefused
from places import GIGABIT, place


def planned(places: list[Place]) -> Split:
    found = split(places)
    assert found is not None
    return found


def test_each_machine_s_first_rank_sums_as_much_as_the_others() -> None:
    found = planned([place(machine) for machine in (0, 0, 1, 1, 2)])
    (column,) = columns([0, 0, 1, 1, 2])
    hosts = found.hosts(column)
    assert hosts == [0, 2, 4]
    assert found.own_shares == pytest.approx([1 / 3] * 3)
    addresses = [f"10.0.0.{i}:1" for i in range(3)]
    assert [service[0] for service in found.services(hosts, addresses, [])] == addresses


def test_each_column_of_the_machines_ranks_is_summed_by_its_own() -> None:
    assert columns([0, 0, 1, 0, 1, 1, 1]) == [[0, 2], [1, 4], [3, 5]]
    found = planned([place(machine) for machine in (0, 0, 1, 1)])
    assert [found.hosts(column) for column in columns([0, 0, 1, 1])] == [[0, 2], [1, 3]]


# Once such a switch summed alone, and nobody was told. With n machines, and a link like theirs,
# that takes n^2 / (2 (n - 1)) times as long as a ring.
@pytest.mark.parametrize(
    ("rates", "switch_rate", "links"),
    [
        ([None] * 3, None, "no link tells its rate: all are taken for equal"),
        (
            [GIGABIT] * 3,
            None,
            "s:4800 tells no rate: taken for 1 Gbit/s, the slowest that is told",
        ),
        (
            [None] * 3,
            GIGABIT,
            "rank 0's machine, rank 1's machine and 1 more tell no rate: taken for 1 Gbit/s, the "
            "slowest that is told",
        ),
        (
            [GIGABIT, None, GIGABIT],
            GIGABIT,
            "rank 1's machine tells no rate: taken for 1 Gbit/s, the slowest that is told",
        ),
        ([GIGABIT] * 3, GIGABIT, "all tell their rates, 1 Gbit/s"),
    ],
)
def test_a_link_that_tells_nothing_is_taken_for_one_like_the_slowest_that_does(
    rates: list[int | None], switch_rate: int | None, links: str
) -> None:
    said = {"switches": ["s:4800"], "switch_rates": [switch_rate]}
    found = planned([place(i, rate_bps=rate, **said) for i, rate in enumerate(rates)])
    # BytePS Eqs. 1 and 2 for n = 3, k = 1: t = 2 n (n - 1) / (n^2 + k n - 2 k) = 1.2.
    assert found.machines == [0, 1, 2]
    assert found.own_shares == pytest.approx([0.2] * 3)
    assert found.switch_shares == pytest.approx([0.4])
    assert found.links == links
    assert found.is_assumed == ("rates" not in links)
    if {*rates, switch_rate} == {None}:
        assert found.prediction is None
    else:
        assert found.prediction is not None
        assert found.prediction[0] * GIGABIT / 8 == pytest.approx(1.2)


def test_a_switch_that_is_told_to_sum_alone_does_and_what_that_takes_is_predicted() -> None:
    for rate, seconds in ((GIGABIT, 3.0), (3 * GIGABIT, 1.0), (None, None)):
        said: dict[str, Any] = {"switches": ["s:4800"], "switch_rates": [rate], "plan": "switch"}
        found = planned([place(machine, rate_bps=GIGABIT, **said) for machine in range(3)])
        assert found.services([], [], ["s:4800"]) == [("s:4800", 1.0, None, None)]
        assert found.links is None
        assert not found.is_assumed
        if seconds is None:
            assert found.prediction is None
        else:
            assert found.prediction is not None
            assert found.prediction[0] * GIGABIT / 8 == pytest.approx(seconds)


def test_switches_are_asked_for_their_rates_where_a_plan_needs_them() -> None:
    named: dict[str, Any] = {"switches": ["s:4800"], "switch_rates": [None]}
    assert asked([place(0, **named), place(1, **named)]) == ["s:4800"]
    assert asked([place(0, **named, plan="switch"), place(1, **named)]) == ["s:4800"]
    for nobody in (
        [place(0, **named), place(0, **named)],
        [place(0), place(1)],
        [place(0, **named, plan="own"), place(1, **named)],
        [place(0, **named, plan=None), place(1, **named)],
        [place(0, **named), place(1, switches=["rack:4800"], switch_rates=[None])],
    ):
        assert asked(nobody) == []


def test_a_switch_of_one_machine_s_ranks_sums_all_of_it() -> None:
    said = {"switches": ["s:4800"], "switch_rates": [None]}
    found = planned([place(0, **said)] * 2)
    assert found.services([], [], ["s:4800"]) == [("s:4800", 1.0, None, None)]
    assert (found.links, found.prediction) == (None, None)


def test_a_switch_with_a_link_like_a_machine_s_sums_what_the_equations_give_it() -> None:
    # BytePS Eqs. 1 and 2 for n = 4, k = 1: t = 2 n (n - 1) / (n^2 + k n - 2 k) = 24 / 18 seconds
    # for a tensor and a link of one a second, and the spare machine sums t / n of it.
    said = {"switches": ["s:4800"], "switch_rates": [GIGABIT], "rate_bps": GIGABIT}
    found = planned([place(machine, **said) for machine in range(4)])
    assert found.machines == [0, 1, 2, 3]
    assert found.switch_shares == pytest.approx([1 / 3])
    assert found.own_shares == pytest.approx([1 / 6] * 4)
    assert found.prediction is not None
    assert found.prediction[0] * GIGABIT / 8 == pytest.approx(24 / 18)
    assert found.prediction[1].startswith("the link ")


def test_switches_share_equally_what_one_machine_s_ranks_have() -> None:
    said = {"switches": ["s:4800", "t:4800"], "switch_rates": [GIGABIT, 2 * GIGABIT]}
    found = planned([place(0, rate_bps=GIGABIT, **said)] * 2)
    assert (found.machines, found.switch_shares, found.prediction) == ([], [0.5, 0.5], None)


def test_of_ranks_that_name_each_their_own_rack_nothing_is_predicted() -> None:
    def racks(*names: str, rate: int = GIGABIT) -> list[Place]:
        # Rank 0 asked its own alone.
        asked = [rate] * len(names)
        said = {"rate_bps": GIGABIT, "switch_rates": asked}
        first = place(0, switches=[f"{name}1:4800" for name in names], **said)
        return [first, place(1, switches=[f"{name}2:4800" for name in names], **said)]

    for rate in (GIGABIT, 10 * GIGABIT):
        found = planned(racks("rack", rate=rate))
        assert (found.machines, found.switch_shares, found.prediction) == ([], [1.0], None)
    found = planned(racks("rack", "other"))
    assert found.prediction is None
    assert sum(found.own_shares) + sum(found.switch_shares) == pytest.approx(1)
    forced = planned([replace(each, plan="own") for each in racks("rack")])
    assert (forced.machines, forced.switch_shares) == ([0, 1], [])
    assert forced.prediction is not None, "no rack has a part in it"


def test_a_switch_with_a_link_for_every_worker_sums_all() -> None:
    said = {"switches": ["s:4800"], "switch_rates": [4 * GIGABIT], "rate_bps": GIGABIT}
    found = planned([place(machine, **said) for machine in range(4)])
    assert found.machines == []
    assert found.switch_shares == [1.0]


def test_what_is_forced_is_done() -> None:
    said = {"switches": ["s:4800", "t:4800"], "switch_rates": [GIGABIT] * 2, "rate_bps": GIGABIT}
    places = [place(machine, **said, plan="own") for machine in range(3)]
    assert planned(places).machines == [0, 1, 2]
    assert planned(places).switch_shares == []
    for forced in ({"plan": "switch"}, {"plan": None}):
        found = planned([place(machine, **said | forced) for machine in range(3)])
        assert found.machines == []
        assert found.switch_shares == pytest.approx([0.5, 0.5])


def test_more_machines_than_a_service_sums_for_need_racks_and_a_switch() -> None:
    with pytest.raises(JoinRefused, match=r"65 machines.*fanin switch --upstream"):
        split([place(machine) for machine in range(65)])
    racks: dict[str, Any] = {"switches": ["a:1", "b:1"], "switch_rates": [10**9, 10**9]}
    assert planned([place(machine, **racks) for machine in range(65)]).machines == []
    assert len(planned([place(machine, **racks) for machine in range(64)]).machines) == 64


def test_without_a_switch_somebody_must_be_allowed_to_sum() -> None:
    assert split([place(0, plan=None), place(1)]) is None
    assert split([place(0, plan="switch"), place(1)]) is None


def test_unequal_links_have_unequal_shares() -> None:
    rates = [GIGABIT, GIGABIT, GIGABIT, GIGABIT // 2]
    found = planned([place(machine, rate_bps=rate) for machine, rate in enumerate(rates)])
    assert found.own_shares[:3] == pytest.approx([found.own_shares[0]] * 3)
    assert sum(found.own_shares) == pytest.approx(1)
    assert len(found.machines) < 4 or found.own_shares[3] < found.own_shares[0] / 2


def test_several_servers_of_atp_have_equal_shares_of_tensors_and_of_the_slowest_link() -> None:
    servers = ["sw:4800", "sw:4801", "sw:4802", "sw:4803"]
    told = [place(i, rate_bps=rate, switches=servers) for i, rate in enumerate((GIGABIT, None))]
    for rates, places in (
        ([GIGABIT // 4] * 4, told),
        ([10 * GIGABIT // 4] * 4, [replace(each, rate_bps=None) for each in told]),
    ):
        found = planned([replace(each, plan=None, switch_rates=[None] * 4) for each in places])
        assert found.services([], [], servers) == [
            (at, 0.25, bps, None) for at, bps in zip(servers, rates, strict=True)
        ]
        assert found.prediction is None
        assert not found.is_assumed
