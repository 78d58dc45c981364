"""Networks that are trained with packets of gradients lost, each worker's by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fanin import _fanin

from fanin_lab.papers import residual, training
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Panel, Picture
from fanin_lab.profiler.drops import Losses, Packets, mean_of_received
from fanin_lab.profiler.picture import draw_costs
from fanin_lab.profiler.tolerance import cost, epochs_to

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATIENCE = 3
"""How many times the epochs of a task a training may take to its aim."""
WORKERS = (training.WORKERS, 1)
"""The paper does not say how many lose their packets: of one alone there is nothing else."""
SWEPT = "8 workers and 1"
SAME = 5.0
"""How many per cent more epochs are none: the margin of `fanin profile`."""

BLOCK = 4096
"""Gradients that are rotated together: the contents of twelve packets."""
NONE = Losses()
"""Lost."""


@dataclass(frozen=True)
class Setting:
    """How something is learned."""

    task: str
    losses: Losses = NONE
    workers: int = training.WORKERS
    """Who share the samples of an iteration; with 1, what is lost is lost."""
    data: Literal["its own", "other"] = "its own"
    rotated: bool = False
    """Whether what travels is rotated, in blocks of `BLOCK`."""

    @property
    def without_loss(self) -> Setting:
        """The same, and nothing is lost, which needs no rotation."""
        return replace(self, losses=NONE, rotated=False)


RESIDUAL = "residual net"


def learned(setting: Setting) -> training.Task:
    """Return what is learned."""
    if setting.task == RESIDUAL:
        return residual.task()
    tasks = training.tasks() if setting.data == "its own" else training.on_other_data()
    return tasks[setting.task]


Curves = dict[Setting, list[list[float]]]
"""For each seed, the share of right answers after each epoch."""


def curves(lab: Lab, settings: Sequence[Setting], *, only_to_aim: bool) -> Curves:
    """Train in all settings with all seeds, from the same beginnings; without loss as well."""
    asked = list(dict.fromkeys([*(each.without_loss for each in settings), *settings]))

    def one(run: tuple[Setting, int, bool]) -> list[float]:
        return _learned(*run)

    runs = [(setting, seed, only_to_aim) for setting in asked for seed in lab.seeds]
    # Several experiments have the same settings.
    found = iter(lab.trained(one, runs, __name__))
    return {setting: [next(found) for _ in lab.seeds] for setting in asked}


def _learned(setting: Setting, seed: int, only_to_aim: bool) -> list[float]:
    task = learned(setting)
    return training.train(
        task,
        seed,
        setting.workers,
        task.epochs * (PATIENCE if only_to_aim else 1),
        _summed(setting, training.sizes(task), seed),
        batch=task.batch * training.WORKERS // setting.workers,
        only_to_aim=only_to_aim,
    )


def epochs_more(found: Curves, setting: Setting) -> Spread:
    """Return which part of the epochs to its task's aim a setting's losses cost in addition."""
    aim = learned(setting).aim
    epochs, before = (
        [epochs_to(aim, curve, "accuracy") for curve in found[each]]
        for each in (setting, setting.without_loss)
    )
    return cost(epochs, before)


@dataclass(frozen=True)
class _Costs:
    """A line of medians and intervals for each group, by the probability of a loss."""

    of_groups: Mapping[str, Mapping[float, Spread]]

    def draw(self, axes: Axes) -> None:
        draw_costs(axes, self.of_groups)

    def series(self) -> Mapping[str, Any]:
        return {
            group: {str(p): [cost.median, *cost.interval] for p, cost in costs.items()}
            for group, costs in self.of_groups.items()
        }


def picture_of_costs(
    of_tasks: Mapping[str, Mapping[str, Mapping[float, Spread]]], **more: Any
) -> Picture:
    """Show what losses cost, a panel for each task; its axes may have more keys of a `Panel`."""
    x, y = "packets lost, %", "epochs more, %"
    return Picture([Panel([_Costs(of)], x, y, task, **more) for task, of in of_tasks.items()])


def in_percent(part: Spread) -> Spread:
    """Return a spread of parts of one as one of hundredths."""
    low, high = part.interval
    return Spread(100 * part.median, 100 * part.least, 100 * part.most, (100 * low, 100 * high))


def _summed(setting: Setting, sizes: Sequence[int], seed: int) -> training.Summed:
    import numpy as np
    import torch

    if not setting.losses.probability:
        return training.plain
    # What is rotated has no tensors.
    cut = [sum(sizes)] if setting.rotated else sizes
    packets = Packets(cut, range(len(cut)))
    # The same for all probabilities: what is lost at a low one is lost at a higher one, too.
    dice = torch.Generator().manual_seed(seed)
    steps = itertools.count()

    def summed(gradients: training.Array) -> training.Array:
        turn = (seed << 32) + next(steps)
        sent = np.stack([_turned(row, turn) for row in gradients]) if setting.rotated else gradients
        rows = torch.from_numpy(sent)
        received = [packets.received(row, setting.losses, len(sizes), dice) for row in rows]
        comes = torch.stack(received)[:, packets.of_element]
        total = rows.masked_fill(~comes, 0).sum(dim=0)
        mean = mean_of_received(total, comes.sum(dim=0))
        summed: training.Array = (mean * setting.workers).numpy()
        return _turned(summed, turn, back=True) if setting.rotated else summed

    return summed


def _turned(values: training.Array, seed: int, *, back: bool = False) -> training.Array:
    import numpy as np

    return np.frombuffer(_fanin.rotated(values.tobytes(), BLOCK, seed, back), values.dtype).copy()
