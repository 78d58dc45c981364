"""§4.2 and Figure 14: strategies inside a machine, counted by `fanin topo` and played as packets.

The paper's own machines and rates. What GPUs compute meanwhile it does not give: that is swept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fanin_lab.papers.byteps import inside
from fanin_lab.papers.byteps.inside import NIC_GBPS, Strategy, Told
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Range, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Line, Mark, Panel, Picture, outcome

MACHINES = 8
"""§7.2: GPU machines; none more that only sums (§7.3)."""
SIZE_GB, SIZE_QUICK_GB = 1.0, 0.2
COMPUTES = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
"""How long GPUs compute in an iteration, by the optimal strategy's communication."""
GENERIC, GENERIC_QUICK = [(2, 2), (2, 4), (4, 2), (4, 4), (8, 3)], [(2, 4), (4, 2)]
"""Switches and GPUs of each, of Figure 7."""
EXACT = 1e-6
"""What two ways to compute the same may differ by; rates are written with so many digits."""


def run(lab: Lab) -> Outcome:
    """Ask for both machines with each rate of the NIC, and for those of the example."""
    size = SIZE_QUICK_GB if lab.quick else SIZE_GB
    machines = {
        **{f"pcie-only-{nic:g}": (inside.pcie_only(2, 4, nic=nic), MACHINES) for nic in NIC_GBPS},
        **{f"nvlink-{nic:g}": (inside.nvlink(nic), MACHINES) for nic in NIC_GBPS},
        "example": (inside.pcie_only(2, 4, pcie=inside.PRINTED_GBPS, memory=inside.MEMORY_GBPS), 1),
    }
    generic = {
        (p, n): (inside.pcie_only(p, n, memory=inside.MEMORY_GBPS), 1)
        for p, n in (GENERIC_QUICK if lab.quick else GENERIC)
    }
    every = {**machines, **{f"figure-7-{p}-{n}": it for (p, n), it in generic.items()}}

    def ask(name: str) -> Told:
        machine, count = every[name]
        return inside.told(lab, name, machine, count, play_gb=size)

    told = dict(zip(every, lab.each("fanin topo", ask, list(every)), strict=True))
    pcie = [told[f"pcie-only-{nic:g}"].strategies for nic in NIC_GBPS]
    nvlink = [told[f"nvlink-{nic:g}"].strategies for nic in NIC_GBPS]
    example = told["example"].strategies

    def by(found: Sequence[Mapping[str, Strategy]], one: str, other: str) -> Spread:
        return _over([it[one].played_s / it[other].played_s for it in found])

    off_equations = max(_off_equations(told[f"figure-7-{p}-{n}"].strategies, n) for p, n in generic)
    computed = [
        iteration(compute * it["assisted"].played_s, it["straightforward"].played_s, overlap)
        / iteration(compute * it["assisted"].played_s, it["assisted"].played_s, overlap)
        for it in pcie
        for compute in COMPUTES
        for overlap in (True, False)
    ]
    played = [it.played_s / it.time_s for found in (*pcie, *nvlink) for it in found.values()]
    roots = [told[f"nvlink-{nic:g}"].chosen for nic in NIC_GBPS]

    def panel(title: str, found: Sequence[Mapping[str, Strategy]], names: Sequence[str]) -> Panel:
        marks: list[Mark] = []
        for which, (nic, it) in enumerate(zip(NIC_GBPS, found, strict=True)):
            places = [place + 0.4 * which for place in range(len(names))]
            times = [1e3 * it[name].played_s / size for name in names]
            predicted = [1e3 * it[name].time_s / size for name in names]
            label = f"played, NIC {nic:g} Gbit/s"
            line = {"markersize": 14, "markeredgewidth": 2.5}
            marks.append(Bars(places, times, label, 0.38, {"alpha": 0.7}))
            marks.append(Line(places, predicted, "k_", look=line))
        ticks = {place + 0.2: name for place, name in enumerate(names)}
        y, title = "ms for 1 GB of each GPU", f"{title}; lines: the slowest link"
        return Panel(marks, "", y, title, ticks=ticks, small_ticks=True)

    picture = Picture(
        [
            panel("PCIe-only", pcie, ["ring", "straightforward", "assisted"]),
            panel("NVLink", nvlink, ["ring", "root=0", "root=all", "root=2,3", "root=2"]),
        ]
    )
    nic = "a NIC of 100 or 90 Gbit/s"
    example_row = partial(Finding, "§4.2.1")
    pcie_row = partial(Finding, "Fig. 14(a), §7.3", unit="x", swept=nic)
    nvlink_row = partial(Finding, "Fig. 14(b), §7.3", unit="x", swept=nic)

    def one(value: float) -> Spread:
        return Spread.of([value])

    findings = [
        Finding(
            "Eqs. 8 and 9",
            "what links carry, counted, for p switches of n GPUs "
            f"({_listed(generic)}): largest difference",
            "none",
            one(off_equations),
            at_most(EXACT),
        ),
        example_row("x* of the example", 0.2, one(example["best x"].brute_force)),
        example_row(
            "J(0) by J*: CPU-assisted aggregation by the optimum",
            1.09,
            one(example["assisted"].time_s / example["best x"].time_s),
            unit="x",
        ),
        example_row("J(0), M = 1 GB", 0.141, one(example["assisted"].time_s / size), unit="s"),
        example_row("J*, M = 1 GB", 0.129, one(example["best x"].time_s / size), unit="s"),
        example_row(
            "J_ca below J_ar, a ring over the GPUs of one machine",
            23.7,
            one(100 * (1 - example["assisted"].time_s / example["ring"].time_s)),
            unit="%",
        ),
        example_row(
            "bytes from switch to CPU, by M: a collective over eight GPUs",
            1.75,
            one(example["ring"].bytes["pcie0", "cpu0"]),
        ),
        pcie_row(
            "communication of the strawman by the optimal strategy's",
            "1.2 and more: end to end it is up to 1.2",
            by(pcie, "straightforward", "assisted"),
            at_least(1.2),
        ),
        pcie_row(
            "iteration with the strawman by one with the optimal strategy",
            1.2,
            _over(computed),
            swept="computing for 0.25 to 1.5 times as long as optimal communication, which it "
            f"hides or not, and {nic}",
        ),
        pcie_row(
            "communication of all-reduce (a ring) by the strawman's",
            "slower: without any optimization BytePS still outperforms it",
            by(pcie, "ring", "straightforward"),
            MORE,
        ),
        Finding(
            "Fig. 14(b), §4.2.2",
            "GPU that the planner reduces to",
            "2",
            Spread.of([float(root.removeprefix("root=")) for root in roots]),
            Range(2, 2),
        ),
        nvlink_row(
            "communication with root = 2, 3 by that with root = 2",
            "almost the same",
            by(nvlink, "root=2,3", "root=2"),
            Range(0.95, 1.05),
        ),
        nvlink_row(
            "communication with root = all by that with root = 2",
            "poorer",
            by(nvlink, "root=all", "root=2"),
            MORE,
        ),
        nvlink_row(
            "communication with root = 0 by that with root = all",
            "root = 0 is the worst",
            by(nvlink, "root=0", "root=all"),
            MORE,
        ),
        nvlink_row(
            "communication of all-reduce (a ring) by that with root = 0",
            "slower: without any optimization BytePS still outperforms it",
            by(nvlink, "ring", "root=0"),
            MORE,
        ),
        Finding(
            "§4.2, §6.1",
            "played in a pipeline of 4 MB, by the time of the slowest link, all strategies",
            "stages overlap, so that the slowest link decides",
            _over(played),
            Range(1 - EXACT, 1.2 if lab.quick else 1.05),
            "x",
        ),
    ]
    return outcome(findings, picture)


def iteration(compute_s: float, communication_s: float, overlap: bool) -> float:
    """Return how long one takes where communication is all hidden behind computing, or none."""
    if overlap:
        return max(compute_s, communication_s)
    return compute_s + communication_s


def _over(settings: Sequence[float]) -> Spread:
    """Return the spread over settings, each of which came to one figure: all of it counts."""
    return Spread.of_each([one] for one in settings)


def _listed(generic: Mapping[tuple[int, int], Any]) -> str:
    return ", ".join(f"{p} of {n}" for p, n in generic)


def _off_equations(strategies: Mapping[str, Strategy], n: int) -> float:
    """Return by how much counted bytes differ from Eqs. 8 and 9, at most."""
    off = []
    for name in ("assisted", "best x"):
        found = strategies[name]
        x, y = found.brute_force, 1 - found.brute_force
        eq_8, eq_9 = n * x + y, (2 * n - 1) / n * y + x
        for ends, equation in ((("pcie0", "cpu0"), eq_8), (("gpu0", "pcie0"), eq_9)):
            off += [abs(found.bytes[way] - equation) for way in (ends, ends[::-1])]
    return max(off)


EXPERIMENT = Experiment("machine", "Inside a machine of eight GPUs (Figure 14, §4.2)", run)
