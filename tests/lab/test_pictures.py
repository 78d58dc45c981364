"""Pictures can be read: numbers on axes, legends beside what they explain, words for keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fanin_lab.bench.plot import draw as draw_bench
from fanin_lab.bench.result import Run, Setting, figures
from fanin_lab.bench.stage import Sample
from fanin_lab.papers.atp import congestion, setting
from fanin_lab.papers.dlcp import compression
from fanin_lab.papers.plot import draw_seeds
from fanin_lab.sweep import picture, words

pytest.importorskip("matplotlib", reason='pictures need pip install "fanin[lab]"')

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def drawn(draw: Callable[[Figure], None], path: Path) -> Figure:
    """Write a picture, and return what was drawn, with everything in its place."""
    seen = []

    def kept(figure: Figure) -> None:
        seen.append(figure)
        draw(figure)

    picture.write(kept, path / "picture.png", (9, 4.8))
    (figure,) = seen
    figure.draw_without_rendering()
    return figure


def numbers(axis: Axis) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for place, label in ticks if low <= place <= high]


@pytest.mark.parametrize("span", [(2.1, 4.7), (3, 40), (1.5e-5, 2.5e-5), (3e-7, 9e-7), (1, 1e6)])
def test_a_logarithmic_axis_has_numbers_whatever_it_spans(
    span: tuple[float, float], tmp_path: Path
) -> None:
    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([1, 2], span)
        axes.set_yscale("log")
        axes.set_ylim(*span)
        picture.finish(axes, "x", "y")

    (axes,) = drawn(draw, tmp_path).axes
    shown = [text for text in numbers(axes.yaxis) if text]
    assert len(shown) >= 3, shown
    assert len(set(shown)) == len(shown)


def run_of_one_size(times_s: dict[str, float]) -> Run:
    setting = Setting(
        workers=2,
        size_bytes=1_000_000,
        dtype="float32",
        wire_dtype="native",
        element_bytes=4,
        buckets=1,
        calls=1,
        links=None,
    )
    found = {
        backend: figures(setting, [Sample(time_s, (time_s, time_s), 0.1, 0.1, 0, 0.0, "")])
        for backend, time_s in times_s.items()
    }
    return Run(setting, found)


def test_a_bench_of_one_size_has_times_on_its_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figure] = []
    explain = picture._explain

    def watched(figure: Figure) -> None:
        seen.append(figure)
        explain(figure)

    monkeypatch.setattr(picture, "_explain", watched)
    draw_bench([run_of_one_size({"fanin": 0.0022, "gloo": 0.0031})], tmp_path / "bench.png")
    seen[0].draw_without_rendering()
    (axes,) = seen[0].axes
    shown = numbers(axes.yaxis)
    assert len(shown) >= 3
    assert all(text.endswith(" ms") for text in shown)


@pytest.mark.parametrize("panels", [["a"], ["a", "a"], ["a", "b"], ["a", "b", "b"], ["ab", "a"]])
def test_legends_lie_on_no_panel_and_explain_every_line_once(
    panels: list[str], tmp_path: Path
) -> None:
    def draw(figure: Figure) -> None:
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, kinds in zip(every, panels, strict=True):
            for kind in kinds:
                for at in range(6):
                    label = f"{kind}: a name of some length, number {at}"
                    axes.plot([1, 2], [at, 1], f"C{at}" + {"a": "-", "b": ":"}[kind], label=label)
            picture.finish(axes, "an axis", "another", "a title")

    figure = drawn(draw, tmp_path)
    legends = [*figure.legends, *(it for axes in figure.axes if (it := axes.get_legend()))]
    texts = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert len(texts) == len(set(texts)) == 6 * len(set("".join(panels)))
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
        assert not any(box.overlaps(axes.xaxis.label.get_window_extent()) for axes in figure.axes)
        assert not any(box.overlaps(it.get_window_extent()) for it in legends if it is not legend)
        assert figure.bbox.y0 <= box.y0
    for axes in figure.axes:
        assert axes.get_window_extent().height > 3 * figure.dpi, "room is added, not taken"


def test_one_name_for_two_marks_is_explained_twice(tmp_path: Path) -> None:
    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.plot([1], [1], "kx", label="paper")
        right.plot([1, 2], [1, 2], "k--", label="paper")

    figure = drawn(draw, tmp_path)
    assert all(axes.get_legend() for axes in figure.axes)


def test_a_median_is_bold_and_its_seeds_are_thin(tmp_path: Path) -> None:
    curves = [([1.0, 2.0], [1.0, float(seed)]) for seed in (5, 3, 8)]
    figure = drawn(lambda it: draw_seeds(it.add_subplot(), curves, "C0", "a way"), tmp_path)
    *seeds, median = figure.axes[0].get_lines()
    assert np.asarray(median.get_ydata()).tolist() == [1, 5]
    assert len(seeds) == 3
    assert all(line.get_linewidth() < median.get_linewidth() for line in seeds)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "usual"),
        ({"round_trip_us": 80.0, "aggregators": 1980}, "round trip 80 us, aggregators 1,980"),
        ({"nic": "64MB"}, "queue for the server's cores 64 MB"),
        ({"scale": 100.0}, "scaled down 100 times"),
        ({"delay": "20us"}, "link delay 20 us"),
        ({"job.sml.switchml.slots": "512", "new_key": 3}, "slots, job sml 512, new_key 3"),
    ],
)
def test_a_setting_is_said_in_words_with_units(changed: dict[str, object], said: str) -> None:
    assert words.settings(changed) == said


def test_an_axis_is_named_in_words_and_an_unknown_key_as_it_is() -> None:
    assert words.axis("job.sml.switchml.slots") == "slots, job sml"
    assert words.axis("network.queue") == "queue"
    assert words.axis("until") == "until"
    assert words.axis("job.sml.some_key") == "job.sml.some_key"


def test_every_setting_that_reproductions_sweep_has_words() -> None:
    swept = [*congestion.SWEPT, *compression.SWEPT, *setting.CONTENDED_SWEPT]
    for key in {key for more in swept for key in more}:
        assert "_" not in words.setting(key, 1)
        assert key in words._NAMES
