"""§VII-D, Exp 7, Figure 15: bytes times the links that they pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Reason, by_lower
from fanin_lab.papers.goat.aggregation import curves, lines, mark, worst
from fanin_lab.papers.goat.drawn import GB, OVER, SCHEMES, SIZE, Setting, Traffic, counts, swept
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Panel, Picture, outcome

OVERHEAD_GB = {"goat": 13.7, "esa": 19.8, "atp": 20.9, "geryon": 37.1}
"""On the leaf-spine with 35 workers."""
LOWER = {"esa": 31.1, "atp": 34.3, "geryon": 63.1}
"""By how many per cent GOAT's is."""
AT = Setting("leaf-spine", 35)
OWN = "workers' own links counted or not"


def run(lab: Lab) -> Outcome:
    """Plan for each number of workers, and sweep where the text has numbers."""
    points = curves(lab)
    others = swept(AT)
    found = counts(lab, chain(*points.values(), others))
    own = AT.workers * SIZE

    def overhead(scheme: str, less: int) -> list[Spread]:
        return [
            Spread.of([(each[scheme].hops - less) / GB for each in found[setting]])
            for setting in others
        ]

    def ratios(scheme: str, less: int) -> list[Spread]:
        def ratio(each: Mapping[str, Traffic]) -> float:
            return (each[scheme].hops - less) / (each["goat"].hops - less)

        return [Spread.of([ratio(each) for each in found[setting]]) for setting in others]

    findings = [
        Finding(
            "Fig. 15",
            f"leaf-spine, 35 workers: {SCHEMES[scheme]}'s communication overhead",
            paper,
            Spread.over(overhead(scheme, 0) + overhead(scheme, own)),
            unit="GB",
            swept=f"{OVER}, {OWN}",
        )
        for scheme, paper in OVERHEAD_GB.items()
    ]
    findings += [
        Finding(
            "Fig. 15",
            f"leaf-spine, 35 workers: {SCHEMES[scheme]}'s communication overhead by GOAT's "
            f"({percent} % lower)",
            by_lower(percent),
            Spread.over(ratios(scheme, 0) + ratios(scheme, own)),
            unit="x",
            swept=f"{OVER}, {OWN}",
        )
        for scheme, percent in LOWER.items()
    ]
    findings += [
        Finding(
            "Fig. 15",
            LEAST.format(topology),
            "GOAT has the least",
            worst(found, settings, lambda traffic: traffic.hops),
            holds=MORE,
            unit="x",
        )
        for topology, settings in points.items()
    ]

    def panel(topology: str, settings: Sequence[Setting]) -> Panel:
        papers = mark(OVERHEAD_GB if topology == AT.topology else {}, AT.workers)
        ours = lines(found, settings, lambda traffic: traffic.hops, list(SCHEMES))
        y = "communication overhead (GB)"
        return Panel([*ours, *papers], "workers", y, topology, least_y=0)

    return outcome(findings, Picture([panel(*of) for of in points.items()]))


LEAST = (
    "{}: communication overhead of the best of the others by GOAT's, for the number of workers "
    "where that is least"
)


def why(lab: Lab) -> Sequence[Reason]:
    """Let KRGS make small what it is to make small, and not what Eq. 4 does."""
    points = {
        topology: [replace(setting, planner="krgs-overhead") for setting in settings]
        for topology, settings in curves(lab).items()
    }
    found = counts(lab, chain(*points.values()))
    return [
        Reason(
            LEAST.format(topology),
            "KRGS on Eq. 1, from which Eq. 4 is to follow",
            worst(found, settings, lambda traffic: traffic.hops),
        )
        for topology, settings in points.items()
    ]


EXPERIMENT = Experiment("overhead", "Bytes times links (Figure 15)", run, why)
