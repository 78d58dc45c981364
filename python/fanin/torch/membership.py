"""How the ranks of a torch group agree on a job and a switch, over the group's own store."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from fanin import _fanin
from fanin._join import check_rank, join, no_switch
from fanin._services import Place, Service, local_machines, machines, place, split
from fanin._settings import Settings
from fanin.errors import JoinTimeout, SwitchUnreachable
from fanin.torch import handshake
from fanin.torch.hosting import Hosted, host
from fanin.torch.interface import GLOO_VARIABLE, is_loopback, own_address, reachable

# What is kept of the job's name and of a group's: a name has 128 bytes on the switch.
JOB_BYTES_MAX = 80
GROUP_MAX = 24
# How long a service may take to be reached that is there, over TCP and over UDP, in seconds.
WAY_PATIENCE = 10.0
# Most pairs of machines that one error names.
NAMED_MAX = 4
# torch's name of the default group.
DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class Membership:
    """What all ranks of a group share."""

    job: str
    """Unique among all runs on all machines: it carries a random number of rank 0."""
    switch: str | None
    """Rank 0's switch, None if it has none: for ranks that were told of none."""
    store: Store
    """A part of the group's store that no other attempt uses."""
    group: str
    """The group's name."""

    def connect(self, settings: Settings, rank: int, world_size: int, timeout: float) -> Connected:
        """Join the job; blocks until all ranks have.

        Where ranks are to sum themselves, their services are started. Raises the errors of
        `fanin.errors`.
        """
        # A rank's own switch first: it may reach it by another address than rank 0.
        own = replace(settings, switch=settings.switch or self.switch)
        deadline = time.monotonic() + timeout

        def gather(name: str, text: str) -> list[str]:
            left = deadline - time.monotonic()
            with self.naming_absent(timeout):
                return handshake.gather(self.store, rank, world_size, name, text, left)

        here = place(own, own_address(self.store), asks=rank == 0)
        places = [Place.decode(text) for text in gather("place", here.encode())]
        hosted: Hosted | None = None
        local = self._share_memory(rank, local_machines(places), gather)
        try:
            if local is not None and len({place.machine for place in places}) == 1:
                left = max(deadline - time.monotonic(), 1.0)
                client = join(own, self.job, rank, world_size, left, [], local=local)
                client.set_timeout(timeout)
                return Connected(client, None)
            planned = split(places)
            if planned is None:
                raise SwitchUnreachable(no_switch())
            # A name of this machine that means itself says nothing to others.
            told, error = "", ""
            if rank in planned.hosts:
                try:
                    hosted = host(reachable(here, places))
                    told = hosted.address
                except OSError as cause:
                    error = f"rank {rank} cannot host a service: {cause}"
            addresses: list[str] = []
            if planned.hosts:
                answers = [json.loads(t) for t in gather("service", json.dumps([told, error]))]
                for _, wrong in answers:
                    if wrong:
                        raise SwitchUnreachable(wrong)
                addresses = [answers[host][0] for host in planned.hosts]
            switches = own.switch.split(",") if own.switch else []
            if len(switches) != len(planned.switch_shares):
                switches = places[0].switches[: len(planned.switch_shares)]
            services = planned.services(addresses, switches)
            if len(services) > 1:
                self._check_ways(rank, places, services, gather, deadline)
            left = max(deadline - time.monotonic(), 1.0)
            prediction = planned.prediction
            switch = hosted.switch if hosted is not None else None
            client = join(
                own, self.job, rank, world_size, left, services, prediction, local, switch
            )
            client.set_timeout(timeout)
            return Connected(client, hosted)
        except BaseException:
            if hosted is not None:
                hosted.release()
            if local is not None:
                local.close()
            raise

    def _check_ways(
        self,
        rank: int,
        places: Sequence[Place],
        services: Sequence[Service],
        gather: Callable[[str, str], list[str]],
        deadline: float,
    ) -> None:
        """Raise the same `SwitchUnreachable` on all ranks where a machine does not reach a service.

        One that a rank hosts is there; another one may still start, unless somebody reaches it.
        """
        of_rank = machines(places)
        asks = of_rank.index(of_rank[rank]) == rank
        others = [
            index
            for index, (_, _, _, owner) in enumerate(services)
            if asks and (owner is None or of_rank[owner] != of_rank[rank])
        ]
        patience = max(min(WAY_PATIENCE, (deadline - time.monotonic()) / 2), 1.0)

        def cut_off(index: int) -> str | None:
            return _fanin.cut_off(services[index][0], patience)

        with ThreadPoolExecutor(max(len(others), 1), "fanin-ways") as threads:
            found = dict(zip(others, threads.map(cut_off, others), strict=True))
        told: list[dict[str, str | None]] = [
            json.loads(t) for t in gather("ways", json.dumps(found))
        ]
        wrong = []
        for index, (address, _, _, owner) in enumerate(services):
            answers = {
                asked: way[str(index)] for asked, way in enumerate(told) if str(index) in way
            }
            if owner is None and all(answers.values()):
                continue  # it may still start: the join waits for it, and names it
            whose = "" if owner is None else f" of {_at(owner, places)}"
            wrong += [
                f"{_at(asked, places)} does not reach the service{whose} at {address} ({cause})"
                for asked, cause in answers.items()
                if cause is not None
            ]
        if wrong:
            more = f"; and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
            loopback = any(is_loopback(place.address) for place in places)
            hint = f". Set {GLOO_VARIABLE} to the interface to the others" if loopback else ""
            raise SwitchUnreachable(
                f"group {self.group!r}: {'; '.join(wrong[:NAMED_MAX])}{more}{hint}. Does a "
                "firewall between them let TCP and UDP through, both ways (docs/operations.md)?"
            )

    def _share_memory(
        self, rank: int, machines: list[int] | None, gather: Callable[[str, str], list[str]]
    ) -> _fanin.LocalRanks | None:
        """Return this machine's ranks if all machines' ranks sum among themselves first."""
        if machines is None:
            return None
        local, wrong = None, ""
        try:
            local = _fanin.LocalRanks(machines, rank, "fanin-" + re.sub(r"[^\w.-]", "-", self.job))
        except OSError as error:
            wrong = str(error)
            print(
                f"[fanin] rank {rank}: {error}; every rank sends its own gradients instead. Give "
                "/dev/shm more room (docker run --shm-size)",
                file=sys.stderr,
                flush=True,
            )
        if any(gather("memory", wrong)):
            if local is not None:
                local.close()
            return None
        return local

    @contextlib.contextmanager
    def naming_absent(self, waited: float) -> Iterator[None]:
        """Turn what the store lacks into an error that names the ranks."""
        try:
            yield
        except handshake.Absent as absent:
            raise JoinTimeout(
                f"group {self.group!r}: {_named(absent.ranks)} did not say within {waited:g} s "
                "where they are; did they end?",
                missing_ranks=absent.ranks,
                waited=waited,
            ) from None


@dataclass(frozen=True)
class Connected:
    """A rank in its job."""

    client: _fanin.Client
    hosted: Hosted | None
    """The service of this process, if it is one of those that sum."""

    def close(self) -> None:
        """Leave, and give the service back."""
        self.client.close()
        if self.hosted is not None:
            self.hosted.release()


def _at(rank: int, places: Sequence[Place]) -> str:
    place = places[rank]
    return f"rank {rank} on {place.name} ({place.address})"


def new_job(job: str | None, group: str) -> str:
    """Return a name that no other run has for the job of a group: "train/group-1#5f0c9a3e".

    `job` is the setting; without it the program's name is taken. `group` is the group's name.
    """
    name = (job or _program()).encode()[:JOB_BYTES_MAX].decode(errors="ignore")
    kept = re.sub(r"[^A-Za-z0-9_.-]", "_", group)[:GROUP_MAX]
    if re.fullmatch("[0-9a-f]+", kept):
        kept = f"group-{kept[:8]}"  # a number, or a hash of the ranks
    return f"{name}{'' if group == DEFAULT_GROUP else f'/{kept}'}#{secrets.token_hex(4)}"


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.stem == "__main__" else path.stem
    return name if name.isprintable() and name not in ("", "-c", "-m") else "python"


def agree(
    store: Store, rank: int, world_size: int, group: str, timeout: timedelta, settings: Settings
) -> Membership:
    """Rank 0 decides, all agree; returns once every rank of this attempt is there.

    Raises `fanin.errors.JoinTimeout` if some rank does not come in time, and `RankOutOfRange` where
    no switch would serve so many.
    """
    check_rank(rank, world_size)
    waited = timeout.total_seconds()

    def decide() -> tuple[str, str | None]:
        return new_job(settings.job, group), settings.switch

    try:
        terms = handshake.agree(store, rank, world_size, decide, waited)
    except handshake.Absent as absent:
        raise JoinTimeout(
            f"group {group!r}: {_named(absent.ranks)} did not join within {waited:g} s; does every "
            "rank make the same groups, in the same order?",
            missing_ranks=absent.ranks,
            waited=waited,
        ) from None
    agreed = PrefixStore(f"fanin/{terms.token}/", store)
    return Membership(terms.job, terms.switch, agreed, group)


def _named(ranks: list[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "some rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
