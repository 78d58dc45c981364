"""§VII-D, Figure 16: communication overhead by how much the workers' rates deviate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, Range
from fanin.reproduce.goat.aggregation import NUMBERS, lines
from fanin.reproduce.goat.drawn import OVER, SCHEMES, Setting, Traffic, counts, swept
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

    def by_goat(kind: Setting, scheme: str, deviation: float) -> list[float]:
        each = found[replace(kind, deviation=deviation)]
        return [one[scheme].hops / one["goat"].hops for one in each]

    findings = []
    for topology, of_one in kinds.items():
        for scheme in RIVALS:
            name = SCHEMES[scheme]
            findings.append(
                Finding(
                    "Fig. 16",
                    f"{topology}, rates alike: GOAT's communication overhead by {name}'s",
                    f"{name} has less",
                    Spread.over(
                        [Spread.of([1 / r for r in by_goat(kind, scheme, 0.0)]) for kind in of_one]
                    ),
                    holds=MORE,
                    unit="x",
                    swept=OVER_ALL,
                )
            )
            findings.append(
                Finding(
                    "Fig. 16",
                    f"{topology}: {name}'s communication overhead at a deviation of 0.2 by that "
                    "without",
                    "increases",
                    Spread.over([Spread.of(_grows(found, kind, scheme)) for kind in of_one]),
                    holds=MORE,
                    unit="x",
                    swept=OVER_ALL,
                )
            )
            findings.append(
                Finding(
                    "Fig. 16",
                    f"{topology}: the deviation from which on GOAT has less than {name} (0: from "
                    "the first; 1: never)",
                    "between 0 and 0.2",
                    Spread.over(
                        [
                            _crossing(
                                {d: Spread.of(by_goat(kind, scheme, d)).median for d in deviations}
                            )
                            for kind in of_one
                        ]
                    ),
                    holds=Range(0.01, 0.2),
                    swept=OVER_ALL,
                )
            )

    def draw(figure: Figure) -> None:
        rows = figure.subplots(2, 2)
        figure.set_size_inches(10, 8)
        for row, (topology, base) in zip(rows, bases.items(), strict=True):
            for axes, ways in zip(row, ("each", "tree"), strict=True):
                kind = replace(base, ways=ways)  # type: ignore[arg-type]
                settings = [replace(kind, deviation=deviation) for deviation in deviations]
                lines(axes, found, settings, lambda t: t.hops, ["goat", "esa", "atp"], "deviation")
                title = f"{topology}, ways of {'each worker' if ways == 'each' else 'the job'}"
                finish(axes, "standard deviation", "communication overhead (GB)", title)

    series = {
        topology: {
            scheme: {str(d): by_goat(base, scheme, d) for d in deviations} for scheme in RIVALS
        }
        for topology, base in bases.items()
    }
    return Outcome(findings, draw, {"overhead by GOAT's": series})


def _grows(
    found: Mapping[Setting, Sequence[Mapping[str, Traffic]]], kind: Setting, scheme: str
) -> list[float]:
    alike, apart = (found[replace(kind, deviation=deviation)] for deviation in (0.0, 0.2))
    return [b[scheme].hops / a[scheme].hops for a, b in zip(alike, apart, strict=True)]


def _crossing(ratios: Mapping[float, float]) -> Spread:
    """Return the deviation where a rival's overhead by GOAT's passes one, between two that were."""
    before = None
    for deviation, ratio in ratios.items():
        if ratio >= 1:
            if before is None:
                return Spread.of([deviation])
            last, lower = before
            return Spread.of([last + (deviation - last) * (1 - lower) / (ratio - lower)])
        before = deviation, ratio
    return Spread.of([1.0])


EXPERIMENT = Experiment("deviation", "Overhead by the deviation of rates (Figure 16)", run)
