"""How the ranks of a job find out who sums what, and join.

Before a job begins, its ranks say a few things to each other, in rounds: where they are, whether
their machine's memory can be had, where their services listen, whom they reach. What carries the
rounds is the caller's: torch's groups have a store, `fanin.connect` a switch.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fanin import _fanin
from fanin._hosting import Hosted, host
from fanin._join import join, no_switch
from fanin._planes import Part, agreed, divided, nics, summary
from fanin._rates import measured
from fanin._services import (
    Place,
    Service,
    Split,
    asked,
    bracketed,
    columns,
    columns_max,
    is_loopback,
    is_own,
    local_machines,
    machines,
    place,
)
from fanin._settings import Settings
from fanin.errors import SwitchUnreachable, Untrusted

log = logging.getLogger(__name__)

# How long a service may take to be reached that is there, over TCP and over UDP, in seconds.
WAY_PATIENCE = 10.0
# Most pairs of machines that one error names, and characters of what keeps one from the other.
NAMED_MAX = 4
CAUSE_MAX = 200

# The advice to a user with a link of unknown rate.
_CURE = "Say what they carry: FANIN_RATE=1gbit to ranks, --rate 1gbit to `fanin switch`"

_said: set[str] = set()

Gather: TypeAlias = Callable[[str, str, float], list[str]]
"""``gather(round, text, seconds)``: what each rank says in that round, in the order of the ranks.

Raises `fanin.errors.JoinTimeout`, which names who said nothing."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, before it begins."""

    job: str
    """Its name at the services."""
    name: str
    """The name of the machines' shared memory: no other attempt at any job has it."""
    who: str
    """The job's name in errors, such as "group 'train'"."""
    rank: int
    world_size: int
    address: str
    """This machine's address, as the others reach it, as far as is known."""
    cure: str
    """The cure if that address means itself on every machine."""
    gather: Gather
    trust: _fanin.Trust
    """By what services are known."""
    meeting: _fanin.Meeting | None = None
    """The meeting, if it is at a switch: it tells ranks that join who began anew."""
    look: Callable[[], None] | None = None
    """Called now and then while they join; what it raises ends that."""
    tell: Callable[[BaseException], None] | None = None
    """Called with what ends this rank's joining, before others miss its service."""
    measures_anew: bool = False
    """Whether figures of links from before count for nothing."""

    def connect(self, settings: Settings, timeout: float, deadline: float) -> Connected:
        """Join the job; blocks until all ranks have, until `deadline` (`time.monotonic`) at most.

        Where ranks are to sum themselves, their services are started. `timeout` is that of each
        all-reduce, in seconds. Raises the errors of `fanin.errors`.
        """
        rank = self.rank

        def left() -> float:
            return max(deadline - time.monotonic(), 1.0)

        def gather(name: str, text: str) -> list[str]:
            return self.gather(name, text, deadline - time.monotonic())

        here = place(settings, self.address, nics(settings))
        places = [Place.decode(text) for text in gather("place", here.encode())]
        if asked(places):
            asks = asked(places) if rank == 0 else []
            told = gather("rates", json.dumps([self._capacity(at, deadline) for at in asks]))
            rates, sums = (list(each) for each in zip(*json.loads(told[0]), strict=True))
            places[0] = replace(places[0], switch_rates=rates, switch_sums=sums)
        of_rank = machines(places)
        hosted: list[Hosted] = []
        local = self._share_memory(local_machines(places), columns_max(settings), gather)

        # If the ranks of a machine do not sum among themselves, they share its link.
        crowd = 1 if local is not None else max(Counter(of_rank).values())

        def enter(
            services: Sequence[Service],
            planned: Split | None = None,
            hosted: _fanin.Switch | None = None,
        ) -> _fanin.Client:
            client = join(
                settings,
                self.job,
                rank,
                self.world_size,
                left(),
                services,
                planned,
                local,
                hosted,
                self.meeting,
                (here.rate_bps, crowd),
                self.look,
                self.trust,
            )
            client.set_timeout(timeout)
            return client

        try:
            if local is not None and max(of_rank) == 0:
                return Connected(enter([]), here.address)
            planes, unused = agreed(places, rank, gather)
            found = [
                measured(
                    plane.places,
                    rank,
                    reachable(plane.places[rank], plane.places),
                    self.trust,
                    plane.gather(gather),
                    anew=self.measures_anew,
                )
                for plane in planes
            ]
            parts = divided(planes, found)
            if parts is None:
                raise SwitchUnreachable(no_switch())
            planned = summary(parts)
            if rank == 0:
                for wrong in unused:
                    say_once(wrong)
                for wrong in [wrong for each in found if each is not None for wrong in each.wrong]:
                    say_once(f"{wrong}. {_CURE}, or let UDP through between the machines")
                is_uneven = any(each is not None and each.is_uneven for each in found)
                if planned.is_assumed or is_uneven:
                    say_once(f"{planned.links}. If that is not so, {_CURE[0].lower()}{_CURE[1:]}")
            jobs = columns(of_rank)[: columns_max(settings) if local is not None else 1]
            # A rank beyond the columns sends nothing to a service.
            mine = next((column for column in jobs if rank in column), jobs[0])
            addresses = [self._host(part, mine, settings, gather, hosted) for part in parts]
            switches = settings.switch.split(",") if settings.switch else []
            if len(switches) != len(places[0].switches):
                switches = places[0].switches

            def services(column: Sequence[int]) -> list[Service]:
                return [
                    service
                    for part, at in zip(parts, addresses, strict=True)
                    for service in part.services(column, at, switches)
                ]

            if len(services(mine)) > 1:
                # An obstacle between two machines is between all of their columns.
                self._check_ways(places, services(jobs[0]), settings, gather, deadline)
            # A rank lives on the threads of one service.
            switch = hosted[0].switch if hosted else None
            interfaces = [
                here.nics[plane.number].interface
                for plane in planes
                if here.nics and plane.is_named
            ]
            address = reachable(here, places)
            connected = Connected(
                enter(services(mine), planned, switch), address, hosted, interfaces
            )
            self._compare_keys(places, here, connected, gather)
            return connected
        except BaseException as error:
            if self.tell is not None:
                self.tell(error)
            for each in hosted:
                each.release()
            if local is not None:
                local.close()
            raise

    def _host(
        self,
        part: Part,
        column: Sequence[int],
        settings: Settings,
        gather: Callable[[str, str], list[str]],
        hosted: list[Hosted],
    ) -> list[str]:
        """Return the addresses of the ranks' services in a plane; this rank's is added to `hosted`.

        Raises `SwitchUnreachable` on all ranks if a rank cannot host its service.
        """
        rank, places = self.rank, part.plane.places
        listens, key, error = "", "", ""
        if rank in part.split.hosts(column):
            try:
                # A name of this machine that means itself says nothing to others.
                own = host(reachable(places[rank], places), settings.secret_file)
                hosted.append(own)
                listens, key = own.address, own.switch.fingerprint
            except OSError as cause:
                error = f"rank {rank} cannot host a service: {cause}"
        if not part.split.machines:
            return [""] * self.world_size
        said = json.dumps([listens, key, error])
        answers = [json.loads(text) for text in part.plane.gather(gather)("service", said)]
        for *_, wrong in answers:
            if wrong:
                raise SwitchUnreachable(wrong)
        for address, seen, _ in answers:
            if address:
                # So nobody else can be taken for it, whoever has its address later.
                self.trust.insist(address, seen)
        return [address for address, *_ in answers]

    def _capacity(self, switch: str, deadline: float) -> tuple[int | None, int | None]:
        left = deadline - time.monotonic()
        # Other ranks' time may be over sooner, and all are to hear the answer.
        left = max(left - min(left / 4, WAY_PATIENCE), 1.0)
        trust, look = self.trust, self.look
        return _fanin.switch_capacity(switch, left, rank=self.rank, look=look, trust=trust)

    def _check_ways(
        self,
        places: Sequence[Place],
        services: Sequence[Service],
        settings: Settings,
        gather: Callable[[str, str], list[str]],
        deadline: float,
    ) -> None:
        """Raise the same `SwitchUnreachable` on all ranks where a machine does not reach a service.

        One that a rank hosts is there; another one may still start, unless somebody reaches it.
        """
        of_rank, rank = machines(places), self.rank
        asks = of_rank.index(of_rank[rank]) == rank
        others = [
            index
            for index, (_, _, _, owner) in enumerate(services)
            if asks and (owner is None or of_rank[owner] != of_rank[rank])
        ]
        patience = max(min(WAY_PATIENCE, (deadline - time.monotonic()) / 2), 1.0)

        def cut_off(index: int) -> str | None:
            return _fanin.cut_off(services[index][0], patience, self.trust, settings.security)

        with ThreadPoolExecutor(max(len(others), 1), "fanin-ways") as threads:
            causes = dict(zip(others, threads.map(cut_off, others), strict=True))
        found = [(index, cause[:CAUSE_MAX]) for index, cause in causes.items() if cause is not None]
        # Beyond these nobody is told why.
        found = found[:NAMED_MAX] + [(index, "") for index, _ in found[NAMED_MAX:]]
        told: list[dict[int, str]] = [
            dict(json.loads(text)) for text in gather("ways", json.dumps(found))
        ]
        wrong = []
        for index, (address, _, _, owner) in enumerate(services):
            answers = {asked: way[index] for asked, way in enumerate(told) if index in way}
            if owner is None and len(answers) == max(of_rank) + 1:
                continue  # it may still start: the join waits for it, and names it
            whose = "" if owner is None else f" of {_at(owner, places)}"
            wrong += [
                f"{_at(asked, places)} does not reach the service{whose} at {address} ({cause})"
                for asked, cause in answers.items()
            ]
        if wrong:
            more = f"; and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
            loopback = any(is_loopback(place.address) for place in places)
            hint = f". {self.cure}" if loopback else ""
            raise SwitchUnreachable(
                f"{self.who}: {'; '.join(wrong[:NAMED_MAX])}{more}{hint}. Does a "
                "firewall between them let TCP and UDP through, both ways (docs/operations.md)?"
            )

    def _compare_keys(
        self,
        places: Sequence[Place],
        here: Place,
        connected: Connected,
        gather: Callable[[str, str], list[str]],
    ) -> None:
        """Raise the same `Untrusted` on all ranks where a switch showed them different keys.

        Then somebody stands between it and some of them. At a switch nobody needs to ask: who
        stands between it and a rank would answer, too.
        """
        if self.meeting is not None or not any(place.switches for place in places):
            return
        seen = {
            switch: key
            for switch in here.switches
            # A loopback address is another service on each machine.
            if not is_own(switch) and (key := self.trust.fingerprint(switch)) is not None
        }
        try:
            told: list[dict[str, str]] = [
                json.loads(text) for text in gather("keys", json.dumps(seen))
            ]
            keys: dict[str, dict[str, int]] = {}
            for rank, by_switch in enumerate(told):
                for switch, key in by_switch.items():
                    keys.setdefault(switch, {}).setdefault(key, rank)
            for switch, ranks in keys.items():
                if len(ranks) > 1:
                    showed = " and ".join(f"{key} to rank {rank}" for key, rank in ranks.items())
                    raise Untrusted(
                        f"{self.who}: {switch} showed the key {showed}: somebody may stand in "
                        "between, or the name leads to different switches. Give all ranks and the "
                        "switch the same secret (FANIN_SECRET_FILE), or the switch a certificate "
                        "(docs/security.md)",
                        switch=switch,
                    )
        except BaseException:
            connected.client.close()
            raise

    def _share_memory(
        self,
        machines: list[int] | None,
        columns_max: int | None,
        gather: Callable[[str, str], list[str]],
    ) -> _fanin.LocalRanks | None:
        """Return this machine's ranks if all machines' ranks sum among themselves first."""
        if machines is None:
            return None
        local, wrong = None, ""
        name = "fanin-" + re.sub(r"[^\w.-]", "-", self.name)
        try:
            local = _fanin.LocalRanks(machines, self.rank, name, columns_max)
        except OSError as error:
            wrong = str(error)
            log.warning(
                "[fanin] rank %d: %s; every rank sends its own gradients instead. Give /dev/shm "
                "more room (docker run --shm-size)",
                self.rank,
                error,
            )
        shared = False
        try:
            shared = not any(gather("memory", wrong))
        finally:
            if local is not None and not shared:
                local.close()
        return local if shared else None


@dataclass(frozen=True)
class Connected:
    """A rank in its job."""

    client: _fanin.Client
    address: str = ""
    """This machine's, as the other ranks reach it; empty where they did not meet."""
    hosted: list[Hosted] = field(default_factory=list)
    """The services of this process, if some of those that sum are in it."""
    interfaces: list[str] = field(default_factory=list)
    """This machine's interfaces that are used, if the user names several."""

    def release(self) -> None:
        """Give the services back."""
        for service in self.hosted:
            service.release()

    def close(self) -> None:
        """Leave, and give the services back."""
        self.client.close()
        self.release()


def say_once(text: str) -> None:
    """Say once a process on what the plan of rank 0 rests that nobody told."""
    if text not in _said:
        _said.add(text)
        print(f"fanin: rank 0: {text}", file=sys.stderr, flush=True)


def _at(rank: int, places: Sequence[Place]) -> str:
    place = places[rank]
    return f"rank {rank} on {place.name} ({place.address})"


def reachable(here: Place, places: Sequence[Place]) -> str:
    """Return this machine's address for the others: not one that means itself to each of them."""
    if not is_loopback(here.address):
        return here.address
    for other in places:
        if other.machine != here.machine and not is_loopback(other.address):
            route = _fanin.route_to(f"{bracketed(other.address)}:9")
            if route is not None:
                return route[0]
    return here.address
