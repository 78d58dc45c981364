"""Pictures that look alike: every PNG that fanin writes is drawn here.

Legends stand below what they explain, never on a curve, and every axis has numbers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_TICKS = 3
"""A logarithmic axis with fewer powers of its base than this needs other numbers."""
_LOOK = ("color", "facecolor", "alpha", "linestyle", "marker")
"""By what a panel's "paper" may differ from another's, so that both need a legend."""


def write(draw: Callable[[Figure], None], path: Path, inches: tuple[float, float]) -> None:
    """Write what `draw` draws as a PNG; legends make it higher."""
    # The canvas without pyplot: no display is asked for, and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib's own requirement

    figure = Figure(figsize=inches, layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    draw(figure)
    for axes in figure.axes:
        _number(axes.xaxis)
        _number(axes.yaxis)
    _explain(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    # A palette: a quarter of the bytes, for a picture that stands in a repository.
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="png", optimize=True)


def finish(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name the axes, and show the grid, behind everything."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def _number(axis: Axis) -> None:
    """Let a logarithmic axis have some numbers, also within one decade."""
    from matplotlib.ticker import (
        LogFormatter,
        LogLocator,
        MaxNLocator,
        NullLocator,
        StrMethodFormatter,
    )

    locator = axis.get_major_locator()
    if not isinstance(locator, LogLocator):
        return
    low, high = sorted(axis.get_view_interval())
    few = sum(low <= tick <= high for tick in axis.get_majorticklocs()) < _TICKS
    if few:
        within = high <= 10 * low
        axis.set_major_locator(MaxNLocator(5) if within else LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
    if isinstance(axis.get_major_formatter(), LogFormatter) and (
        few or (low >= 1e-4 and high < 1e6)
    ):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _explain(figure: Figure) -> None:
    """Put legends below the panels, and one below the figure where one says everything."""
    from matplotlib.transforms import offset_copy

    found = {axes: entries for axes in figure.axes if (entries := _entries(axes))}
    # A panel whose lines another panel's legend names has none; of equals the last one has it.
    panels = list(found)
    own = [
        axes
        for at, axes in enumerate(panels)
        if not any(found[axes].keys() < found[other].keys() for other in panels)
        and not any(found[axes].keys() == found[other].keys() for other in panels[at + 1 :])
    ]
    figure.draw_without_rendering()  # from here on it is known where things are
    higher = 0.0
    for axes in own:
        names = [name for name, *_ in found[axes]]
        handles = list(found[axes].values())
        keys: dict[str, Any] = {"fontsize": "medium", "loc": "outside lower center"}
        place: Axes | Figure = figure
        if len(own) > 1:
            place = axes
            taken = axes.xaxis.get_tightbbox()  # by the axis' numbers and its name
            below = axes.bbox.y0 - taken.y0 if taken is not None else 0.0
            under = offset_copy(axes.transAxes, figure, y=-below, units="dots")
            keys |= {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": under}
        one = place.legend(handles, names, **keys)
        columns = max(1, int(place.bbox.width / one.get_window_extent().width))
        one.remove()
        legend = place.legend(handles, names, ncols=min(columns, len(names)), **keys)
        higher = max(higher, legend.get_window_extent().height / figure.dpi)
    if own:
        grid = own[0].get_gridspec()
        rows = grid.nrows if grid is not None and len(own) > 1 else 1
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + rows * higher)


def _entries(axes: Axes) -> Mapping[tuple[str, ...], Any]:
    """Return what a panel's legend shows, by name and look."""
    handles, names = axes.get_legend_handles_labels()
    found = {}
    for handle, name in zip(handles, names, strict=True):
        artist = handle[0] if isinstance(handle, tuple) and handle else handle
        look = [str(getattr(artist, f"get_{part}", str)()) for part in _LOOK]
        found[name, *look] = handle
    return found
