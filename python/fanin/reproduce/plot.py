"""Plots that look alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import Experiment, Outcome
from fanin.sweep.picture import finish, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PAPER", "finish", "save"]

PAPER: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2}
"""How the paper's figures are marked."""


def save(experiment: Experiment, outcome: Outcome, path: Path) -> None:
    """Write an experiment's plot as a PNG."""

    def draw(figure: Figure) -> None:
        outcome.draw(figure)
        figure.suptitle(experiment.title)

    write(draw, path, (9, 4.8))
