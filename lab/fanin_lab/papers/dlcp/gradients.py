"""§2.3, Figure 5: what it costs to lose packets of some layers, or of some magnitude.

Layers take a network of many: the digits' has four tensors, so that a fifth of them is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fanin_lab.papers import training
from fanin_lab.papers.dlcp.trained import (
    RESIDUAL,
    SWEPT,
    WORKERS,
    Curves,
    Setting,
    curves,
    epochs_more,
    in_percent,
    learned,
)
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Panel, Picture, outcome
from fanin_lab.profiler.drops import LAYERS, MAGNITUDES, Among, Losses
from fanin_lab.profiler.tolerance import epochs_to

SEEDS = 3
"""Of the residual network."""
PROBABILITY = 0.9
"""Of a packet of the group. The paper's 2 % show nothing here: 8 workers hardly ever all lose."""


def run(lab: Lab) -> Outcome:
    """Train with packets of each group lost."""
    tasks = [*([] if lab.quick else [RESIDUAL]), *training.tasks()]
    groups = {task: MAGNITUDES if task == "digits" else (*LAYERS, *MAGNITUDES) for task in tasks}
    workers = {task: WORKERS[:1] if task == RESIDUAL else WORKERS for task in tasks}
    settings = {
        (task, among, count): Setting(task, Losses(among, PROBABILITY), count)
        for task in tasks
        for among in groups[task]
        for count in workers[task]
    }
    few = lab.with_seeds(lab.seeds[:SEEDS])
    large = [setting for (task, *_), setting in settings.items() if task == RESIDUAL]
    small = [setting for (task, *_), setting in settings.items() if task != RESIDUAL]
    found = curves(lab, small, only_to_aim=True) | curves(few, large, only_to_aim=True)

    def costs(task: str, group: Among) -> Spread:
        return in_percent(epochs_more(found, settings[task, group, training.WORKERS]))

    def panel(task: str, what: str, groups: Sequence[Among]) -> Panel:
        bars = [
            Bars(
                [group],
                [costs(task, group)],
                look={"capsize": 4, "color": f"C{at}"},
                of_interval=True,
            )
            for at, group in enumerate(groups)
        ]
        first = (task, groups) == (tasks[0], kinds[0][1])
        y = f"epochs more with {100 * PROBABILITY:g} % of a fifth lost, %"
        return Panel(bars, what, y if first else "", task)

    kinds = (("layers", LAYERS), ("packets", MAGNITUDES))
    panels = [panel(task, *kind) for task in tasks for kind in kinds if kind[1][0] in groups[task]]

    def over(task: str, worse: Among, better: Among) -> Spread:
        pairs = [
            [settings[task, group, count] for group in (worse, better)] for count in workers[task]
        ]
        return Spread.over([ratio(found, *pair) for pair in pairs])

    findings = [
        Finding(
            figure,
            f"{task}: epochs with {100 * PROBABILITY:g} % of {_WORDS[worse]} lost, over those with "
            f"as much of {_WORDS[better]}",
            "more",
            over(task, worse, better),
            holds=MORE,
            unit="x",
            swept="" if task == RESIDUAL else SWEPT,
        )
        for task in tasks
        for figure, worse, better in _CLAIMS
        if worse in groups[task]
    ]
    return outcome(findings, Picture(panels, (3 * len(panels), 4.8)))


_WORDS: Mapping[Among, str] = {
    "front": "the front layers",
    "middle": "the middle layers",
    "back": "the back layers",
    "small": "the smallest packets",
    "medium": "the medium packets",
    "large": "the largest packets",
}
_CLAIMS: Sequence[tuple[str, Among, Among]] = (
    ("Fig. 5(a)", "back", "front"),
    ("Fig. 5(b)", "large", "small"),
)
"""Which losses cost more epochs than which; the text compares nothing with the middle ones."""


def ratio(found: Curves, one: Setting, other: Setting) -> Spread:
    """Return how many times the epochs to its aim one setting takes of the other's, by seed."""
    aim = learned(one).aim
    return Spread.of(
        [
            epochs_to(aim, a, "accuracy") / epochs_to(aim, b, "accuracy")
            for a, b in zip(found[one], found[other], strict=True)
        ]
    )


EXPERIMENT = Experiment("gradients", "Losses of some gradients (Figure 5)", run)
