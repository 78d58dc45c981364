"""Several interfaces of a machine: which are used, and what each carries of all tensors.

Interfaces form *planes*: the second that each machine names is one plane, with a network of its
own. A machine hosts a service on each plane, and packets to that take the plane, as the service's
address is there. Each plane is planned by itself, as if machines had no other; then the planes
share all tensors by what each carries. With one interface a machine there is one plane, and
nothing here changes its plan.

Absent: ways around a plane that fails while a job runs. Whoever it cuts off is lost, as with one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from fanin import _fanin
from fanin._rates import Measured
from fanin._services import (
    Nic,
    Place,
    Service,
    Split,
    bracketed,
    is_loopback,
    levelled,
    machines,
    split,
    sums_itself,
)
from fanin._settings import Settings

# torch's: it names the interfaces that Gloo uses, in turn, with commas between.
GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
# Most interfaces of a machine: a process has a service at each.
NICS_MAX: Final = 4
CAUSE_MAX: Final = 200
SUBNETS: Final = (
    "name interfaces in one order on all machines, each in a subnet of its own (ip -br address)"
)

Gather: TypeAlias = Callable[[str, str], list[str]]


def named() -> list[str]:
    """Return the interfaces that the user names for this machine, in their order."""
    names = (name.strip() for name in os.environ.get(GLOO_VARIABLE, "").split(","))
    return list(dict.fromkeys(name for name in names if name))


def first_address(interfaces: Sequence[str]) -> str:
    """Return the address of the first interface that has one and a carrier, else of the first.

    Raises `ValueError`, which says why nobody can listen at the first, if none has both.
    """
    for interface in interfaces:
        with contextlib.suppress(ValueError):
            return _fanin.interface_address(interface, linked=True)
    try:
        return _fanin.interface_address(interfaces[0])
    except ValueError as cause:
        raise ValueError(f"{GLOO_VARIABLE} is {interfaces[0]!r}: {cause}") from None


def own_address(towards: str | None = None) -> str:
    """Return this machine's address as other machines reach it, as far as can be known here.

    That is the address of the first interface that GLOO_SOCKET_IFNAME names and that has one, else
    of the one that leads to `towards` (HOST:PORT), else that of the machine's own name.
    """
    if interfaces := named():
        return first_address(interfaces)
    route = None if towards is None else _fanin.route_to(towards)
    return named_address() if route is None else route[0]


def named_address() -> str:
    """Return the first address of the machine's name that is one of its own, as Gloo chooses."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def nics(settings: Settings) -> list[Nic]:
    """Return this machine's interfaces, if several are named; else none, as the route decides.

    Raises `ValueError` if there are too many.
    """
    names = named()
    if len(names) > NICS_MAX:
        raise ValueError(
            f"{GLOO_VARIABLE} names {len(names)} interfaces, and services use {NICS_MAX} at most: "
            "leave some out"
        )
    return [_nic(name, settings) for name in names] if len(names) > 1 else []


def _nic(name: str, settings: Settings) -> Nic:
    try:
        address = _fanin.interface_address(name, linked=True)
    except ValueError as cause:
        return Nic(name, "", None, str(cause)[:CAUSE_MAX])
    found = ipaddress.ip_address(address)
    if found.version == 6 and found.is_link_local:
        # An interface's other addresses come before it.
        cure = f"give it one of a subnet (ip address add ADDR/BITS dev {name})"
        return Nic(name, "", None, f"{address} is of its link alone: {cure}")
    route = _fanin.route_to(f"{bracketed(address)}:9")
    told = None if route is None else route[2]
    return Nic(name, address, settings.rate_bps or told)


@dataclass(frozen=True)
class Plane:
    """The network that the machines' interfaces of one number are in."""

    number: int
    """The place of these interfaces among those that each machine names, from 0."""
    places: list[Place]
    """The ranks' places, as if their machines had no other interface."""
    switches: list[int]
    """The numbers of rank 0's switches that are in it."""
    is_named: bool = False
    """Whether the interfaces are those of one number that users name, and not just the machines'
    addresses."""

    @property
    def name(self) -> str:
        """Its name for people: rank 0's interface."""
        return self.places[0].interface or f"interface {self.number + 1}"

    def gather(self, gather: Gather) -> Gather:
        """Return `gather` for rounds that each plane has."""
        # The first has the names that rounds have where there are no planes.
        suffix = f" by {self.number}" if self.number else ""
        return lambda name, text: gather(f"{name}{suffix}", text)


@dataclass(frozen=True)
class Part:
    """A plane with its plan, and its part of all tensors."""

    plane: Plane
    split: Split
    share: float
    """The parts of all planes are the whole."""

    def services(
        self, column: Sequence[int], addresses: Sequence[str], switches: Sequence[str]
    ) -> list[Service]:
        """Return what sums for a column here, by the addresses of services and of all switches."""
        hosts = self.split.hosts(column)
        # None of them has a part if the ranks' own services are to sum alone.
        here = [switches[number] for number in self.plane.switches][: len(self.split.switch_shares)]
        found = self.split.services(hosts, [addresses[host] for host in hosts], here)
        return [(at, share * self.share, bps, host) for at, share, bps, host in found]


def agreed(places: Sequence[Place], rank: int, gather: Gather) -> tuple[list[Plane], list[str]]:
    """Return the planes that all machines are in, and for people why others are not used.

    Each rank calls it, and all return the same. If machines have one interface, or no plane has
    them all, they are in one plane by their addresses.
    """
    alone = [Plane(0, list(places), list(range(len(places[0].switches))))]
    count = max(len(place.nics) for place in places)
    if count < 2 or max(machines(places)) == 0 or not sums_itself(places):
        return alone, []
    mine = json.dumps([_obstacle(places, rank, number) for number in range(count)])
    told: list[list[str]] = [json.loads(text) for text in gather("planes", mine)]
    whole: list[int] = []
    wrong = []
    for number in range(count):
        at, obstacle = next(
            ((at, each[number]) for at, each in enumerate(told) if each[number]), (0, "")
        )
        unused = f"interface {number + 1} of those that {GLOO_VARIABLE} names is not used"
        if obstacle:
            wrong.append(f"{unused}: on rank {at}'s machine ({places[at].name}) {obstacle}")
        elif whole and _family(places, number) != _family(places, whole[0]):
            wrong.append(
                f"{unused}: its addresses are {_family(places, number)}, and those of interface "
                f"{whole[0] + 1} are {_family(places, whole[0])}. Give both IPv4 addresses on all "
                "machines, or leave one of them out"
            )
        else:
            whole.append(number)
    if not whole:
        return alone, wrong
    first = places[0]
    # Ranks that name other switches than rank 0 may be in racks, and see them by other ways.
    alike = all(place.switches == first.switches for place in places if place.switches)
    at_address = {nic.address: number for number in whole if (nic := first.nic(number))}
    # Rank 0 tells no ways if it names one interface alone.
    known = first.ways if alike and first.ways else [None] * len(first.switches)
    ways = [at_address.get(way or "", whole[0]) for way in known]
    planes = []
    for number in whole:
        switches = [switch for switch, plane in enumerate(ways) if plane == number]
        keeps_all = number == whole[0] and not alike
        seen = [
            _seen(place, number, len(whole), None if keeps_all else switches) for place in places
        ]
        planes.append(Plane(number, seen, switches, is_named=True))
    return planes, wrong


def _family(places: Sequence[Place], number: int) -> str:
    """Return which addresses the machines have in a plane that all are in."""
    found = [nic.address for place in places if (nic := place.nic(number)) is not None]
    # A rank that names no interface may tell a loopback address of the other kind.
    return "IPv6" if any(":" in each and not is_loopback(each) for each in found) else "IPv4"


def _obstacle(places: Sequence[Place], rank: int, number: int) -> str:
    """Return what keeps this rank from a plane; nothing if nothing does."""
    here, nic = places[rank], places[rank].nic(number)
    if nic is None:
        names = ",".join(each.interface for each in here.nics) or here.interface
        return f"it names {names or 'none'} alone"
    if nic.wrong:
        return f"{nic.interface} has no use: {nic.wrong}"
    # A machine's ranks have the same addresses. A loopback address is not yet that of its service.
    others = {
        theirs.address: other.name
        for other in places
        if other.machine != here.machine
        and (theirs := other.nic(number)) is not None
        and not theirs.wrong
        and not is_loopback(theirs.address)
    }
    for address, name in others.items():
        route = _fanin.route_to(f"{bracketed(address)}:9")
        if route is None:
            return f"no way leads to {address} ({name})"[:CAUSE_MAX] + f": {SUBNETS}"
        if here.nics:
            is_by_nic = route[0] == nic.address
        else:
            # A rank that names no interface may tell another address of it.
            is_by_nic = is_loopback(nic.address) or (route[1] or "") == nic.interface
        if not is_by_nic:
            way = f"leave by {route[1]} ({route[0]}) in place of {nic.interface} ({nic.address})"
            return f"packets to {address} ({name}) {way}"[:CAUSE_MAX] + f": {SUBNETS}"
    return ""


def _seen(place: Place, number: int, planes: int, switches: Sequence[int] | None) -> Place:
    """Return a place as a plane has it, with those of its switches; None: with all.

    The planes share the machine's cores.
    """
    nic = place.nic(number)
    assert nic is not None, "a plane that a machine lacks is not used"
    summed = place.summed_bytes_per_s
    seen = replace(
        place,
        address=nic.address,
        interface=nic.interface,
        rate_bps=nic.rate_bps,
        summed_bytes_per_s=None if summed is None else summed // planes,
        nics=[],
        ways=[],
    )
    if switches is None:
        return seen
    return replace(
        seen,
        switches=[place.switches[number] for number in switches if place.switches],
        switch_rates=[place.switch_rates[number] for number in switches if place.switch_rates],
        switch_sums=[place.switch_sums[number] for number in switches if place.switch_sums],
    )


def divided(planes: Sequence[Plane], found: Sequence[Measured | None]) -> list[Part] | None:
    """Return the planes with their plans and parts, by what was measured; None: nobody may sum.

    Raises `fanin.errors.JoinRefused` where there are more machines than own services sum for.
    """
    splits = []
    for plane, measured in zip(planes, found, strict=True):
        planned = split(plane.places, measured.links if measured is not None else None)
        if planned is None:
            return None
        splits.append(planned)
    carried = [8 / planned.prediction[0] for planned in splits if planned.prediction is not None]
    if len(carried) < len(splits):
        carried = [1.0] * len(splits)
    elif any(measured is not None for measured in found):
        # A busy machine measures other rates each time.
        carried = [float(rate or 1) for rate in levelled([round(rate) for rate in carried])]
    shares = [rate / sum(carried) for rate in carried]
    return [Part(*each) for each in zip(planes, splits, shares, strict=True)]


def summary(parts: Sequence[Part]) -> Split:
    """Return a split that says of all planes what is predicted, and by what; see `Split`."""
    first = parts[0].split
    if len(parts) == 1:
        return first
    times = [
        (part.share * seconds, f"{bound} ({part.plane.name})", ring)
        for part in parts
        if part.split.prediction is not None
        for seconds, bound, ring in [part.split.prediction]
    ]
    links = [f"{part.plane.name}: {part.split.links}" for part in parts if part.split.links]
    return replace(
        first,
        prediction=max(times) if len(times) == len(parts) else None,
        links="; ".join(links) or None,
        is_assumed=any(part.split.is_assumed for part in parts),
    )
