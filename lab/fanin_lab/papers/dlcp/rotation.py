"""Not the paper's: whether a loss costs less where gradients are rotated before they are sent.

A randomised Hadamard rotation makes of a lost packet a little of each gradient of a block, and not
all of a few: `crates/quant/src/rotation.rs`.
"""

from __future__ import annotations

from fanin_lab.papers import training
from fanin_lab.papers.dlcp.gradients import ratio
from fanin_lab.papers.dlcp.trained import (
    BLOCK,
    WORKERS,
    Setting,
    curves,
    epochs_more,
    picture_of_costs,
)
from fanin_lab.papers.finding import LESS, Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab
from fanin_lab.papers.plot import outcome
from fanin_lab.profiler.drops import Losses

PROBABILITIES = (0.3, 0.5)


def run(lab: Lab) -> Outcome:
    """Train with losses of gradients as they are, and of rotated ones."""
    tasks = training.tasks()
    kinds = [
        Setting(task, workers=workers, rotated=rotated)
        for task in tasks
        for workers in WORKERS
        for rotated in (False, True)
    ]
    settings = {
        (kind, p): Setting(kind.task, Losses("all", p), kind.workers, rotated=kind.rotated)
        for kind in kinds
        for p in PROBABILITIES
    }
    found = curves(lab, list(settings.values()), only_to_aim=True)
    costs = {
        kind: {p: epochs_more(found, settings[kind, p]) for p in PROBABILITIES} for kind in kinds
    }

    findings = [
        Finding(
            "none",
            f"{kind.task}, {kind.workers} worker{'s'[: kind.workers - 1]}: epochs with "
            f"{100 * p:g} % lost of gradients in rotated blocks of {BLOCK}, over those without "
            "rotation",
            "(not the paper's) fewer",
            ratio(found, settings[kind, p], settings[_plain(kind), p]),
            holds=LESS,
            unit="x",
            cannot_fail="not the paper's",
        )
        for kind in kinds
        if kind.rotated
        for p in PROBABILITIES
    ]
    lines = {
        task: {_name(kind): costs[kind] for kind in kinds if kind.task == task} for task in tasks
    }
    return outcome(findings, picture_of_costs(lines))


def _plain(kind: Setting) -> Setting:
    return Setting(kind.task, workers=kind.workers)


def _name(kind: Setting) -> str:
    return f"{kind.workers} worker{'s'[: kind.workers - 1]}{', rotated' if kind.rotated else ''}"


EXPERIMENT = Experiment("rotation", "Losses of gradients that were rotated", run)
