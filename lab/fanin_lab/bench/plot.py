"""The figures as a picture: tensor aggregation time over size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fanin_lab.bench.result import Run
from fanin_lab.sweep.picture import finish, write
from fanin_lab.units import shown_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"fanin": ("-", "o"), "bounded": (":", "^"), "gloo": ("--", "s")}
_STYLES |= {"openmpi": ("-.", "D"), "alone": ("-", "v")}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the PNG: a line for each backend and number of workers, minimum to maximum shaded."""
    write(lambda figure: _lines(figure.add_subplot(), runs), path, (8, 5))


def _lines(axes: Axes, runs: Sequence[Run]) -> None:
    from matplotlib.ticker import FuncFormatter

    counts = sorted({run.setting.workers for run in runs})
    for colour, workers in enumerate(counts):
        of_count = sorted(
            (run for run in runs if run.setting.workers == workers),
            key=lambda run: run.setting.payload_bytes,
        )
        for backend, (line, marker) in _STYLES.items():
            shown = [run for run in of_count if backend in run.backends]
            if not shown:
                continue
            sizes = [run.setting.payload_bytes for run in shown]
            of_backend = [run.backends[backend] for run in shown]
            axes.plot(
                sizes,
                [f.median_s for f in of_backend],
                line,
                marker=marker,
                color=f"C{colour}",
                label=f"{backend}, {workers} workers",
            )
            low, high = [f.min_s for f in of_backend], [f.max_s for f in of_backend]
            axes.fill_between(sizes, low, high, color=f"C{colour}", alpha=0.12, linewidth=0)
            if len(sizes) == 1:  # there is no area: a line
                axes.vlines(sizes, low, high, color=f"C{colour}", alpha=0.4, linewidth=4)
    bounds = sorted({(r.setting.payload_bytes, b) for r in runs if (b := r.setting.bound_s)})
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color="grey", label="payload / rate")
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({run.setting.payload_bytes for run in runs})
    axes.set_xticks(sizes, [shown_size(size) for size in sizes])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _tick(seconds)))
    axes.minorticks_off()
    finish(
        axes,
        f"tensor ({runs[0].setting.dtype})",
        "tensor aggregation time, slowest rank\n(median; shaded: minimum to maximum)",
        _where(runs[0]),
    )


def _tick(seconds: float) -> str:
    return f"{seconds * 1e6:g} us" if seconds < 1e-3 else f"{seconds * 1e3:g} ms"


def _where(run: Run) -> str:
    links = run.setting.links
    if links is None:
        return "all-reduce over loopback"
    return f"all-reduce over {links.shown()}"
