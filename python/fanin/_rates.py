"""What links carry that nobody tells: measured by the ranks as they join, and agreed on by all.

A machine's first rank fills the next machine's link, all of them at once: so each link carries one
flow in each direction, and a flow is as fast as the slower of its two links. A machine that seems
slow is tried again, as it may have been busy. If no link could be measured, all are tried again.
Then all machines fill the links of switches that tell no rate. That takes about a second. What was
measured is known to the process from then on, and to others of its user for a day
(`_kept_rates.py`). A link that cannot be measured ends no joining: it is named with the cause, and
the plan is made without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final, TypeAlias

from fanin import _fanin, _kept_rates
from fanin._kept_rates import Figure
from fanin._services import (
    ALIKE,
    RATE_UNKNOWN_BPS,
    Links,
    Place,
    bracketed,
    levelled,
    machines,
    shown,
    told,
    untold,
)
from fanin.errors import FaninError

# How long one phase fills links, in seconds. There are five at most.
PHASE: Final = 0.25
# How long a gauge is open: for all phases, and for ranks that come late to the first.
LIFE: Final = 5.0
# How long a switch may take to open one.
PATIENCE: Final = 1.0
# The most bytes on the way to one gauge, and the fewest that each of its senders may have there.
WINDOW: Final = 512_000
WINDOW_MIN: Final = 24_000
# Phases that switches are measured in: of more than so many, several at once.
SWITCH_PHASES: Final = 2
# A rate that is so many times what was told of the same flow is nonsense.
NONSENSE: Final = 10
# A faster link counts as fast as this: above it, the cores of a busy machine are measured.
RATE_MAX: Final = RATE_UNKNOWN_BPS
# Measured links of machines that differ by more are told, as equal ones are what most people have.
UNEVEN: Final = 2
CAUSE_MAX: Final = 200

Flow: TypeAlias = tuple[int, int]
"""The machine that sends, and the one that receives; those beyond the machines are switches."""
Port: TypeAlias = tuple[str, int, int]
"""The address and port of a gauge, and its ticket."""

_known: dict[str, Figure] = {}
"""What this process's groups measured of each link, or read of it."""


@dataclass
class Measured:
    """What was measured: the same on every rank."""

    links: Links
    wrong: list[str] = field(default_factory=list)
    """What could not be measured, and why: for people."""

    @property
    def is_uneven(self) -> bool:
        """Whether machines' links differ much: they may, and one may have been busy instead."""
        found = [rate for rate in self.links.machines if rate is not None]
        return bool(found) and max(found) > UNEVEN * min(found)


def measured(
    places: Sequence[Place],
    rank: int,
    address: str,
    trust: _fanin.Trust,
    gather: Callable[[str, str], list[str]],
    anew: bool = False,
) -> Measured | None:
    """Measure the links that a plan needs and that nobody told; None if there are none.

    `address` is this machine's, as the others reach it. If one rank asks for it `anew`, no figure
    from before counts. Each rank calls it, and all return the same. Raises what `gather` raises,
    and nothing else.
    """
    unknown = untold(places)
    if not unknown:
        return None
    network = _Network.of(places, unknown)
    links = [network.link(index) for index in unknown]
    known = {} if anew else _remembered(links)
    words = gather("rates known", _told_of(known))
    if words[0] and len({word.partition(" ")[0] for word in words}) == 1:
        _known.update(known)
        figures = {index: known[network.link(index)].rate_bps for index in unknown}
        # The age is rank 0's word, as the others' clocks differ.
        return Measured(replace(network.carried(figures), age_s=int(words[0].partition(" ")[2])))
    with ExitStack() as stack:
        ports = _opened(network, rank, address, trust, stack)
        said = [json.loads(text) for text in gather("gauges", json.dumps(ports))]
        opened: dict[str, Port | str] = {name: at for each in said for name, at in each.items()}
        rates: dict[Flow, int] = {}
        causes: dict[Flow, str] = {}
        for number, phase in enumerate(network.phases(rates)):
            flows = [flow for flow in phase if network.firsts[flow[0]] == rank]
            filled = json.dumps(_filled(network, flows, number, opened))
            for text in gather(f"rates {number}", filled):
                for sender, receiver, rate, cause in json.loads(text):
                    flow = sender, receiver
                    if cause:
                        causes.setdefault(flow, cause)
                    else:
                        rates[flow] = max(rate, rates.get(flow, 0))
    found = network.judged(rates, causes)
    carried, now = [*found.links.machines, *found.links.switches], int(time.time())
    measured = {network.link(index): Figure(carried[index], now) for index in unknown}
    _known.update(measured)
    if rank in network.firsts:
        _kept_rates.keep(measured)
    return found


def _remembered(links: Sequence[str]) -> dict[str, Figure]:
    """Return the figures of these links from before; none if one is missing."""
    known = _known if all(link in _known for link in links) else {**_kept_rates.read(), **_known}
    found = {link: known[link] for link in links if link in known}
    return found if len(found) == len(links) else {}


def _told_of(known: Mapping[str, Figure]) -> str:
    """Return a fingerprint of figures, and the seconds since the oldest was measured."""
    if not known:
        return ""
    # All ranks' words have little room: no figures.
    rates = json.dumps([figure.rate_bps for figure in known.values()])
    age = max(int(time.time()) - min(figure.at for figure in known.values()), 0)
    return f"{sha256(rates.encode()).hexdigest()[:16]} {age}"


def _opened(
    network: _Network, rank: int, address: str, trust: _fanin.Trust, stack: ExitStack
) -> dict[str, Port | str]:
    """Open the gauges of this rank's machine, and as rank 0 those of the switches."""
    ports: dict[str, Port | str] = {}
    if rank == 0 and network.switches:
        # At once, and first: the gauges of others are not open for long.
        with ThreadPoolExecutor(len(network.switches), "fanin-rates") as threads:
            at = threads.map(
                lambda switch: _at_switch(network.names[switch], trust), network.switches
            )
            ports.update(zip(map(str, network.switches), at, strict=True))
    if rank in network.firsts:
        for number in range(len(network.rings) + 1) if network.rings else ():
            name = f"{network.firsts.index(rank)} {number}"
            try:
                gauge = _fanin.Gauge(address, LIFE)
                stack.callback(gauge.close)
                ports[name] = address, gauge.port, gauge.ticket
            except (OSError, ValueError) as error:
                ports[name] = f"it cannot open a port at {address}: {error}"[:CAUSE_MAX]
    return ports


def _at_switch(name: str, trust: _fanin.Trust) -> Port | str:
    """Have a switch open a gauge."""
    try:
        port, ticket = _fanin.gauge_at(name, PATIENCE, trust)
    except FaninError as error:  # whatever it is, a plan can do without
        return str(error)[:CAUSE_MAX]
    return name.rpartition(":")[0].strip("[]"), port, ticket


def _filled(
    network: _Network, flows: Sequence[Flow], phase: int, opened: Mapping[str, Port | str]
) -> list[tuple[int, int, int, str]]:
    """Send these flows, and return of each the rate, or what went wrong."""

    def fill(flow: Flow) -> tuple[int, int, int, str]:
        sender, receiver = flow
        is_switch = receiver in network.switches
        at = opened.get(f"{receiver}" if is_switch else f"{receiver} {phase}", "")
        if isinstance(at, str):
            return sender, receiver, 0, at or "it opened no port"
        host, port, ticket = at
        window = max(WINDOW // network.count, WINDOW_MIN) if is_switch else WINDOW
        try:
            rate = _fanin.fill(f"{bracketed(host)}:{port}", ticket, PHASE, window)
        except OSError as error:
            return sender, receiver, 0, f"{error}"[:CAUSE_MAX]
        return sender, receiver, rate, ""

    try:
        with ThreadPoolExecutor(max(len(flows), 1), "fanin-rates") as threads:
            return list(threads.map(fill, flows))
    except RuntimeError as error:
        # No thread can be started. The others wait for what this rank says.
        return [(*flow, 0, f"{error}"[:CAUSE_MAX]) for flow in flows]


@dataclass(frozen=True)
class _Network:
    """Whose links are measured, and by which flows."""

    places: Sequence[Place]
    unknown: list[int]
    firsts: list[int]
    """The first rank of each machine."""
    told: list[int | None]
    """What the links were told to carry: those of machines, then those of switches."""
    switches: list[int]
    """Those of the unknown that are switches."""
    rings: list[int]
    """How many machines further the one is that a machine sends to, in each ring."""

    @classmethod
    def of(cls, places: Sequence[Place], unknown: list[int]) -> _Network:
        of_rank, links = machines(places), told(places)
        count = max(of_rank) + 1
        switches = [index for index in unknown if index >= count]
        # A fast machine between two slow ones has other neighbours in a second ring.
        rings = [] if switches == unknown else [1] if count < 4 else [1, 2]
        firsts = [of_rank.index(machine) for machine in range(count)]
        return cls(places, unknown, firsts, [*links.machines, *links.switches], switches, rings)

    @property
    def count(self) -> int:
        return len(self.firsts)

    @property
    def names(self) -> dict[int, str]:
        return dict(enumerate(self.places[0].switches, self.count))

    def phases(self, rates: Mapping[Flow, int]) -> Iterator[list[Flow]]:
        """Yield the flows that are at once: of each ring, of the slow, and to some of the switches.

        `rates` has what the flows came to that were yielded before.
        """
        for ring in self.rings:
            yield self._ring(ring)
        if self.rings and (again := self._of_slow(rates)):
            yield again
        at_once = -(-len(self.switches) // SWITCH_PHASES) or 1
        for begin in range(0, len(self.switches), at_once):
            some = self.switches[begin : begin + at_once]
            yield [(machine, switch) for switch in some for machine in range(self.count)]

    def _ring(self, further: int) -> list[Flow]:
        """Return a flow from each machine to the one that is so many further."""
        return [(machine, (machine + further) % self.count) for machine in range(self.count)]

    def _of_slow(self, rates: Mapping[Flow, int]) -> list[Flow]:
        """Return flows between each machine that seems slow and a fast one.

        If most are slow, they are not all busy, and there are none. If no flow at all was
        measured, all are tried again: a busy machine may have kept the others from being measured.
        """
        best = [0] * self.count
        for flow, rate in rates.items():
            for end in flow:
                best[end] = max(best[end], min(rate, RATE_MAX))
        if not any(best):
            return self._ring(1)
        is_slow = [ALIKE * rate < max(best) for rate in best]
        slow = [machine for machine in range(self.count) if is_slow[machine]]
        fast = [machine for machine in range(self.count) if not is_slow[machine]]
        pairs = zip(slow, fast, strict=False) if len(slow) <= len(fast) else ()
        return [flow for one, other in pairs for flow in ((one, other), (other, one))]

    def judged(self, rates: Mapping[Flow, int], causes: Mapping[Flow, str]) -> Measured:
        """Return what follows from the flows; a figure that cannot be is none."""
        causes = dict(causes)
        found: list[int | None] = [None] * len(self.told)
        for flow, rate in rates.items():
            receiver = flow[1]
            most = self._most(flow)
            if most is not None and rate > NONSENSE * most:
                causes[flow] = (
                    f"{shown(rate)} arrived where {shown(most)} were told, which cannot be"
                )
                continue
            # A switch tells what all machines send, which is none of their rates.
            for end in [receiver] if receiver in self.switches else flow:
                found[end] = max(rate, found[end] or 0)
        wrong = []
        for index in self.unknown:
            if found[index] is None:
                # The flow that it received says most of its link; of those it sent, any does.
                flows = sorted(causes, key=lambda flow: (flow[1] != index, flow))
                cause = next((causes[flow] for flow in flows if index in flow), "nobody tried")
                wrong.append(f"{self._named(index)} could not be measured: {cause}")
        return Measured(self.carried({index: found[index] for index in self.unknown}), wrong)

    def carried(self, figures: Mapping[int, int | None]) -> Links:
        """Return what links carry, by figures of some of them."""
        found = [figures.get(index) for index in range(len(self.told))]
        links = levelled([None if rate is None else min(rate, RATE_MAX) for rate in found])
        return Links(links[: self.count], links[self.count :])

    def link(self, index: int) -> str:
        """Return a name of the link that it has in every group."""
        if index >= self.count:
            return self.names[index]
        place = self.places[self.firsts[index]]
        return f"{place.machine} {place.address}"

    def _most(self, flow: Flow) -> int | None:
        """Return the bits a second that a flow has at most, by what is told of its ends."""
        if flow[1] not in self.switches:
            return min((told for end in flow if (told := self.told[end]) is not None), default=None)
        # It tells what all machines send.
        of_machines = [told for told in self.told[: self.count] if told is not None]
        return sum(of_machines) if len(of_machines) == self.count else None

    def _named(self, index: int) -> str:
        if index >= self.count:
            return f"the link of {self.names[index]}"
        place = self.places[self.firsts[index]]
        interface = f", {place.interface}" if place.interface else ""
        return f"the link of rank {self.firsts[index]}'s machine ({place.name}{interface})"
