"""§VII-D, Figure 16: communication overhead by how much the workers' rates deviate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Range, Reason
from fanin_lab.papers.goat.aggregation import NUMBERS, lines
from fanin_lab.papers.goat.drawn import OVER, SCHEMES, Setting, Traffic, counts, swept
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Panel, Picture, outcome

DEVIATIONS = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4]
DEVIATIONS_QUICK = [0.0, 0.1, 0.2]
WORKERS = [20, 45]
"""Besides those for which the other figures have numbers: the paper does not give this one's."""
RIVALS = ("esa", "atp")
OVER_ALL = f"{OVER}, 20 to 45 workers"


def run(lab: Lab) -> Outcome:
    """Let workers' rates deviate more and more."""
    deviations = DEVIATIONS_QUICK if lab.quick else DEVIATIONS
    bases = {topology: Setting(topology, workers) for topology, workers in NUMBERS.items()}
    kinds = {
        topology: [
            *swept(base),
            *(replace(base, workers=workers) for workers in ([] if lab.quick else WORKERS)),
        ]
        for topology, base in bases.items()
    }
    asked = [
        replace(kind, deviation=deviation)
        for of_one in kinds.values()
        for kind in of_one
        for deviation in deviations
    ]
    found = counts(lab, asked)

    row = partial(Finding, "Fig. 16", swept=OVER_ALL)

    def over(kinds: Sequence[Setting], figure: Callable[..., Spread], *given: Any) -> Spread:
        return Spread.over([figure(found, kind, *given) for kind in kinds])

    findings = [
        finding
        for topology, of_one in kinds.items()
        for scheme in RIVALS
        for finding in (
            row(
                ALIKE.format(topology, SCHEMES[scheme]),
                f"{SCHEMES[scheme]} has less",
                over(of_one, _alike, scheme),
                MORE,
                "x",
            ),
            row(
                GROWING.format(topology, SCHEMES[scheme]),
                "increases",
                over(of_one, _grows, scheme),
                MORE,
                "x",
            ),
            row(
                CROSSING.format(topology, SCHEMES[scheme]),
                "between 0 and 0.2",
                over(of_one, _crossing, scheme, deviations),
                Range(0.01, 0.2),
            ),
        )
    ]

    def panel(topology: str, ways: Ways) -> Panel:
        kind = replace(bases[topology], ways=ways)
        settings = [replace(kind, deviation=deviation) for deviation in deviations]
        marks = lines(found, settings, lambda t: t.hops, ["goat", "esa", "atp"], "deviation")
        title = f"{topology}, ways {WAYS[ways]}"
        x, y = "standard deviation", "communication overhead (GB)"
        return Panel(marks, x, y, title, least_y=0)

    panels = [panel(topology, ways) for topology in bases for ways in WAYS]
    return outcome(findings, Picture(panels, (14, 8), rows=2))


Ways = Literal["each", "tree", "summing"]
WAYS: Mapping[Ways, str] = {
    "each": "of each worker",
    "tree": "of the job",
    "summing": "by what sums",
}
ALIKE = "{}, rates alike: GOAT's communication overhead by {}'s"
GROWING = "{}: {}'s communication overhead at a deviation of 0.2 by that without"
CROSSING = "{}: the deviation from which on GOAT has less than {} (0: from the first; 1: never)"
CHANGE = (
    "of equally short ways ATP's and ESA's come to a switch that sums soonest, rates are around "
    "0.5, and KRGS is on Eq. 1"
)
Found = Mapping[Setting, Sequence[Mapping[str, Traffic]]]


def why(lab: Lab) -> Sequence[Reason]:
    """Change at once what of the settings brings Figure 16 nearest to the paper's."""
    deviations = DEVIATIONS_QUICK if lab.quick else DEVIATIONS
    kinds = {
        topology: Setting(topology, workers, around=0.5, ways="summing", planner="krgs-overhead")
        for topology, workers in NUMBERS.items()
    }
    found = counts(lab, [replace(kind, deviation=d) for kind in kinds.values() for d in deviations])
    return [
        Reason(what.format(topology, SCHEMES[scheme]), CHANGE, ours)
        for topology, kind in kinds.items()
        for scheme in RIVALS
        for what, ours in (
            (ALIKE, _alike(found, kind, scheme)),
            (GROWING, _grows(found, kind, scheme)),
            (CROSSING, _crossing(found, kind, scheme, deviations)),
        )
    ]


def _by_goat(found: Found, kind: Setting, scheme: str, deviation: float) -> list[float]:
    each = found[replace(kind, deviation=deviation)]
    return [one[scheme].hops / one["goat"].hops for one in each]


def _alike(found: Found, kind: Setting, scheme: str) -> Spread:
    return Spread.of([1 / ratio for ratio in _by_goat(found, kind, scheme, 0.0)])


def _grows(found: Found, kind: Setting, scheme: str) -> Spread:
    alike, apart = (found[replace(kind, deviation=deviation)] for deviation in (0.0, 0.2))
    pairs = zip(alike, apart, strict=True)
    return Spread.of([b[scheme].hops / a[scheme].hops for a, b in pairs])


def _crossing(found: Found, kind: Setting, scheme: str, deviations: Sequence[float]) -> Spread:
    """Return where a rival's overhead by GOAT's, in the median, passes one, between two."""
    before = None
    for deviation in deviations:
        ratio = Spread.of(_by_goat(found, kind, scheme, deviation)).median
        if ratio >= 1:
            if before is None:
                return Spread.of([deviation])
            last, lower = before
            return Spread.of([last + (deviation - last) * (1 - lower) / (ratio - lower)])
        before = deviation, ratio
    return Spread.of([1.0])


EXPERIMENT = Experiment("deviation", "Overhead by the deviation of rates (Figure 16)", run, why)
