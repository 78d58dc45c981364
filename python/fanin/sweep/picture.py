"""Plots that look alike."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write(draw: Callable[[Figure], None], path: Path, inches: tuple[float, float]) -> None:
    """Write what `draw` draws as a PNG."""
    # The canvas without pyplot: no display is asked for, and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib's own requirement

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    # A palette: a quarter of the bytes, for a picture that stands in a repository.
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="png", optimize=True)


def finish(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name the axes, and show grid and legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
