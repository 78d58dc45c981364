"""A sweep as a picture: throughput, times and packets sent again over the first parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fanin_lab.sweep import words
from fanin_lab.sweep.picture import finish, write
from fanin_lab.sweep.spread import Spread
from fanin_lab.sweep.table import PointPlayed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {
    "gbps": "throughput (Gbit/s)",
    "samples_per_s": "samples a second and worker",
    "time_mean_ms": "mean time (ms)",
    "time_p99_ms": "99th percentile of times (ms)",
    "sent_again": "packets sent again",
    "dropped": "packets dropped",
}
_FIRST = "gbps"
_PANELS = 4
_SPAN = 8
"""An axis of numbers that differ by more than this factor is logarithmic."""


def save(title: str, played: Sequence[PointPlayed], path: Path) -> None:
    """Write the PNG: a line for each job and each combination of the other parameters' values."""
    there = {key for one in played for row in one.spreads for key, s in row.items() if s.most > 0}
    keys = [key for key in _TITLES if key in there or key == _FIRST][:_PANELS]

    def draw(figure: Figure) -> None:
        figure.suptitle(title)
        for at, key in enumerate(keys):
            axes = figure.add_subplot(1, len(keys), at + 1)
            _panel(axes, key, played)

    write(draw, path, (max(4.5 * len(keys), 6), 4.2))


def _panel(axes: Axes, key: str, played: Sequence[PointPlayed]) -> None:
    first, *_ = played[0].point.values or ["seed"]
    given: list[str] = []
    lines: dict[str, list[tuple[str, Spread]]] = {}
    several = max(len(one.names) for one in played) > 1
    varied = [path for path in played[0].point.values if path != first and _varies(path, played)]
    for one in played:
        for name, x, spread in _found(one, key):
            if x not in given:
                given.append(x)
            parts = [words.setting(path, one.point.values[path]) for path in varied]
            label = ", ".join([name, *parts] if several else parts)
            line = lines.setdefault(label, [])  # also without a point: colours are the lines'
            if spread is not None:
                line.append((x, spread))
    places = _places(axes, given)
    for colour, (label, line) in enumerate(lines.items()):
        xs = [places[x] for x, _ in line]
        style = f"C{colour % 10}o{'-' if colour < 10 else '--'}"
        axes.plot(xs, [s.median for _, s in line], style, label=label or None)
        lower, upper = ([s.interval[end] for _, s in line] for end in (0, 1))
        axes.fill_between(xs, lower, upper, color=f"C{colour % 10}", alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    finish(axes, words.axis(first), _TITLES[key])


def _varies(path: str, played: Sequence[PointPlayed]) -> bool:
    return len({one.point.values[path] for one in played}) > 1


def _found(one: PointPlayed, key: str) -> list[tuple[str, str, Spread | None]]:
    """Return name, place on the axis and figure of each row; without a parameter, of each seed."""
    if one.point.values:
        x = next(iter(one.point.values.values()))
        named = zip(one.names, one.spreads, strict=True)
        return [(name, x, row.get(key)) for name, row in named]
    found = []
    for played in one.runs:
        for row in played.rows:
            figure = row.figures.get(key)
            spread = None if figure is None else Spread.of([figure])
            found.append((row.name, str(played.run.seed), spread))
    return found


def _places(axes: Axes, given: Sequence[str]) -> dict[str, float]:
    """Return where each value stands: numbers by their size, all others side by side."""
    try:
        places = {text: float(text) for text in given}
    except ValueError:
        places = {text: float(at) for at, text in enumerate(given)}
    else:
        # No run may have come to its end.
        least, most = min(places.values(), default=0), max(places.values(), default=0)
        if least > 0 and most / least > _SPAN:
            axes.set_xscale("log", base=2)
    # Beyond a dozen, labels would overlap.
    shown = list(places) if len(places) <= 12 else list(places)[:: math.ceil(len(places) / 12)]
    axes.set_xticks([places[text] for text in shown], shown)
    axes.minorticks_off()
    return places
