"""Who sums what of a job: the ranks' own services, named switches, and the plan over both.

Ranks tell each other where they are (`Place`), and each computes the same plan from what all said.
"""

from __future__ import annotations

import ipaddress
import json
import math
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, TypeAlias

from fanin import _fanin
from fanin._settings import ASSUMED, Plan, Settings
from fanin.errors import JoinRefused

# A switch, and so a service, sums for so many, which may be switches that sum for as many each.
PLACES_MAX: Final = 64
# The rate that is assumed if no link's rate is known.
RATE_UNKNOWN_BPS: Final = 10_000_000_000
# Rates of links, and sums of cores, that differ by less are taken for equal. A busy machine's vary
# by as much, and links that are not equal are mostly twice as fast.
ALIKE: Final = 1.7
ALIKE_SUMS: Final = 2.0
# Linux's number, which Python does not name.
SO_NETNS_COOKIE: Final = 71
# Most links that a line names.
NAMED_MAX: Final = 2

Service: TypeAlias = tuple[str, float, int | None, int | None]
"""An address, its share of all tensors, the bits a second that a rank and it speak at, and the rank
in whose process it is."""


@dataclass(frozen=True)
class Nic:
    """An interface that the user names for a machine."""

    interface: str
    address: str
    rate_bps: int | None
    """Its link's rate, if that is known."""
    wrong: str = ""
    """What keeps services from listening there, if anything does."""


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
    interface: str | None = None
    """The interface of its link, if that is known."""
    measures: bool = True
    """Whether links may be measured whose rates nobody tells."""
    cores: int | None = None
    """The cores that the rank may use, if that is known."""
    summed_bytes_per_s: int | None = None
    """The bytes that one of them sums."""
    switch_sums: list[int | None] = field(default_factory=list)
    """The bytes a second that the switches sum, once rank 0 has asked."""
    nics: list[Nic] = field(default_factory=list)
    """Its interfaces if the user names several, the first of which may be that of its address."""
    ways: list[str | None] = field(default_factory=list)
    """The address from which packets to each of the switches leave, if the user names several."""

    def nic(self, number: int) -> Nic | None:
        """Return the interface that has this number; None if there are not so many."""
        if self.nics:
            return self.nics[number] if number < len(self.nics) else None
        return Nic(self.interface or "", self.address, self.rate_bps) if number == 0 else None

    def encode(self) -> str:
        """Return a text from which `decode` makes it again."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Place:
        """Return what `encode` made a text of."""
        said = json.loads(text)
        return cls(**said | {"nics": [Nic(**nic) for nic in said["nics"]]})


@dataclass(frozen=True)
class Links:
    """What links carry in bits a second; None where that is not known."""

    machines: list[int | None]
    switches: list[int | None]
    """Those of rank 0's switches that a plan is for."""
    age_s: int = 0
    """How many seconds ago they were measured."""


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
    prediction: tuple[float, str, float] | None
    """The seconds to sum a byte, without headers, the link that takes so long, and the seconds that
    a ring of the machines takes. None if no link's rate is known, if ranks name different switches,
    and for one machine. A service that was told to sum alone has a prediction if all rates are
    known."""
    links: str | None = None
    """The rates that the links were told, those that were measured, and those that were assumed for
    the others; None if no share follows from them."""
    is_assumed: bool = False
    """Whether a share follows from something that nobody told, and that was not measured."""

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


def place(settings: Settings, address: str, nics: Sequence[Nic] = ()) -> Place:
    """Return where this rank is; `address` is this machine's, as far as is known.

    `nics` are its interfaces if the user names several.
    """
    switches = settings.switch.split(",") if settings.switch else []
    # Any port: nothing is sent.
    route = _fanin.route_to(switches[0] if switches else f"{bracketed(address)}:9")
    if switches and route is not None and is_loopback(address):
        # The store's way, or the machine's own name, leads nowhere; the one to the switch does.
        address = route[0]
    rate = settings.rate_bps
    if rate is None and route is not None:
        rate = route[2]
    # Only SwitchML's plan asks for them, and they take a moment to measure.
    cores, summed = _fanin.cores() if settings.protocol == "switchml" else (None, None)
    return Place(
        machine=machine(settings),
        name=settings.machine or socket.gethostname(),
        address=address,
        rate_bps=rate,
        switches=switches,
        switch_rates=[None] * len(switches),
        plan=settings.plan if settings.protocol == "switchml" else None,
        local=_local(settings),
        interface=None if route is None else route[1],
        measures=settings.rate != ASSUMED,
        cores=cores,
        summed_bytes_per_s=summed,
        nics=list(nics),
        ways=[_source(switch) for switch in switches] if nics else [],
    )


def _source(switch: str) -> str | None:
    route = _fanin.route_to(switch)
    return None if route is None else route[0]


def _local(settings: Settings) -> str | None:
    # Sub-models are parts of a model as each rank submits it. Ranks that are told unlike things
    # never sum for each other: they are refused as they join.
    told = (settings.protocol, settings.travels_as, settings.security, settings.loss_bound)
    return None if settings.sub_models else ", ".join(map(str, told))


def columns_max(settings: Settings) -> int | None:
    """Return how many ranks of a machine may speak for it; None is no limit.

    Each would be a job. The first job of GOAT takes the switches' memory, and one with a loss bound
    takes an eighth of it. The bound counts in whole packets of each part, and short parts have few.
    """
    return 1 if settings.protocol == "goat" or settings.loss_bound else None


def machine(settings: Settings) -> str:
    """Return a name that ranks have in common that can share memory, and an address."""
    if settings.machine is not None:
        return settings.machine
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            # Unlike the number in `machine_id`, no later network namespace has it.
            cookie = opened.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
    except OSError:  # Linux before 5.14
        cookie = b""
    return f"{_fanin.machine_id()}/{int.from_bytes(cookie, sys.byteorder):x}"


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


def _asked_to_sum(places: Sequence[Place]) -> tuple[bool, list[str]]:
    """Return whether rank 0 would have own services sum, and the switches that it would."""
    first = places[0]
    if not first.switches:
        return first.plan in ("auto", "own"), []
    if first.plan == "own":
        return True, []
    own = first.plan == "auto" and max(machines(places)) > 0
    return own and (_are_alike(places) or len(first.switches) > 1), first.switches


def sums_itself(places: Sequence[Place]) -> bool:
    """Return whether the machines' own services may sum."""
    own, _ = _asked_to_sum(places)
    return own and max(machines(places)) < PLACES_MAX


def told(places: Sequence[Place]) -> Links:
    """Return what the links were told to carry that a plan is for."""
    of_rank = machines(places)
    of_machines: list[int | None] = [None] * (max(of_rank) + 1)
    for place, machine in zip(places, of_rank, strict=True):
        of_machines[machine] = _slower(of_machines[machine], place.rate_bps)
    _, names = _asked_to_sum(places)
    known = _are_alike(places)
    return Links(of_machines, places[0].switch_rates if names and known else [None] * len(names))


def untold(places: Sequence[Place]) -> list[int]:
    """Return whose links are to be measured: machines, and switches, which count on from those.

    None if no share would follow from it, and on links that are no network's.
    """
    links, of_rank = told(places), machines(places)
    count = len(links.machines)
    own, names = _asked_to_sum(places)
    own = own and count <= PLACES_MAX
    is_planned = places[0].plan is not None and _are_alike(places)
    may_be = count > 1 and all(place.measures for place in places)
    if not (may_be and is_planned and own * count + len(names) > 1):
        return []
    # Several machines at one address are one, which somebody named as several.
    addresses = {places[of_rank.index(machine)].address for machine in range(count)}
    if len(addresses) < count or all(map(is_loopback, addresses)):
        return []
    rates = [*links.machines, *links.switches]
    is_here = [False] * count + [is_own(name) for name in names]
    return [i for i, rate in enumerate(rates) if rate is None and not is_here[i]]


def split(places: Sequence[Place], measured: Links | None = None) -> Split | None:
    """Return what takes the least time as rank 0 would have it; None if nobody may sum.

    A link of which nobody tells the rate, and that was not measured, is taken for as fast as the
    slowest that is known: a switch as fat as all machines together has to say so.

    Raises `fanin.errors.JoinRefused` where there are more machines than own services sum for.
    """
    of_rank = machines(places)
    count = max(of_rank) + 1
    own, names = _asked_to_sum(places)
    is_alike = _are_alike(places)
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
    if places[0].plan is None and sums > 1:
        lane = lane_bps([place.rate_bps for place in places], sums)
        return Split([], [], [1.0 / sums] * sums, [lane] * sums, None)
    rates = _Rates.of(told(places), measured)
    known = [rate for rate in rates.known if rate is not None]
    usual = min(known, default=RATE_UNKNOWN_BPS)
    links = [float(usual if rate is None else rate) for rate in rates.known]
    is_known = len(known) == len(links)
    firsts: dict[int, int] = {}
    for rank, machine in enumerate(of_rank):
        firsts.setdefault(machine, rank)
    called = [f"rank {firsts[machine]}'s machine" for machine in range(count)]
    # A rate that nobody knows is no limit that cores could be held against.
    sums_bps = _summed(places, of_rank, len(names)) if is_known else [math.inf] * len(links)
    cluster = zip([*called, *names], links, sums_bps, strict=True)
    plan = _fanin.plan(
        [
            (name, i < count, own or i >= count, rate, rate, summed)
            for i, (name, rate, summed) in enumerate(cluster)
        ]
    )
    # Machines that may not sum have no share.
    shares = plan["shares"] if own else plan["shares"][count:]
    seconds = plan["seconds_per_byte"]
    lanes = [round(8 * share / seconds) or None for share in shares]
    # Ranks whose services get no share need not start them.
    used = [index for index in summing if shares[index] > 0]
    # Racks' links are not known, and those above them neither.
    is_planned = is_alike or not names
    # The share of one that sums alone is whole, however fast its link is.
    is_predicted = is_known if sums == 1 else bool(known)
    return Split(
        machines=used,
        own_shares=[shares[index] for index in used],
        switch_shares=shares[len(summing) :],
        rates_bps=[lanes[index] for index in used] + lanes[len(summing) :] if sums > 1 else [None],
        prediction=(seconds, plan["bound"], plan["ring"]) if is_planned and is_predicted else None,
        links=rates.shown([*called, *names]) if is_planned and sums > 1 else None,
        is_assumed=is_planned and sums > 1 and not is_known and bool(names or known),
    )


def lane_bps(links: Sequence[int | None], sums: int) -> int:
    """Return what each of so many services with equal shares has of the slowest of the links."""
    known = [rate for rate in links if rate is not None]
    return max(min(known, default=RATE_UNKNOWN_BPS) // sums, 1)


def _summed(places: Sequence[Place], of_rank: Sequence[int], switches: int) -> list[float]:
    """Return the bytes a second that machines and switches sum, as far as it is known.

    The free cores of a machine sum: those that no rank of it has, and at least one.
    """
    sums: list[int | None] = []
    for machine in range(max(of_rank) + 1):
        here = [place for place, at in zip(places, of_rank, strict=True) if at == machine]
        cores = [place.cores for place in here if place.cores is not None]
        core = [place.summed_bytes_per_s for place in here if place.summed_bytes_per_s is not None]
        is_known = len(cores) == len(core) == len(here)
        sums.append(min(core) * max(min(cores) - len(here), 1) if is_known else None)
    of_switches = places[0].switch_sums if _are_alike(places) else []
    sums += of_switches[:switches] + [None] * (switches - len(of_switches))
    return [math.inf if each is None else float(each) for each in levelled(sums, ALIKE_SUMS)]


def levelled(figures: Sequence[int | None], alike: float = ALIKE) -> list[int | None]:
    """Take figures that hardly differ for equal, so that equal machines have equal shares."""
    # Three digits, as they are shown.
    short = [None if figure is None else int(float(f"{figure:.3g}")) for figure in figures]
    levels: list[list[int]] = []
    for figure in sorted((figure for figure in short if figure is not None), reverse=True):
        if levels and figure * alike >= levels[-1][0]:
            levels[-1].append(figure)
        else:
            levels.append([figure])
    level_of = {figure: level[len(level) // 2] for level in levels for figure in level}
    return [None if figure is None else level_of[figure] for figure in short]


@dataclass(frozen=True)
class _Rates:
    """What links were told to carry, and what those that were told nothing were measured to."""

    told: list[int | None]
    measured: list[int | None]
    age_s: int

    @classmethod
    def of(cls, told: Links, measured: Links | None) -> _Rates:
        rates = [*told.machines, *told.switches]
        found = [*measured.machines, *measured.switches] if measured else [None] * len(rates)
        pairs = zip(rates, found, strict=True)
        found = [found if rate is None else None for rate, found in pairs]
        return cls(rates, found, measured.age_s if measured else 0)

    @property
    def known(self) -> list[int | None]:
        return [
            found if rate is None else rate
            for rate, found in zip(self.told, self.measured, strict=True)
        ]

    def shown(self, names: Sequence[str]) -> str:
        """Say what links carry, and what is taken for those that tell nothing: for people."""

        def of(rates: Sequence[int | None]) -> list[str]:
            return [name for name, rate in zip(names, rates, strict=True) if rate is not None]

        tell, measured, known = of(self.told), of(self.measured), of(self.known)
        parts = []
        were = f"measured{_ago(self.age_s)}, {_range(self.measured)}" if measured else ""
        if len(measured) == len(names):
            parts.append(f"all links were {were}")
        elif measured:
            parts.append(f"{_listed(measured)} {'was' if len(measured) == 1 else 'were'} {were}")
        silent = [name for name in names if name not in known]
        if tell and not silent:
            who = "the others" if measured else "all"
            parts.append(f"{who} tell their rates, {_range(self.told)}")
        if not known:
            parts.append("no link tells its rate: all are taken for equal")
        elif silent:
            tells = "tells" if len(silent) == 1 else "tell"
            slowest = shown(min(rate for rate in self.known if rate is not None))
            slowest += f", the slowest that is {'known' if measured else 'told'}"
            parts.append(f"{_listed(silent)} {tells} no rate: taken for {slowest}")
        return "; ".join(parts)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _range(rates: Sequence[int | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    return " to ".join(dict.fromkeys([shown(min(known)), shown(max(known))]))


def _ago(seconds: int) -> str:
    """Say how long ago something was; nothing if it was just now."""
    if seconds < 60:
        return ""
    return f" {seconds // 60} min ago" if seconds < 3600 else f" {seconds // 3600} h ago"


def shown(bps: int) -> str:
    """Return a rate for people."""
    return f"{bps / 1e9:.3g} Gbit/s"


def _slower(one: int | None, other: int | None) -> int | None:
    return min((rate for rate in (one, other) if rate is not None), default=None)


def is_loopback(address: str) -> bool:
    """Return whether each machine means itself by the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bracketed(address: str) -> str:
    """Return the address as it stands before a colon and a port."""
    return f"[{address}]" if ":" in address else address


def is_own(switch: str) -> bool:
    """Return whether each machine means one of its own by the switch, "host:port"."""
    host = switch.rpartition(":")[0].strip("[]")
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"
