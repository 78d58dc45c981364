"""§4.6, Appendix E, Figures 2 and 11: training with sums of integers that are scaled by block."""

from __future__ import annotations

from collections.abc import Mapping

from fanin_lab.papers import training
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, at_most
from fanin_lab.papers.lab import Lab
from fanin_lab.papers.plot import outcome

NAMES = {"float32": "sums of float32", "scaled": "SwitchML: integers, scaled by block (§4.6)"}


def run(lab: Lab) -> Outcome:
    """Train from the same beginnings, with sums of float32 and with SwitchML's."""
    tasks = training.tasks()
    found = training.curves(
        lab, __name__, {"float32": training.plainly, "scaled": switchml}, learned=tasks
    )
    return outcome(findings(found, tasks), training.picture(found, NAMES))


def findings(found: training.Curves, tasks: Mapping[str, training.Task]) -> list[Finding]:
    """Return what the paper says of sums of integers that are scaled by block, and ours."""
    all_of_them = []
    for task, ways in found.items():
        aim = tasks[task].aim
        differs = training.differs(ways["scaled"], ways["float32"])
        later = training.later(ways["scaled"], ways["float32"], aim)
        all_of_them += [
            Finding(
                "§4.6, Figs. 2, 11",
                f"{task}: accuracy with integers scaled by block, less that with float32",
                "similar: within 1 %, with any seed",
                differs,
                holds=Range(-1, 1),
                unit="%",
            ),
            Finding(
                "§4.6, Figs. 2, 11",
                f"{task}: epochs until {100 * aim:g} % are right, more than with float32",
                "a similar number: at most one more, with any seed",
                later,
                holds=at_most(1),
            ),
        ]
    return all_of_them


def switchml(_task: str, seed: int) -> training.Summed:
    """Sum by SwitchML's machines."""
    job = training.Job("switchml", training.WORKERS, seed)
    return lambda gradients: job.sum(gradients)[0]


EXPERIMENT = Experiment("accuracy", "Training with SwitchML's sums (Figures 2 and 11)", run)
