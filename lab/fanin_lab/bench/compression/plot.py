"""The figures as a picture: error, and time, over what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fanin_lab.bench.compression.command import Row
from fanin_lab.sweep.picture import finish, write
from fanin_lab.units import shown_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACT = 1e-8
"""What an error of zero is drawn as."""


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the PNG."""
    write(lambda figure: _panels(figure, rows, title), path, (10, 4.5))


def _panels(figure: Figure, rows: Sequence[Row], title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    errors, times = figure.subplots(1, 2)
    for row in rows:
        without = row.error_of_sum_without_feedback
        after = max(row.error_of_sum, EXACT)
        before = after if without is None else without
        errors.plot([row.sent_bytes] * 2, [before, after], ":", color="grey")
        errors.plot(row.sent_bytes, before, "s", color="C1", fillstyle="none")
        errors.plot(row.sent_bytes, after, "o", color="C0")
        errors.annotate(row.method, (row.sent_bytes, after), fontsize=8)
    errors.plot([], [], "s", color="C1", fillstyle="none", label="nothing sent later")
    errors.plot([], [], "o", color="C0", label="with error feedback")
    for at, rate in enumerate(rows[0].predicted_s):
        for kind, marker in (("predicted", "x"), ("measured", "o")):
            found = [row.predicted_s if kind == "predicted" else row.measured_s for row in rows]
            if all(rate in each for each in found):
                times.plot(
                    [row.sent_bytes for row in rows],
                    [each[rate] * 1e3 for each in found],
                    marker,
                    color=f"C{at}",
                    label=f"{rate}, {kind}",
                )
    times.set_yscale("log")
    for axes, y in ((errors, "relative error of all steps' sum"), (times, "a step's exchange, ms")):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: shown_size(size)))
        finish(axes, "sent by a rank in a step", y)
    errors.set_yscale("log")
    figure.suptitle(title, fontsize=10)
