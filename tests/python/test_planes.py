"""Several interfaces of a machine: a plane each, with services and a part of all tensors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import _fanin, _hosting, _planes
from fanin._planes import Part, Plane, agreed, divided, summary
from fanin._rates import Measured
from fanin._services import Links, Nic, Place
from fanin._settings import Settings
from fanin.errors import JoinRefused
from fanin_lab import netlab
from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab, address
from laboratory import NAME, needs_lab
from places import GIGABIT, place
from ranks import Me
from torch._C._distributed_c10d import FileStore

MEGABIT = 1_000_000
SHAPED = 100 * MEGABIT


def nics(machine: int, *rates: int | None) -> list[Nic]:
    return [
        Nic(f"eth{number}", f"10.{number}.0.{machine + 1}", rate)
        for number, rate in enumerate(rates)
    ]


def several(machine: int, *rates: int | None, **said: Any) -> Place:
    return place(machine, nics=nics(machine, *rates), **said)


def source(of_machine: int) -> Callable[[str], tuple[str, str, None]]:
    """Return `route_to` of a machine whose interfaces have a subnet each."""

    def route_to(to: str) -> tuple[str, str, None]:
        subnet = to.split(".")[1]
        return f"10.{subnet}.0.{of_machine + 1}", f"eth{subnet}", None

    return route_to


def planes_of(
    monkeypatch: pytest.MonkeyPatch,
    places: Sequence[Place],
    routes: Sequence[Callable[[str], tuple[str, str, None]]] | None = None,
) -> tuple[list[Plane], list[str]]:
    """What ranks on a machine each agree on."""
    said: list[str] = []

    def says(_: str, text: str) -> list[str]:
        said.append(text)
        raise TimeoutError("the others have not spoken yet")

    for rank in range(len(places)):
        monkeypatch.setattr(_fanin, "route_to", routes[rank] if routes else source(rank))
        with pytest.raises(TimeoutError):
            agreed(places, rank, says)
    found = [agreed(places, rank, lambda *_: said) for rank in range(len(places))]
    assert all(each == found[0] for each in found)
    return found[0]


def unasked(*_: str) -> list[str]:
    raise AssertionError("nobody asks")


# Which planes there are


def test_machines_with_an_interface_each_agree_on_nothing_more() -> None:
    places = [place(i) for i in range(3)]
    assert agreed(places, 0, unasked) == ([Plane(0, places, [])], [])


@pytest.mark.parametrize(
    "places",
    [
        [several(0, None, None)] * 2,
        [several(i, None, None, plan=None) for i in range(2)],
        [
            several(i, None, None, plan="switch", switches=["s:1"], switch_rates=[None])
            for i in range(2)
        ],
    ],
    ids=["one machine", "atp", "a switch alone"],
)
def test_several_interfaces_are_of_no_use_if_machines_host_no_services(places: list[Place]) -> None:
    assert agreed(places, 0, unasked) == (
        [Plane(0, places, list(range(len(places[0].switches))))],
        [],
    )


def test_the_interfaces_of_one_number_are_a_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    planes, unused = planes_of(monkeypatch, [several(i, GIGABIT, GIGABIT // 2) for i in range(3)])
    assert unused == []
    assert [plane.number for plane in planes] == [0, 1]
    for number, plane in enumerate(planes):
        assert [at.address for at in plane.places] == [f"10.{number}.0.{i + 1}" for i in range(3)]
        assert {at.interface for at in plane.places} == {f"eth{number}"}
        assert {at.rate_bps for at in plane.places} == {GIGABIT // (number + 1)}


def test_a_plane_that_a_machine_does_not_name_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [several(0, None, None), several(1, None, None), place(2)]
    planes, unused = planes_of(monkeypatch, places)
    assert [plane.number for plane in planes] == [0]
    assert unused == [
        "interface 2 of those that GLOO_SOCKET_IFNAME names is not used: on rank 2's machine (m2) "
        "it names eth0 alone"
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_a_plane_with_an_interface_that_is_down_is_not_used(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    places = [several(i, None, None) for i in range(2)]
    places[1].nics[number] = Nic(f"eth{number}", "", None, "the interface is down")
    planes, unused = planes_of(monkeypatch, places)
    assert [plane.number for plane in planes] == [1 - number]
    assert unused == [
        f"interface {number + 1} of those that GLOO_SOCKET_IFNAME names is not used: on rank 1's "
        f"machine (m1) eth{number} has no use: the interface is down"
    ]


def test_if_no_plane_is_whole_machines_have_an_address_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [several(i, None, None) for i in range(2)]
    for machine, number in ((0, 0), (1, 1)):
        places[machine].nics[number] = Nic(f"eth{number}", "", None, "the interface is down")
    planes, unused = planes_of(monkeypatch, places)
    assert planes == [Plane(0, places, [])]
    assert len(unused) == 2


def test_two_interfaces_in_a_subnet_are_one_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [several(i, None, None) for i in range(2)]
    # The kernel sends all by the first of rank 1's.
    routes = [source(0), lambda _: ("10.0.0.2", "eth0", None)]
    planes, unused = planes_of(monkeypatch, places, routes)
    assert [plane.number for plane in planes] == [0]
    assert unused == [
        "interface 2 of those that GLOO_SOCKET_IFNAME names is not used: on rank 1's machine (m1) "
        "packets to 10.1.0.1 (m0) leave by eth0 (10.0.0.2) in place of eth1 (10.1.0.2): name "
        "interfaces in one order on all machines, each in a subnet of its own (ip -br address)"
    ]


def test_a_switch_is_in_the_plane_whose_subnet_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        "switches": ["a:1", "b:1", "c:1"],
        "switch_rates": [1, 2, 3],
        "switch_sums": [4, 5, 6],
    }
    ways = ["10.1.0.1", "10.0.0.1", "192.0.2.1"]
    places = [several(i, None, None, ways=ways, **named) for i in range(2)]
    planes, _ = planes_of(monkeypatch, places)
    assert [plane.switches for plane in planes] == [[1, 2], [0]]
    first, second = (plane.places[1] for plane in planes)
    assert (first.switches, first.switch_rates, first.switch_sums) == (
        ["b:1", "c:1"],
        [2, 3],
        [5, 6],
    )
    assert (second.switches, second.switch_rates, second.switch_sums) == (["a:1"], [1], [4])


@pytest.mark.parametrize("others", ["a:1,b:1", "c:1,d:1"], ids=["equal", "unlike"])
def test_a_first_rank_with_one_interface_has_its_switches_in_the_first_plane(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    named = {"switch_rates": [None] * 2}
    places = [
        place(0, switches=["a:1", "b:1"], **named),
        several(1, None, None, switches=others.split(","), ways=["10.1.0.2"] * 2, **named),
    ]
    (plane,), unused = planes_of(monkeypatch, places)
    assert len(unused) == 1
    assert plane.switches == [0, 1]
    assert [at.switches for at in plane.places] == [at.switches for at in places]
    parts = divided([plane], [None])
    assert parts is not None
    services = parts[0].services(range(2), ["0", "1"], ["a:1", "b:1"])
    assert [at for at, *_ in services if ":" in at] == ["a:1", "b:1"]
    assert sum(share for _, share, *_ in services) == pytest.approx(1)


@pytest.mark.parametrize("first", [0, 1], ids=["IPv4", "IPv6"])
def test_planes_of_unlike_addresses_are_not_used_together(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    def at(machine: int) -> list[str]:
        addresses = [f"10.0.0.{machine + 1}", f"fd00::{machine + 1}"]
        return addresses[first:] + addresses[:first]

    def routes(machine: int) -> Callable[[str], tuple[str, str, None]]:
        ways = {to.startswith("["): (own, f"eth{i}", None) for i, own, to in ends(machine)}
        return lambda to: ways[to.startswith("[")]

    def ends(machine: int) -> list[tuple[int, str, str]]:
        return [(i, own, f"[{own}]" if ":" in own else own) for i, own in enumerate(at(machine))]

    places = [
        place(i, nics=[Nic(f"eth{n}", own, None) for n, own in enumerate(at(i))]) for i in range(2)
    ]
    planes, unused = planes_of(monkeypatch, places, [routes(0), routes(1)])
    assert [plane.number for plane in planes] == [0]
    kinds = ["IPv6", "IPv4"][first:] + ["IPv6", "IPv4"][:first]
    assert unused == [
        "interface 2 of those that GLOO_SOCKET_IFNAME names is not used: its addresses are "
        f"{kinds[0]}, and those of interface 1 are {kinds[1]}. Give both IPv4 addresses on all "
        "machines, or leave one of them out"
    ]


def test_a_link_local_address_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    monkeypatch.setattr(_fanin, "interface_address", lambda *_, **__: "fe80::1")
    first, second = _planes.nics(Settings())
    cure = "give it one of a subnet (ip address add ADDR/BITS dev eth0)"
    assert first == Nic("eth0", "", None, f"fe80::1 is of its link alone: {cure}")
    assert second.wrong.endswith("dev eth1)")


@pytest.mark.parametrize("own", ["127.0.0.1", "10.0.0.77"])
def test_a_rank_that_names_no_interface_may_tell_another_address_of_it(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    interface = "lo" if own.startswith("127") else "eth0"
    places = [place(0, address=own, interface=interface), several(1, None, None)]
    planes, (unused,) = planes_of(monkeypatch, places)
    assert [plane.number for plane in planes] == [0]
    assert "interface 2" in unused
    assert unused.endswith(f"it names {interface} alone")


def test_planes_share_a_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    first = several(0, None, None, summed_bytes_per_s=6)
    for rates, summed in (([None], 6), ([None, None], 3)):
        second = several(1, *rates, summed_bytes_per_s=6)
        planes, _ = planes_of(monkeypatch, [first, second])
        assert len(planes) == len(rates)
        assert {at.summed_bytes_per_s for plane in planes for at in plane.places} == {summed}


def test_services_that_end_at_exit_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stays = 100.0, []

    def stop(patience: float) -> None:
        nonlocal now
        stays.append(patience)
        now += 2.0

    service: Any = SimpleNamespace(stop=stop)
    monkeypatch.setattr("fanin._hosting.time.monotonic", lambda: now)
    monkeypatch.setattr(_hosting, "_exit_by", None)
    for _ in range(2):
        _hosting._end(os.getpid(), service)
    assert stays == [_hosting.LINGER] * 2
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    for _ in range(4):
        _hosting._end(os.getpid(), service)
    assert stays[2:] == [_hosting.LINGER, _hosting.LINGER - 2, _hosting.LINGER - 4, 0.0]


def test_more_interfaces_than_services_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join(f"eth{number}" for number in range(5)))
    with pytest.raises(ValueError, match="names 5 interfaces, and services use 4 at most"):
        _planes.nics(Settings())


def test_a_place_with_interfaces_is_told_and_read() -> None:
    said = several(1, GIGABIT, None, ways=[])
    assert Place.decode(said.encode()) == said


# What each carries


def parts_of(
    monkeypatch: pytest.MonkeyPatch, places: list[Place], *measured: Links | None
) -> list[Part]:
    planes, _ = planes_of(monkeypatch, places)
    found = [None if links is None else Measured(links) for links in measured]
    parts = divided(planes, found or [None] * len(planes))
    assert parts is not None
    return parts


def test_planes_share_tensors_by_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [several(i, GIGABIT, GIGABIT // 2) for i in range(4)]
    parts = parts_of(monkeypatch, places)
    assert [part.share for part in parts] == pytest.approx([2 / 3, 1 / 3])
    column = range(4)
    services = [
        service
        for part in parts
        for service in part.services(column, [f"{part.plane.number}.{i}" for i in column], [])
    ]
    assert [at for at, *_ in services] == [f"{plane}.{i}" for plane in range(2) for i in range(4)]
    assert [share for _, share, *_ in services] == pytest.approx([1 / 6] * 4 + [1 / 12] * 4)
    assert [host for *_, host in services] == [0, 1, 2, 3] * 2
    planned = summary(parts)
    assert planned.prediction is not None
    # A ring over one link of both rates together takes as long: 2 (n - 1) / n.
    assert planned.prediction[0] * 1.5 * GIGABIT / 8 == pytest.approx(1.5)
    assert planned.links == (
        "eth0: all tell their rates, 1 Gbit/s; eth1: all tell their rates, 0.5 Gbit/s"
    )
    assert not planned.is_assumed


def test_planes_of_unknown_rate_are_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    for rates in ((None, None), (GIGABIT, None)):
        parts = parts_of(monkeypatch, [several(i, *rates) for i in range(2)])
        assert [part.share for part in parts] == [0.5, 0.5]
        assert summary(parts).prediction is None


def test_planes_whose_measured_rates_hardly_differ_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [several(i, None, None) for i in range(2)]
    for rates, share in (((950, 900), 0.5), ((900, 450), 2 / 3)):
        links = [Links([rate * MEGABIT] * 2, []) for rate in rates]
        parts = parts_of(monkeypatch, places, *links)
        assert parts[0].share == pytest.approx(share)


def test_a_slow_machine_of_a_plane_sums_less_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [several(i, GIGABIT, GIGABIT // (10 if i == 2 else 1)) for i in range(3)]
    first, second = parts_of(monkeypatch, places)
    assert first.split.own_shares == pytest.approx([1 / 3] * 3)
    assert second.split.machines == [0, 1]
    assert first.share > second.share


def test_a_switch_sums_in_its_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"switches": ["s:1"], "switch_rates": [GIGABIT], "ways": ["10.1.0.1"]}
    parts = parts_of(monkeypatch, [several(i, GIGABIT, GIGABIT, **named) for i in range(3)])
    at = [part.services(range(3), ["a", "b", "c"], ["mine:1"]) for part in parts]
    assert [[name for name, *_ in each] for each in at] == [
        ["a", "b", "c"],
        ["a", "b", "c", "mine:1"],
    ]
    # BytePS Eqs. 1 and 2 for n = 3: 4 / 3 without a spare machine, and 1.2 with one.
    assert parts[1].share / parts[0].share == pytest.approx(4 / 3 / 1.2)


def test_no_more_machines_than_a_service_sums_for_have_planes() -> None:
    places = [several(i, None, None) for i in range(65)]
    planes, unused = agreed(places, 0, unasked)
    assert (len(planes), unused) == (1, [])
    with pytest.raises(JoinRefused, match="65 machines"):
        divided(planes, [None])


# Real links


def sums(
    me: Me, namespaces: list[str], meeting: str, interfaces: list[str], rate: str | None = None
) -> tuple[list[tuple[str, float]], list[str]]:
    """Return the plan's services, and what rank 0 says on standard error."""
    netlab.enter(namespaces[me.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[me.rank]
    if rate is not None:
        os.environ["FANIN_RATE"] = rate
    said = io.StringIO()
    fills = _fanin.fill

    def filled(at: str, *how: Any) -> int:
        # A busy machine would be measured in place of its links.
        assert fills(at, *how) > 0
        return SHAPED // (1 + (at.split(".")[1] != "77"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", said)
        patch.setattr(_fanin, "fill", filled)
        store = FileStore(meeting, me.world_size)
        me.init("fanin", store=store, rank=me.rank, world_size=me.world_size)
    me.say("joined")
    me.hear()
    for step in range(4):
        tensor = torch.arange(500_000, dtype=torch.int32) * (me.rank + step)
        dist.all_reduce(tensor)
        ranks = sum(rank + step for rank in range(me.world_size))
        assert torch.equal(tensor, torch.arange(500_000, dtype=torch.int32) * ranks)
        tensor = torch.arange(400_000 * me.world_size, dtype=torch.int32) * (me.rank + step)
        mine = torch.empty(400_000, dtype=torch.int32)
        dist.reduce_scatter_single(mine, tensor)
        whole = torch.arange(400_000 * me.world_size, dtype=torch.int32) * ranks
        assert torch.equal(mine, whole[400_000 * me.rank :][:400_000])
        dist.broadcast(mine, 1)
        assert torch.equal(mine, whole[400_000:800_000])
    plan = fanin.torch.plan()
    assert plan is not None
    lines = [line for line in said.getvalue().splitlines() if "is not used" in line]
    return [(each["service"], each["share"]) for each in plan["services"]], lines


def sent(namespace: str, interface: str) -> int:
    """Return the bytes that an interface has sent."""
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", interface]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def on_planes(
    launch: Launch, meeting: Path, lab: Netlab, names: Sequence[str], rate: str | None = None
) -> tuple[dict[int, float], list[str], list[list[int]]]:
    """Return each plane's share, what rank 0 says, and the bytes of each rank's interfaces."""
    spaces = [lab.namespace(f"w{i}") for i in range(lab.workers)]
    ranks = launch(sums, lab.workers, spaces, str(meeting), list(names), rate, at="")

    def counted() -> list[list[int]]:
        return [[sent(space, f"eth{nic}") for nic in range(lab.nics)] for space in spaces]

    for rank in range(lab.workers):
        ranks.hear(rank)
    before = counted()
    for rank in range(lab.workers):
        ranks.tell(rank, None)
    results = ranks.results()
    after = counted()
    bytes_sent = [
        [end - begin for begin, end in zip(*each, strict=True)]
        for each in zip(before, after, strict=True)
    ]
    assert all(services == results[0][0] for services, _ in results)
    assert all(said == [] for _, said in results[1:])
    shares: dict[int, float] = {}
    for at, share in results[0][0]:
        plane = int(at.split(".")[1]) - 77
        shares[plane] = shares.get(plane, 0.0) + share
    return shares, results[0][1], bytes_sent


@needs_lab
def test_links_of_two_rates_carry_what_they_can_and_sums_are_exact(
    launch: Launch, tmp_path: Path
) -> None:
    rates = {"eth1": SHAPED // 2}
    with Netlab(2, nics=2, rate_bps=SHAPED, rates=rates, name=NAME) as lab:
        found = on_planes(launch, tmp_path / "store", lab, ["eth0,eth1"] * 2)
    shares, said, bytes_sent = found
    assert said == []
    assert shares == pytest.approx({0: 2 / 3, 1: 1 / 3})
    for first, second in bytes_sent:
        assert second / (first + second) == pytest.approx(shares[1], rel=0.1)


@needs_lab
def test_links_that_are_told_to_be_equal_carry_as_much(launch: Launch, tmp_path: Path) -> None:
    with Netlab(3, nics=3, rate_bps=SHAPED, name=NAME) as lab:
        found = on_planes(launch, tmp_path / "store", lab, ["eth0,eth1,eth2"] * 3, "100mbit")
    shares, said, bytes_sent = found
    assert said == []
    assert list(shares.values()) == pytest.approx([1 / 3] * 3)
    for of_rank in bytes_sent:
        assert of_rank == pytest.approx([sum(of_rank) / 3] * 3, rel=0.1)


@needs_lab
@pytest.mark.parametrize(
    ("member", "link", "cause"),
    [
        ("w1", "eth1", "eth1 has no use: the interface is down"),
        ("w1", "eth0", "eth0 has no use: the interface is down"),
        (SWITCH, "w1.eth1", "eth1 has no use: the interface has no carrier"),
    ],
)
def test_a_link_that_is_down_as_ranks_join_is_named_and_left_out(
    launch: Launch, tmp_path: Path, member: str, link: str, cause: str
) -> None:
    down = int(link[-1])
    with Netlab(2, nics=2, name=NAME) as lab:
        command = ["ip", "-n", lab.namespace(member), "link", "set", link, "down"]
        subprocess.run(command, check=True)
        found = on_planes(launch, tmp_path / "store", lab, ["eth0,eth1"] * 2, "assumed")
    shares, (said,), _ = found
    assert shares == {1 - down: pytest.approx(1)}
    assert "on rank 1's machine" in said
    assert cause in said


@needs_lab
def test_an_interface_that_one_machine_does_not_name_is_left_out(
    launch: Launch, tmp_path: Path
) -> None:
    with Netlab(2, nics=2, name=NAME) as lab:
        found = on_planes(launch, tmp_path / "store", lab, ["eth0,eth1", "eth0"], "assumed")
    shares, (said,), bytes_sent = found
    assert shares == {0: pytest.approx(1)}
    assert said.endswith("it names eth0 alone")
    assert all(second < 10_000 for _, second in bytes_sent)


@needs_lab
def test_interfaces_of_one_subnet_are_told_apart_by_nobody(launch: Launch, tmp_path: Path) -> None:
    with Netlab(2, nics=2, name=NAME) as lab:
        for worker in range(2):
            at = ["ip", "-n", lab.namespace(f"w{worker}"), "address"]
            gone = f"{address(f'w{worker}', 1)}/24"
            subprocess.run([*at, "del", gone, "dev", "eth1"], check=True)
            subprocess.run([*at, "add", f"10.77.0.{100 + worker}/24", "dev", "eth1"], check=True)
        found = on_planes(launch, tmp_path / "store", lab, ["eth0,eth1"] * 2, "assumed")
    shares, (said,), _ = found
    assert shares == {0: pytest.approx(1)}
    assert "leave by eth0 (10.77.0.1) in place of eth1 (10.77.0.100): name inter" in said


def connects(me: Me, namespaces: list[str]) -> list[str]:
    netlab.enter(namespaces[me.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0,eth1"
    with fanin.connect(
        me.switch, job="planes", rank=me.rank, world_size=me.world_size, rate="assumed"
    ) as group:
        array = np.arange(300_000, dtype=np.int32) * (me.rank + 1)
        group.all_reduce(array)
        assert (array == np.arange(300_000) * 3).all()
        plan = group.client.plan
        assert plan is not None
        return sorted(each["service"].rpartition(":")[0] for each in plan["services"])


@needs_lab
def test_ranks_that_meet_at_a_switch_use_several_interfaces(launch: Launch) -> None:
    with Netlab(2, nics=2, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace(f"w{i}") for i in range(2)]
            found = launch(connects, 2, spaces, at=listen).results()
    own = [address(f"w{i}", nic) for i in range(2) for nic in range(2)]
    assert found == [sorted([*own, SWITCH_ADDRESS])] * 2
