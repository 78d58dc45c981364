"""§2.3, Figure 5: what it costs to lose packets of some layers, or of some magnitude.

Layers take a network of many: the digits' has four tensors, so that a fifth of them is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fanin_lab.papers import training
from fanin_lab.papers.dlcp.trained import (
    RESIDUAL,
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
    settings = {
        (task, among): Setting(task, Losses(among, PROBABILITY))
        for task in tasks
        for among in groups[task]
    }
    few = lab.with_seeds(lab.seeds[:SEEDS])
    large = [setting for (task, _), setting in settings.items() if task == RESIDUAL]
    small = [setting for (task, _), setting in settings.items() if task != RESIDUAL]
    found = curves(lab, small, only_to_aim=True) | curves(few, large, only_to_aim=True)
    costs = {key: epochs_more(found, setting) for key, setting in settings.items()}

    def panel(task: str, what: str, groups: Sequence[Among]) -> Panel:
        bars = [
            Bars(
                [group],
                [in_percent(costs[task, group])],
                look={"capsize": 4, "color": f"C{at}"},
                of_interval=True,
            )
            for at, group in enumerate(groups)
        ]
        first = (task, groups) == (tasks[0], kinds[0][1])
        y = f"epochs more with {100 * PROBABILITY:g} % of a fifth lost, %"
        return Panel(bars, what, y if first else "", task)

    kinds = (("layers", LAYERS), ("packets", MAGNITUDES))
    panels = [
        panel(task, *kind) for task in tasks for kind in kinds if (task, kind[1][0]) in settings
    ]
    findings = [
        Finding(
            figure,
            f"{task}: epochs with {100 * PROBABILITY:g} % of {_WORDS[worse]} lost, over those with "
            f"as much of {_WORDS[better]}",
            "more",
            ratio(found, settings[task, worse], settings[task, better]),
            holds=MORE,
            unit="x",
        )
        for task in tasks
        for figure, worse, better in _CLAIMS
        if (task, worse) in settings
    ]
    return outcome(findings, Picture(panels))


_WORDS: Mapping[Among, str] = {
    "front": "the front layers",
    "middle": "the middle layers",
    "back": "the back layers",
    "small": "the smallest packets",
    "medium": "the medium packets",
    "large": "the largest packets",
}
_CLAIMS: Sequence[tuple[str, Among, Among]] = (
    ("Fig. 5(a)", "middle", "front"),
    ("Fig. 5(a)", "back", "middle"),
    ("Fig. 5(a)", "back", "front"),
    ("Fig. 5(b)", "medium", "small"),
    ("Fig. 5(b)", "large", "medium"),
    ("Fig. 5(b)", "large", "small"),
)
"""Which losses cost more epochs than which."""


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
