"""A stage's plan: who sums which shares, and how long its links take for that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fanin import _fanin, _settings

from fanin_lab.bench import BenchError


@dataclass(frozen=True)
class Machine:
    """A machine behind one link."""

    name: str
    rate_bps: int
    trains: bool
    sums: bool


@dataclass(frozen=True)
class Plan:
    """A plan; times are of the payload, without headers."""

    asked: _settings.Plan
    time_s: float
    bound: str
    """The bottleneck, such as "the link out of w0"."""
    shares: Mapping[str, float]
    """The share of every tensor, by machine."""
    lower_bound_s: float
    """No way to sum on these machines takes less."""
    ring_s: float
    """The time of a ring over the machines that train."""


def planned(machines: Sequence[Machine], size_bytes: int, asked: _settings.Plan) -> Plan:
    """Ask the planner.

    Raises `BenchError` where these machines cannot sum so.
    """

    def sums(machine: Machine) -> bool:
        return machine.sums and asked in ("auto", "own" if machine.trains else "switch")

    told = [
        (m.name, m.trains, sums(m), float(m.rate_bps), float(m.rate_bps), math.inf)
        for m in machines
    ]
    try:
        found = _fanin.plan(told)
    except ValueError as error:
        raise BenchError(f"there is no plan: {error}") from None
    return Plan(
        asked=asked,
        time_s=found["seconds_per_byte"] * size_bytes,
        bound=found["bound"],
        shares={m.name: share for m, share in zip(machines, found["shares"], strict=True)},
        lower_bound_s=found["lower_bound"] * size_bytes,
        ring_s=found["ring"] * size_bytes,
    )
