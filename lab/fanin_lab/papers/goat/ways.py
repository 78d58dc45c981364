"""Ways to the server that pass switches that sum, and what ATP and ESA make of gradients on them.

§VII-A sends gradients "via the shortest paths", and §VII-D, Figure 16, has them summed "in each
worker's nearest programmable switches". Both hold where, of equally short ways, each worker's is
the one that comes to a switch that sums soonest. `fanin plan` draws among equal ways, and so this
counts by itself, by the rules of `crates/plan/src/memory_sharing.rs`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Links = Mapping[str, Sequence[str]]
"""By node, its neighbours."""


@dataclass(frozen=True)
class Onward:
    """The next place where something is summed."""

    to: str
    links: int


@dataclass
class _Units:
    """The memory of one switch: for each unit, which fragment has it, and of how many workers."""

    count: int
    fan_in: int = 0
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)

    def take_in(
        self, fragment: int, workers: int, priorities: Sequence[int] | None
    ) -> tuple[int, int] | None:
        """Return the sum that goes on when this one comes."""
        unit = fragment % self.count
        held = self.taken.get(unit)
        if held and held[0] == fragment:
            summed = fragment, held[1] + workers
            if summed[1] < self.fan_in:
                self.taken[unit] = summed
                return None
            del self.taken[unit]
            return summed
        if workers >= self.fan_in or fragment in self.passed:
            return fragment, workers
        if held and (priorities is None or priorities[fragment] <= priorities[held[0]]):
            self.passed.add(fragment)
            return fragment, workers
        # It is free, or ESA's more important fragment takes it.
        self.taken[unit] = fragment, workers
        if held:
            self.passed.add(held[0])
        return held


@dataclass(frozen=True)
class Counted:
    """Fragments that reach the server, and links that fragments pass."""

    server: int
    hops: int


@functools.cache
def links(topology: str) -> Links:
    """Return a topology of §VII-D, as `fanin plan` names its nodes."""
    joined: dict[str, list[str]] = {}

    def join(one: str, other: str) -> None:
        joined.setdefault(one, []).append(other)
        joined.setdefault(other, []).append(one)

    if topology == "leaf-spine":
        for leaf in range(10):
            for spine in range(10):
                join(f"leaf{leaf}", f"spine{spine}")
        for host in range(50):
            join(f"h{host}", f"leaf{host // 5}")
    else:
        for pod in range(8):
            for up in range(4):
                for other in range(4):
                    join(f"edge{4 * pod + other}", f"agg{4 * pod + up}")
                    join(f"agg{4 * pod + up}", f"core{4 * up + other}")
        for host in range(192):
            join(f"h{host}", f"edge{host // 6}")
    return joined


def onward(
    joined: Links, server: str, workers: Iterable[str], summing: Collection[str]
) -> dict[str, Onward]:
    """Return where what a worker sends, and what a switch has summed, goes next."""
    # By node, for each link of its way whether it leads to a switch that sums: 0, or 1 if not.
    ways: dict[str, tuple[int, ...]] = {server: ()}
    following: dict[str, str] = {}
    layer = [server]
    while layer:
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for node in layer:
            way = (0 if node in summing else 1, *ways[node])
            for behind in joined[node]:
                if behind not in ways:
                    found[behind] = min(found.get(behind, (way, node)), (way, node))
        ways |= {node: way for node, (way, _) in found.items()}
        following |= {node: to for node, (_, to) in found.items()}
        layer = list(found)

    def next_of(node: str) -> Onward:
        at, passed = following[node], 1
        while at != server and at not in summing:
            at, passed = following[at], passed + 1
        return Onward(at, passed)

    return {node: next_of(node) for node in [*workers, *summing]}


def shared_memory(
    joined: Links,
    server: str,
    workers: Sequence[str],
    units: Mapping[str, int],
    arrivals: Iterable[tuple[int, int]],
    priorities: Sequence[int] | None,
) -> Counted:
    """Return what ATP makes of contributions that come in this order, or with priorities ESA.

    `units` are those of each switch that sums. A sum that is incomplete at the end goes on.
    """
    following = onward(joined, server, workers, units.keys())
    switches = {name: _Units(count) for name, count in units.items()}
    for name in workers:
        at = following[name].to
        while at != server:
            switches[at].fan_in += 1
            at = following[at].to
    reached = hops = 0

    def send(node: str, fragment: int, of: int) -> None:
        nonlocal reached, hops
        going: tuple[int, int] | None = (fragment, of)
        while going:
            step = following[node]
            hops += step.links
            if step.to == server:
                reached += 1
                return
            node, going = step.to, switches[step.to].take_in(*going, priorities)

    for worker, fragment in arrivals:
        send(workers[worker], fragment, 1)

    def links_to_server(name: str) -> int:
        step = following[name]
        return step.links + (0 if step.to == server else links_to_server(step.to))

    for name in sorted(switches, key=links_to_server, reverse=True):
        left, switches[name].taken = switches[name].taken, {}
        for _, (fragment, of) in sorted(left.items()):
            send(name, fragment, of)
    return Counted(reached, hops)
