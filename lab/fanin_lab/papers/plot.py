"""Pictures of experiments as data: panels, and in each panel the marks that are drawn there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fanin_lab.papers.finding import Experiment, Outcome
from fanin_lab.sweep.picture import finish, write
from fanin_lab.sweep.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 2}
"""How the paper's figures are marked."""


class Mark(Protocol):
    """What is drawn in a panel."""

    def draw(self, axes: Axes) -> None:
        """Draw it."""

    def series(self) -> Mapping[str, Any]:
        """Return what is drawn, by name, for programs."""


@dataclass(frozen=True)
class Line:
    """Points, and with a style as "o-" the line through them."""

    x: Sequence[float]
    y: Sequence[float]
    style: str = ""
    label: str | None = None
    look: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        style = (self.style,) if self.style else ()
        axes.plot(self.x, self.y, *style, label=self.label, **self.look)

    def series(self) -> Mapping[str, Any]:
        """Return its points."""
        return {self.label: [list(self.x), list(self.y)]} if self.label else {}


@dataclass(frozen=True)
class Whiskers:
    """Medians, each with a whisker from the least to the most."""

    x: Sequence[float]
    spreads: Sequence[Spread]
    label: str | None = None
    style: str = "o-"
    look: Mapping[str, Any] = field(default_factory=dict)
    of_interval: bool = False
    """Whether whiskers are the intervals, and not from the least to the most."""

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        medians, around = _around(self.spreads, self.of_interval)
        more = {"capsize": 3, **self.look}
        axes.errorbar(self.x, medians, yerr=around, fmt=self.style, label=self.label, **more)

    def series(self) -> Mapping[str, Any]:
        """Return medians, the least and the most."""
        return _series(self.label, self.x, self.spreads)


@dataclass(frozen=True)
class Band:
    """All that lies between two curves."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    look: Mapping[str, Any]
    label: str | None = None

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        axes.fill_between(self.x, self.low, self.high, label=self.label, **self.look)

    def series(self) -> Mapping[str, Any]:
        """Return both curves."""
        return {self.label: [list(self.x), list(self.low), list(self.high)]} if self.label else {}


@dataclass(frozen=True)
class Bars:
    """Bars at numbers, or each under its name."""

    x: Sequence[float] | Sequence[str]
    heights: Sequence[float] | Sequence[Spread]
    """Spreads have whiskers from the least to the most."""
    label: str | None = None
    width: float = 0.8
    look: Mapping[str, Any] = field(default_factory=dict)
    numbers: str = ""
    """The format of the number on each bar, if there are numbers."""
    of_interval: bool = False
    """Whether whiskers are the intervals, and not from the least to the most."""

    def draw(self, axes: Axes) -> None:
        """Draw them."""
        spreads = [one for one in self.heights if isinstance(one, Spread)]
        heights, around = _around(spreads, self.of_interval) if spreads else (self.heights, None)
        whiskers = {"yerr": around, "capsize": 3} if spreads else {}
        more = {**whiskers, **self.look}
        bars = axes.bar(self.x, heights, self.width, label=self.label, **more)  # type: ignore[arg-type]
        if self.numbers:
            axes.bar_label(bars, fmt=self.numbers)

    def series(self) -> Mapping[str, Any]:
        """Return the heights."""
        return _series(self.label or "bars", self.x, self.heights)


@dataclass(frozen=True)
class Level:
    """A line across the whole panel."""

    at: float
    label: str | None = None
    look: Mapping[str, Any] = field(default_factory=lambda: PAPER)
    along: Literal["x", "y"] = "x"

    def draw(self, axes: Axes) -> None:
        """Draw it."""
        line = axes.axhline if self.along == "x" else axes.axvline
        line(self.at, label=self.label, **self.look)

    def series(self) -> Mapping[str, Any]:
        """Return where it is."""
        return {self.label: self.at} if self.label else {}


@dataclass(frozen=True)
class Seeds:
    """A curve for each seed, thin and pale, and their median."""

    curves: Sequence[tuple[Sequence[float], Sequence[float]]]
    colour: str
    label: str
    width: float = 2

    def draw(self, axes: Axes) -> None:
        """Draw them."""
        draw_seeds(axes, self.curves, self.colour, self.label, self.width)

    def series(self) -> Mapping[str, Any]:
        """Return all of the curves."""
        return {self.label: [[list(xs), list(ys)] for xs, ys in self.curves]}


@dataclass(frozen=True)
class Panel:
    """A pair of axes and what is drawn there."""

    marks: Sequence[Mark]
    x: str
    y: str
    title: str = ""
    log_x: float = 0
    """The base, if the axis is logarithmic."""
    log_y: float = 0
    linear_to: Mapping[str, float] = field(default_factory=dict)
    """By axis, "x" or "y": up to where it is linear, and logarithmic from there on."""
    ticks: Mapping[int, str] | Mapping[float, str] | Sequence[float] | None = None
    """Where the horizontal axis has numbers, and what is there in their place."""
    y_ticks: Mapping[int, str] = field(default_factory=dict)
    least_y: float | None = None
    most_y: float | None = None
    least_x: float | None = None
    small_ticks: bool = False
    falls: bool = False
    """Whether the horizontal axis runs from the most to the least."""
    whole_x: bool = False
    """Whether the horizontal axis has whole numbers only."""

    def draw(self, axes: Axes) -> None:
        """Draw all marks, and name the axes."""
        for mark in self.marks:
            mark.draw(axes)
        if self.log_x:
            axes.set_xscale("log", base=self.log_x)
        if self.log_y:
            axes.set_yscale("log", base=self.log_y)
        if "x" in self.linear_to:
            axes.set_xscale("symlog", linthresh=self.linear_to["x"])
        if "y" in self.linear_to:
            axes.set_yscale("symlog", linthresh=self.linear_to["y"])
            axes.yaxis.set_major_formatter("{x:g}")
        if isinstance(self.ticks, Mapping):
            small: dict[str, Any] = {"fontsize": "small"} if self.small_ticks else {}
            axes.set_xticks(list(self.ticks), list(self.ticks.values()), **small)
        elif self.ticks is not None:
            axes.set_xticks(self.ticks)
        if "x" in self.linear_to:
            axes.minorticks_off()
        if self.y_ticks:
            axes.set_yticks(list(self.y_ticks), list(self.y_ticks.values()))
        if self.least_y is not None or self.most_y is not None:
            axes.set_ylim(self.least_y, self.most_y)
        if self.least_x is not None:
            axes.set_xlim(self.least_x)
        if self.falls:
            axes.invert_xaxis()
        if self.whole_x:
            axes.locator_params("x", integer=True)
        finish(axes, self.x, self.y, self.title)

    def series(self) -> dict[str, Any]:
        """Return what is drawn, by the names of the legend."""
        return {name: found for mark in self.marks for name, found in mark.series().items()}


@dataclass(frozen=True)
class Picture:
    """Panels, in rows."""

    panels: Sequence[Panel]
    inches: tuple[float, float] | None = None
    rows: int = 1
    share_y: bool = False
    y: str = ""
    """What all vertical axes show, if no panel says it."""

    def draw(self, figure: Figure) -> None:
        """Draw all panels."""
        columns = -(-len(self.panels) // self.rows)
        if self.inches:
            figure.set_size_inches(self.inches)
        every = figure.subplots(self.rows, columns, sharey=self.share_y, squeeze=False).flat
        for axes, panel in zip(every, self.panels, strict=True):
            panel.draw(axes)
        if self.y:
            figure.supylabel(self.y)

    def series(self) -> dict[str, Any]:
        """Return what is drawn: by panel, and in it by the names of the legend."""
        found: dict[str, Any] = {}
        for at, panel in enumerate(self.panels):
            name = panel.title or panel.y or str(at)
            found[name if name not in found else f"{name}, {at}"] = panel.series()
        return found


def outcome(findings: Sequence[Any], picture: Picture) -> Outcome:
    """Return findings with their picture."""
    return Outcome(findings, picture.draw, picture.series())


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


def _around(spreads: Sequence[Spread], of_interval: bool) -> tuple[list[float], list[list[float]]]:
    medians = [spread.median for spread in spreads]
    ends = [s.interval if of_interval else (s.least, s.most) for s in spreads]
    below = [median - low for median, (low, _) in zip(medians, ends, strict=True)]
    above = [high - median for median, (_, high) in zip(medians, ends, strict=True)]
    return medians, [below, above]


def _series(
    label: str | None, x: Sequence[Any], found: Sequence[float] | Sequence[Spread]
) -> Mapping[str, Any]:
    if not label:
        return {}
    y = [[s.median, s.least, s.most] if isinstance(s, Spread) else s for s in found]
    return {label: [list(x), y]}
