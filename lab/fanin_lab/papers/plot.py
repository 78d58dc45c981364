"""Plots that look alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Outcome
from fanin_lab.sweep.picture import finish, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PAPER", "draw_seeds", "finish", "save"]

PAPER: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 2}
"""How the paper's figures are marked."""


def save(experiment: Experiment, outcome: Outcome, path: Path) -> None:
    """Write an experiment's plot as a PNG."""

    def draw(figure: Figure) -> None:
        outcome.draw(figure)
        figure.suptitle(experiment.title)

    write(draw, path, (9, 4.8))


def draw_seeds(
    axes: Axes,
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
    colour: str,
    name: str,
    width: float = 2,
) -> None:
    """Draw a curve for each seed, thin and pale, and the median of each of their points."""
    for xs, ys in curves:
        axes.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.8)
    each = [[statistics.median(of) for of in zip(*found)] for found in zip(*curves)]  # noqa: B905
    if each:
        axes.plot(*each, color=colour, alpha=0.4 if width > 2 else 1, linewidth=width, label=name)
