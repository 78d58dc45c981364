"""A profile as a plot: Figure 4, and both halves of Figure 5, of one's own model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fanin_lab.profiler.drops import LAYERS, MAGNITUDES, Among
from fanin_lab.profiler.tolerance import MARGIN
from fanin_lab.sweep.picture import finish, write
from fanin_lab.sweep.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (11, 4)
PANELS: Mapping[str, Sequence[Among]] = {
    "among all packets": ("all",),
    "among a fifth of the layers": LAYERS,
    "among a fifth by magnitude": MAGNITUDES,
}


class Found(Protocol):
    """What is drawn: a profile."""

    @property
    def found(self) -> Mapping[Among, object]:
        """What was lost."""

    def costs(self, among: Among) -> Mapping[float, Spread]:
        """Return by probability which part of the epochs a loss costs in addition."""


def save(profile: Found, name: str, path: Path) -> None:
    """Write the plot of what was found as a PNG."""

    def draw(figure: Figure) -> None:
        panels = {
            title: {str(group): profile.costs(group) for group in groups if group in profile.found}
            for title, groups in PANELS.items()
        }
        panels = {title: of_groups for title, of_groups in panels.items() if of_groups}
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, of_groups) in zip(every, panels.items(), strict=True):
            draw_costs(axes, of_groups)
            finish(axes, "probability of loss, %", "epochs more, %", title)
        figure.suptitle(f"Epochs that a loss costs: {name}")

    write(draw, path, INCHES)


def draw_costs(axes: Axes, of_groups: Mapping[str, Mapping[float, Spread]]) -> None:
    """Draw a line of medians and intervals for each group, and the band that counts as none."""
    axes.axhspan(-100 * MARGIN, 100 * MARGIN, color="black", alpha=0.08, label="none")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    for at, (group, costs) in enumerate(of_groups.items()):
        reached = {p: costs[p] for p in costs if math.isfinite(costs[p].interval[1])}
        # Beside each other, where they have the same probability.
        where = [100 * p * 1.05**at for p in reached]
        medians = [100 * spread.median for spread in reached.values()]
        below = [100 * (s.median - s.interval[0]) for s in reached.values()]
        above = [100 * (s.interval[1] - s.median) for s in reached.values()]
        axes.errorbar(
            where, medians, (below, above), color=f"C{at}", marker="o", capsize=3, label=group
        )
        for p in costs.keys() - reached.keys():
            # Some training did not reach the target: above whatever the axis has.
            axes.plot(
                100 * p * 1.05**at,
                0.97,
                marker="^",
                color=f"C{at}",
                transform=axes.get_xaxis_transform(),
            )
