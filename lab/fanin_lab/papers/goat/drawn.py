"""§VII-D: AlexNet on a leaf-spine and a fat-tree of which a fifth of the switches sums.

Which switches sum, which hosts train and serve, and how fast each sends is drawn. What the paper
does not give is a field of `Setting`, and swept. Nothing is played here: `fanin plan`'s code
counts what goes where, as the paper's simulation does; packets are in `packets.py`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fanin import _fanin

from fanin_lab.papers.goat.ways import links, shared_memory
from fanin_lab.papers.lab import Lab

_Setting = TypeVar("_Setting")
_Counted = TypeVar("_Counted")
SIZE = 221_000_000
"""Of AlexNet's gradients, in bytes."""
MEMORY = 64_000_000
"""Of a switch that sums."""
RATE_BPS = 10e9
SHARE = 0.2
"""Of the switches sum."""
SWITCHES = {
    "leaf-spine": {"leaf": 10, "spine": 10},
    "fat-tree": {"edge": 32, "agg": 32, "core": 16},
}
"""The first ones are next to hosts."""
HOSTS = {"leaf-spine": 50, "fat-tree": 192}
GB = 1e9
DRAWINGS = 4
"""Of switches, hosts and rates, for each seed."""
SCHEMES = {"goat": "GOAT", "esa": "ESA", "atp": "ATP", "geryon": "Geryon"}
COLOURS = {"goat": "C0", "esa": "C2", "atp": "C1", "geryon": "C3"}


@dataclass(frozen=True)
class Setting:
    """What decides where gradients are summed."""

    topology: str
    workers: int
    deviation: float = 0.2
    around: float = 1.0
    """What the ratios of sending rates, from 0 to 1, are normally distributed around."""
    ways: Literal["each", "tree", "summing"] = "each"
    """Whether each worker is a flow of its own, where ways are equally short, or all are one, or
    ATP and ESA take the way that comes to a switch that sums soonest."""
    fragment: int = 1_000_000
    priorities: Literal["late", "early", "drawn"] = "late"
    """ESA's: whether what a worker sends late is more important, as front layers are."""
    sums: Literal["any", "near", "far"] = "any"
    """Whether switches are drawn from all, from those next to hosts, or from the others."""
    sub_model: int = 2_000_000
    planner: Literal["krgs", "krgs-overhead"] = "krgs"
    """KRGS on Eq. 4, as it is printed, or on Eq. 1."""


SWEPT: Sequence[Mapping[str, Any]] = (
    {"around": 0.5},
    {"ways": "tree"},
    {"ways": "summing"},
    {"fragment": 250_000},
    {"priorities": "early"},
    {"priorities": "drawn"},
    {"sums": "near"},
    {"sums": "far"},
    {"sub_model": 8_000_000},
    {"planner": "krgs-overhead"},
)
OVER = "eleven settings"
"""As `SWEPT` has them, and as it is; docs/reproduction.md says what they are."""


@dataclass(frozen=True)
class Traffic:
    """What one step of a scheme makes of the network, in bytes."""

    server: int
    """Aggregation overhead of the server: that reaches it."""
    direct: int
    """Of that, what no switch has summed; not known of ATP and ESA, where it is all."""
    in_network: int
    """In-network aggregation amount: that workers send, and that does not reach the server."""
    hops: int
    """Communication overhead: times the links that it passes."""

    @classmethod
    def of(cls, counted: _fanin.Traffic, direct: int) -> Traffic:
        """Return what the planner counted."""
        server, hops = counted["server_bytes"], counted["hop_bytes"]
        return cls(server, direct, counted["in_network_bytes"], hops)


def swept(setting: Setting) -> list[Setting]:
    """Return the setting as it is, and with each thing that the paper does not give changed."""
    return [setting, *(replace(setting, **change) for change in SWEPT)]


def counts(lab: Lab, settings: Iterable[Setting]) -> dict[Setting, list[dict[str, Traffic]]]:
    """Count in every setting with all drawings of all seeds, by the schemes' names."""
    return of_drawings(lab, _counted, settings)


def of_drawings(
    lab: Lab, count: Callable[[tuple[_Setting, int]], _Counted], settings: Iterable[_Setting]
) -> dict[_Setting, list[_Counted]]:
    """Return what is counted in every setting, with all drawings of all seeds."""
    asked = list(dict.fromkeys(settings))
    drawings = [DRAWINGS * seed + each for seed in lab.seeds for each in range(DRAWINGS)]
    if lab.quick:
        drawings = drawings[:1]
    runs = [(setting, drawing) for setting in asked for drawing in drawings]
    found = iter(lab.each("plan", count, runs))
    return {setting: [next(found) for _ in drawings] for setting in asked}


@functools.cache
def _counted(asked: tuple[Setting, int]) -> dict[str, Traffic]:
    setting, drawing = asked
    job = drawn(setting, drawing)
    of = {name: getattr(setting, name) for name in ("topology", "workers", "sums", "sub_model")}
    found = {
        "goat": _planned(Setting(**of), setting.planner, drawing),
        "geryon": _planned(Setting(**of), "at-server", drawing),
    }
    fragments = -(-SIZE // setting.fragment)
    order = arrivals(job.rates_bps, [0.0] * setting.workers, fragments, setting.fragment)
    important = _priorities(setting.priorities, fragments, drawing)
    for scheme, priorities in (("atp", None), ("esa", important)):
        if setting.ways == "summing":
            shared = _by_summing(setting, job, order, priorities)
        else:
            shared = job.workload.shared_memory(
                order, setting.fragment, priorities, setting.ways, drawing
            )
        found[scheme] = Traffic.of(shared, shared["server_bytes"])
    return found


@functools.cache
def _planned(setting: Setting, planner: str, drawing: int) -> Traffic:
    """Return what a plan makes, of a setting without what plans do not depend on."""
    schedule = drawn(setting, drawing).workload.plan(planner, drawing)
    return Traffic.of(schedule, schedule["direct_bytes"])


def _by_summing(
    setting: Setting, job: Job, order: Iterable[tuple[int, int]], priorities: Sequence[int] | None
) -> _fanin.Traffic:
    units = dict.fromkeys(job.switches, MEMORY // setting.fragment)
    joined = links(setting.topology)
    found = shared_memory(joined, job.server, job.workers, units, order, priorities)
    fragments = setting.workers * -(-SIZE // setting.fragment)
    return {
        "server_bytes": found.server * setting.fragment,
        "in_network_bytes": (fragments - found.server) * setting.fragment,
        "hop_bytes": found.hops * setting.fragment,
    }


@dataclass(frozen=True)
class Job:
    """What was drawn."""

    switches: Sequence[str]
    """That sum."""
    workers: Sequence[str]
    server: str
    rates_bps: Sequence[float]
    workload: _fanin.Workload


def drawn(setting: Setting, drawing: int) -> Job:
    """Draw: the same switches, hosts and rates for settings that have as many to draw from."""
    dice = random.Random(drawing)
    layers = SWITCHES[setting.topology]
    names = [f"{layer}{index}" for layer, count in layers.items() for index in range(count)]
    count = round(SHARE * len(names))
    near = next(iter(layers))
    if setting.sums != "any":
        names = [name for name in names if name.startswith(near) == (setting.sums != "far")]
    switches = dice.sample(names, count)
    hosts = dice.sample(range(HOSTS[setting.topology]), setting.workers + 1)
    server, *workers = (f"h{host}" for host in hosts)
    rates_bps = [RATE_BPS * ratio(dice, setting.around, setting.deviation) for _ in workers]
    workload = _fanin.Workload(
        setting.topology,
        dict.fromkeys(switches, MEMORY),
        workers,
        server,
        SIZE,
        setting.sub_model,
        RATE_BPS,
    )
    return Job(switches, workers, server, rates_bps, workload)


def ratio(dice: random.Random, around: float, deviation: float) -> float:
    """Draw from 0 to 1, normally distributed around something as far as it is in there."""
    while not 0 < (drawn := dice.gauss(around, deviation)) <= 1:
        pass
    return drawn


def arrivals(
    rates_bps: Sequence[float], begins_s: Sequence[float], fragments: int, fragment: int
) -> list[tuple[int, int]]:
    """Return (worker, fragment) in the order in which they come; of equals the first worker's."""
    import numpy as np

    times = np.asarray(begins_s) + np.outer(np.arange(1, fragments + 1), 8 * fragment) / rates_bps
    order = np.argsort(times, axis=None, kind="stable")
    numbers, workers = np.divmod(order, len(rates_bps))
    return list(zip(workers.tolist(), numbers.tolist(), strict=True))


def _priorities(kind: str, fragments: int, drawing: int) -> list[int]:
    rising = list(range(fragments))
    if kind == "drawn":
        random.Random(drawing).shuffle(rising)
    return rising[::-1] if kind == "early" else rising
