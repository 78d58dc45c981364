"""What `fanin plan` says of n machines that train and k that only sum, all links alike."""

from __future__ import annotations

from collections.abc import Sequence

from fanin_lab.bench.plan import Machine, Plan, planned
from fanin_lab.papers.lab import Lab

RATE_BPS = 10**9
BYTES = 25_000_000
UNIT_S = 8 * BYTES / RATE_BPS
"""M / B."""


def plans(
    lab: Lab, clusters: Sequence[tuple[int, int]], *, own: bool = True
) -> dict[tuple[int, int], Plan]:
    """Plan for each (n, k); without ``own`` services the k machines sum all."""

    def plan(cluster: tuple[int, int]) -> Plan:
        n, k = cluster
        machines = [Machine(f"w{i}", RATE_BPS, trains=True, sums=own) for i in range(n)]
        machines += [Machine(f"s{i}", RATE_BPS, trains=False, sums=True) for i in range(k)]
        return planned(machines, BYTES, "auto")

    return dict(zip(clusters, lab.each("fanin plan", plan, clusters), strict=True))
