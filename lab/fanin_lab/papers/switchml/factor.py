"""Appendix E: one factor for all gradients, from too small to too large.

Workers scale and round (Q = rho(f D)), SwitchML's machines add the int32. What does not fit an
int32 becomes the largest or the least; a switch's sum that does not fit wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fanin_lab.papers import training
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Level, Mark, Panel, Picture, Whiskers, outcome

SMALL, LARGE = 0, 40
BETWEEN = [16, 28]
"""With 8 workers and gradients up to 1, Theorem 2 allows factors up to 2^28."""
POWERS = [SMALL, 4, 8, *BETWEEN, LARGE]
"""Factors are these powers of two, with which scaling by itself loses nothing."""
PART = 0.5
"""Of the epochs."""


def run(lab: Lab) -> Outcome:
    """Train with each factor."""
    ways = {f"2^{power}": _of_factor(power) for power in POWERS}
    found = training.curves(lab, __name__, {"float32": training.plainly, **ways}, PART)

    findings = []
    for task, of_ways in found.items():
        differs = {
            power: training.differs(of_ways[f"2^{power}"], of_ways["float32"]) for power in POWERS
        }
        between = Spread.over([differs[power] for power in BETWEEN])
        row = partial(Finding, unit="%")
        findings += [
            row(
                "App. E, Theorem 1",
                f"{task}: accuracy with the factor 1, less that with float32",
                "worse: the error is up to n / f; below -1 %",
                differs[SMALL],
                at_most(-1),
            ),
            row(
                "App. E, Theorem 2",
                f"{task}: accuracy with factors of 2^16 and 2^28, less that with float32",
                "the error is negligible: within 1 %",
                between,
                Range(-1, 1),
            ),
            row(
                "App. E, Assumptions 1, 2",
                f"{task}: accuracy with the factor 2^40, less that with float32",
                "worse, where integers overflow: below -1 %",
                differs[LARGE],
                at_most(-1),
            ),
        ]
    return outcome(findings, Picture([_panel(*of_task) for of_task in found.items()]))


def _panel(task: str, found: Mapping[str, list[list[float]]]) -> Panel:
    names = [f"2^{power}" for power in POWERS]
    last = {way: Spread.of([100 * one[-1] for one in curves]) for way, curves in found.items()}
    marks: list[Mark] = [
        Level(last["float32"].median, "sums of float32"),
        Whiskers(POWERS, [last[name] for name in names], "one factor", "C1o-"),
    ]
    y = "right answers on what was held back, %"
    return Panel(marks, "factor", y, task, ticks=dict(zip(POWERS, names, strict=True)))


def _of_factor(power: int) -> Callable[[str, int], training.Summed]:
    def of_seed(_task: str, seed: int) -> training.Summed:
        import numpy as np

        job = training.Job("switchml", training.WORKERS, seed)
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max

        def summed(gradients: training.Array) -> training.Array:
            scaled = np.rint(gradients.astype(np.float64) * 2.0**power)
            sums, _ = job.sum(np.clip(scaled, least, most).astype(np.int32))
            return (sums / 2.0**power).astype(np.float32)

        return summed

    return of_seed


EXPERIMENT = Experiment("factor", "Training with one factor for all (Appendix E)", run)
