"""The services that keep a `DeltaOptimizer`'s parameters: named ones, or those of the ranks.

A service in a rank's process is BytePS's on a machine that trains, and a spare machine's service is
its on a CPU machine (§4.1). An asynchronous exchange loads links as a sum does: a service with the
share x moves n x M on a spare machine in each direction, and M + (n - 2) x M on a machine that
trains. So the shares are those of Eqs. 1 and 2, by the planner of sums (`crates/plan`).

Absent: another rank that takes over what a dead rank kept. Ranks have parameters of unlike age.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from fanin import _fanin
from fanin._failures import tellable
from fanin._membership import reachable
from fanin._services import RATE_UNKNOWN_BPS, Place, bracketed, machines, place
from fanin._settings import Settings
from fanin.torch.backend.fanin_backend import FaninBackend
from fanin.torch.patches import splitting
from fanin.torch.rendezvous.interface import own_address

T = TypeVar("T")

# Ports that the operating system chooses.
ANY_PORT: Final = 0


class Service(NamedTuple):
    """A service that keeps a part of the parameters."""

    address: str
    """Its host:port."""
    share: float
    """Its share of the parameters, of those of all services."""
    rank: int | None = None
    """The rank in whose process it is."""


def named(services: str) -> list[str]:
    """Return the services that a text names."""
    return [service.strip() for service in services.split(",")]


def equal(addresses: Sequence[str]) -> list[Service]:
    """Return services of `fanin parameters` that share the parameters in equal parts."""
    return [Service(address, 1.0) for address in addresses]


def hosted(
    group: distributed.ProcessGroup, spares: Sequence[str], keys: Sequence[bytes]
) -> tuple[list[Service], _fanin.ParameterService | None]:
    """Have one rank a machine host a service; return all services, and this rank's own.

    The first rank of each machine hosts one for the trainings of these `keys`, unless the plan
    leaves its machine out. `spares` are as this rank names them. Collective. Raises on all ranks
    what one rank raises: `OSError` where it cannot listen, `ValueError` for a wrong setting.
    """
    rank = group.rank()
    here = on_all(group, lambda: place(_clear(group), own_address(_get_default_store())))
    places = [Place.decode(text) for text in gathered(group, here.encode())]
    hosts, rates = _hosts(places)
    shares = split(rates, len(spares))
    own = None
    if rank in hosts and shares[hosts.index(rank)] > 0:

        def start() -> _fanin.ParameterService:
            address = reachable(here, places)
            return _fanin.ParameterService(f"{bracketed(address)}:{ANY_PORT}", list(keys))

        own = on_all(group, start)
    else:
        on_all(group, lambda: None)
    listen = gathered(group, None if own is None else own.address)
    of_hosts = zip(hosts, shares[: len(hosts)], strict=True)
    of_ranks = [Service(listen[host] or "", share, host) for host, share in of_hosts]
    of_spares = map(Service, spares, shares[len(hosts) :])
    return [each for each in (*of_ranks, *of_spares) if each.share > 0], own


def split(rates: Sequence[int | None], spares: int) -> list[float]:
    """Return the shares of the machines that train, given their links' rates, and of the spares.

    A link of unknown rate counts as fast as the slowest that is known. Spare machines tell no rate.
    """
    usual = min((rate for rate in rates if rate is not None), default=RATE_UNKNOWN_BPS)
    links = [float(usual if rate is None else rate) for rate in (*rates, *[None] * spares)]
    cluster = [
        (str(number), number < len(rates), True, rate, rate, math.inf)
        for number, rate in enumerate(links)
    ]
    shares: list[float] = _fanin.plan(cluster)["shares"]
    return shares


def _hosts(places: Sequence[Place]) -> tuple[list[int], list[int | None]]:
    """Return the first rank of each machine, and the rate of the machine's link."""
    hosts: list[int] = []
    for rank, machine in enumerate(machines(places)):
        if machine == len(hosts):
            hosts.append(rank)
    return hosts, [places[host].rate_bps for host in hosts]


def _clear(group: distributed.ProcessGroup) -> Settings:
    """Return the group's settings; raises `ValueError` where these keep strangers out."""
    backend = splitting.unwrapped(group, group._device_types[0])
    settings = backend.settings if isinstance(backend, FaninBackend) else Settings.of()
    if settings.secret_file is not None or settings.security not in (None, "tag"):
        raise ValueError(
            "the services of a DeltaOptimizer in the ranks' processes have neither a secret nor "
            "encryption, and the job has: start fanin parameters on a network that strangers do "
            "not reach, and name them (services)"
        )
    return settings


def gathered(group: distributed.ProcessGroup, said: Any) -> list[Any]:
    """Return what each rank says."""
    told: list[Any] = [None] * group.size()
    distributed.all_gather_object(told, said, group=group)
    return told


def on_all(group: distributed.ProcessGroup, work: Callable[[], T]) -> T:
    """Do something; what is raised on one rank is raised on all, who would wait for it else."""
    try:
        done = work()
    except Exception as raised:
        gathered(group, tellable(raised))
        raise
    for rank, error in enumerate(gathered(group, None)):
        if error is not None:
            error.add_note(f"This was on rank {rank}.")
            raise error
    return done
