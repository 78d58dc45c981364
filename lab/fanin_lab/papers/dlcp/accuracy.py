"""§5.3, Figure 15(a): accuracy over epochs, where 1 %, 10 % and 30 % are lost."""

from __future__ import annotations

from fanin_lab.papers import training
from fanin_lab.papers.dlcp.trained import SAME, Setting, curves, epochs_more, in_percent
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, at_least, at_most
from fanin_lab.papers.lab import Lab
from fanin_lab.papers.plot import outcome
from fanin_lab.profiler.drops import Losses

BOUNDS = (0.01, 0.1, 0.3)
ALIKE = Range(-1, 1)
"""How many of a hundred answers more or less are the same accuracy."""


def run(lab: Lab) -> Outcome:
    """Train to the last epoch without loss, and losing as much as each bound allows."""
    tasks = training.tasks()
    settings = {(task, p): Setting(task, Losses("all", p)) for task in tasks for p in (0, *BOUNDS)}
    found = curves(lab, list(settings.values()), only_to_aim=False)
    by_name = {task: {_name(p): found[settings[task, p]] for p in (0, *BOUNDS)} for task in tasks}

    findings = []
    for task, ways in by_name.items():
        for p in BOUNDS:
            findings.append(
                Finding(
                    "§5.3, Fig. 15(a)",
                    f"{task}: accuracy after the last epoch with a bound of {100 * p:g} %, less "
                    "that without loss",
                    "the same" if p < max(BOUNDS) else "the same, with more epochs",
                    training.differs(ways[_name(p)], ways[_name(0)]),
                    holds=ALIKE,
                    unit="%",
                )
            )
            findings.append(
                Finding(
                    "§5.3, Fig. 15(a)",
                    f"{task}: epochs more to {100 * tasks[task].aim:g} % right answers with a "
                    f"bound of {100 * p:g} %",
                    f"almost in line: at most {SAME:g} %"
                    if p < max(BOUNDS)
                    else f"more: at least {SAME:g} %",
                    in_percent(epochs_more(found, settings[task, p])),
                    holds=at_most(SAME) if p < max(BOUNDS) else at_least(SAME),
                    unit="%",
                )
            )
    return outcome(findings, training.picture(by_name, {_name(p): _name(p) for p in (0, *BOUNDS)}))


def _name(probability: float) -> str:
    return f"{100 * probability:g} % lost" if probability else "without loss"


EXPERIMENT = Experiment("accuracy", "Training that loses what a bound allows (Figure 15a)", run)
