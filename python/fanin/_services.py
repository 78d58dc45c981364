"""Who sums what of a job: the ranks' own services, named switches, and the plan over both.

Ranks tell each other where they are (`Place`), and each computes the same plan from what all said.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from fanin import _fanin
from fanin._settings import Plan, Settings
from fanin.errors import JoinRefused

# A switch, and so a service, sums for so many, which may be switches that sum for as many each.
PLACES_MAX: Final = 64
# The rate that is assumed if no link's rate is known.
RATE_UNKNOWN_BPS: Final = 10_000_000_000
# Most links that a line names.
NAMED_MAX: Final = 2

Service: TypeAlias = tuple[str, float, int | None, int | None]
"""An address, its share of all tensors, the bits a second that a rank and it speak at, and the rank
in whose process it is."""


@dataclass(frozen=True)
class Place:
    """A rank's place, and its settings."""

    machine: str
    """Equal for ranks of one machine."""
    name: str
    """Its name, for people."""
    address: str
    """This machine's address, as the others reach it."""
    rate_bps: int | None
    """Its link's rate, if that is known."""
    switches: list[str]
    """The switches that it was told of."""
    switch_rates: list[int | None]
    """The rates of their links, once rank 0 has asked."""
    plan: Plan | None
    """None: ranks cannot sum, and nothing is planned, as with ATP and GOAT."""
    local: str | None
    """How its machine's ranks would sum among themselves; None if they may not."""

    def encode(self) -> str:
        """Return a text from which `decode` makes it again."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Place:
        """Return what `encode` made a text of."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Split:
    """The machines and switches that sum, and their shares: the same on every rank."""

    machines: list[int]
    """The machines whose ranks' own services sum."""
    own_shares: list[float]
    """The share of each of these machines."""
    switch_shares: list[float]
    """The share of each of rank 0's switches; zero for one that is not used."""
    rates_bps: list[int | None]
    """The rates of the lanes to the machines, then to the switches."""
    prediction: tuple[float, str] | None
    """The seconds to sum a byte, without headers, and the link that takes so long. None if no
    link's rate is known, if ranks name different switches, and for one machine. A service that was
    told to sum alone has a prediction if all rates are known."""
    links: str | None = None
    """The rates that the links were told, and those that were assumed for the others; None if no
    share follows from them."""
    is_assumed: bool = False
    """Whether a share follows from something that nobody told."""

    def hosts(self, column: Sequence[int]) -> list[int]:
        """Return the ranks of a column whose services sum it."""
        return [column[machine] for machine in self.machines]

    def services(
        self, hosts: Sequence[int], hosted: Sequence[str], switches: Sequence[str]
    ) -> list[Service]:
        """Return what sums, given the hosts, and the addresses of their services and switches."""
        shares = [*self.own_shares, *self.switch_shares]
        owners = [*hosts, *[None] * len(switches)]
        services = zip([*hosted, *switches], shares, self.rates_bps, owners, strict=True)
        return [service for service in services if service[1] > 0]


def place(settings: Settings, address: str) -> Place:
    """Return where this rank is; `address` is this machine's, as far as is known."""
    switches = settings.switch.split(",") if settings.switch else []
    # Any port: nothing is sent.
    route = _fanin.route_to(switches[0] if switches else f"{bracketed(address)}:9")
    if switches and route is not None and is_loopback(address):
        # The store's way, or the machine's own name, leads nowhere; the one to the switch does.
        address = route[0]
    rate = settings.rate
    if rate is None and route is not None:
        rate = route[2]
    return Place(
        machine=machine(settings),
        name=settings.machine or socket.gethostname(),
        address=address,
        rate_bps=rate,
        switches=switches,
        switch_rates=[None] * len(switches),
        plan=settings.plan if settings.protocol == "switchml" else None,
        local=_local(settings),
    )


def _local(settings: Settings) -> str | None:
    # With ATP each rank is a child of a switch, and a loss bound is on each rank's contributions.
    # Ranks that are told unlike things never sum for each other: they are refused as they join.
    is_possible = settings.protocol == "switchml" and settings.loss_bound == 0
    return f"{settings.travels_as}, {settings.security}" if is_possible else None


def machine(settings: Settings) -> str:
    """Return a name that ranks have in common that can share memory, and an address."""
    if settings.machine is not None:
        return settings.machine
    return _fanin.machine_id()


def machines(places: Sequence[Place]) -> list[int]:
    """Return for each rank the number of its machine, in the order of their first ranks."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(place.machine, len(numbers)) for place in places]


def columns(of_rank: Sequence[int]) -> list[list[int]]:
    """Return for each column its ranks, one a machine, given the machine of each rank.

    There are as many as ranks on the machine with the fewest. What a column has of all tensors is a
    job to its services, of which each of its ranks may host one: that it speaks to by no socket.
    """
    of_machine: list[list[int]] = [[] for _ in range(max(of_rank) + 1)]
    for rank, machine in enumerate(of_rank):
        of_machine[machine].append(rank)
    return [list(ranks) for ranks in zip(*of_machine, strict=False)]


def local_machines(places: Sequence[Place]) -> list[int] | None:
    """Return the machine of each rank if ranks of one are to sum among themselves, else None."""
    of_rank = machines(places)
    alike = {place.local for place in places}
    if len(alike) > 1 or None in alike or len(set(of_rank)) == len(of_rank):
        return None
    # A user who names a switch for the ranks of one machine wants it to sum.
    return None if places[0].switches and max(of_rank) == 0 else of_rank


def asked(places: Sequence[Place]) -> list[str]:
    """Return the switches that rank 0 is to ask for the rates of their links."""
    first = places[0]
    is_planned = first.plan in ("auto", "switch") and _are_alike(places)
    is_of_several = any(place.machine != first.machine for place in places)
    return first.switches if is_planned and is_of_several else []


def _are_alike(places: Sequence[Place]) -> bool:
    # Ranks that name different switches may be in racks, each with a link for its own ranks
    # alone; or they reach one switch by two addresses.
    return all(place.switches == places[0].switches for place in places if place.switches)


def split(places: Sequence[Place]) -> Split | None:
    """Return what takes the least time as rank 0 would have it; None if nobody may sum.

    A link of which nobody tells the rate is taken for as fast as the slowest of which it is told:
    a switch as fat as all machines together has to say so.

    Raises `fanin.errors.JoinRefused` where there are more machines than own services sum for.
    """
    first = places[0]
    of_rank = machines(places)
    count = max(of_rank) + 1
    names = first.switches
    is_alike = _are_alike(places)
    switch_rates = first.switch_rates if is_alike else [None] * len(names)
    if not names:
        own = first.plan in ("auto", "own")
    elif first.plan == "own":
        own, names, switch_rates = True, [], []
    elif first.plan != "auto" or count == 1:
        own = False
    else:
        own = is_alike or len(names) > 1
    if own and count > PLACES_MAX:
        # No rack is before them; before a switch that was named there may be.
        if not names:
            raise JoinRefused(
                f"{count} machines, and services of their own sum for {PLACES_MAX} at most; start "
                f"a switch, and racks before it (fanin switch --upstream), each for {PLACES_MAX} "
                "machines at most, and name the rack of each machine (switch, or FANIN_SWITCH)"
            )
        own = False
    summing = list(range(count)) if own else []
    if not summing and not names:
        return None
    sums = len(summing) + len(names)
    if count == 1:
        # A plan is for what travels between machines: here all ask as much of each.
        share = 1.0 / sums
        return Split(summing, [share] * len(summing), [share] * len(names), [None] * sums, None)
    told = [*_rates(places, of_rank, count), *switch_rates]
    known = [rate for rate in told if rate is not None]
    usual = min(known, default=RATE_UNKNOWN_BPS)
    links = [float(usual if rate is None else rate) for rate in told]
    firsts: dict[int, int] = {}
    for rank, machine in enumerate(of_rank):
        firsts.setdefault(machine, rank)
    called = [f"rank {firsts[machine]}'s machine" for machine in range(count)]
    here = [(called[i], True, own, links[i], links[i]) for i in range(count)]
    spare = zip(names, links[count:], strict=True)
    there = [(name, False, True, rate, rate) for name, rate in spare]
    plan = _fanin.plan([*here, *there])
    # Machines that may not sum have no share.
    shares = plan["shares"] if own else plan["shares"][count:]
    seconds = plan["seconds_per_byte"]
    lanes = [round(8 * share / seconds) or None for share in shares]
    # Ranks whose services get no share need not start them.
    used = [index for index in summing if shares[index] > 0]
    # Racks' links are not known, and those above them neither.
    is_planned = is_alike or not names
    # The share of one that sums alone is whole, however fast its link is.
    is_predicted = len(known) == len(told) if sums == 1 else bool(known)
    return Split(
        machines=used,
        own_shares=[shares[index] for index in used],
        switch_shares=shares[len(summing) :],
        rates_bps=[lanes[index] for index in used] + lanes[len(summing) :] if sums > 1 else [None],
        prediction=(seconds, plan["bound"]) if is_planned and is_predicted else None,
        links=_told([*called, *names], told) if is_planned and sums > 1 else None,
        is_assumed=is_planned and sums > 1 and len(known) < len(told) and bool(names or known),
    )


def _rates(places: Sequence[Place], of_rank: Sequence[int], count: int) -> list[int | None]:
    """Return what the machines' links were told to carry."""
    told: list[int | None] = [None] * count
    for place, machine in zip(places, of_rank, strict=True):
        told[machine] = _slower(told[machine], place.rate_bps)
    return told


def _told(names: Sequence[str], rates: Sequence[int | None]) -> str:
    """Say what links carry, and what is taken for those that tell nothing: for people."""
    known = sorted({rate for rate in rates if rate is not None})
    silent = [name for name, rate in zip(names, rates, strict=True) if rate is None]
    if not known:
        return "no link tells its rate: all are taken for equal"
    if not silent:
        ends = dict.fromkeys([known[0], known[-1]])
        return f"all tell their rates, {' to '.join(map(_shown, ends))}"
    named = ", ".join(silent[:NAMED_MAX])
    more = f" and {len(silent) - NAMED_MAX} more" if len(silent) > NAMED_MAX else ""
    tell = "tells" if len(silent) == 1 else "tell"
    return f"{named}{more} {tell} no rate: taken for {_shown(known[0])}, the slowest that is told"


def _shown(bps: int) -> str:
    return f"{bps / 1e9:g} Gbit/s"


def _slower(one: int | None, other: int | None) -> int | None:
    return min((rate for rate in (one, other) if rate is not None), default=None)


def is_loopback(address: str) -> bool:
    """Return whether each machine means itself by the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bracketed(address: str) -> str:
    """Return the address as it stands before a colon and a port."""
    return f"[{address}]" if ":" in address else address
