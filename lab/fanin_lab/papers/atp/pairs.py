"""§D.2, Figure 20: two jobs on one switch.

Which machines serve is not said. In one setting each job's server has a host of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import PAPER, finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Mapping[str, Any]
TIME_S = 4.0
"""Of the unscaled time; the first quarter is warm-up."""
SWEPT = [*setting.CONTENDED_SWEPT, {"servers": "apart"}]
OVER = f"one host for both servers or two, {setting.CONTENDED_OVER}"
PAIRS = {
    "equal": [("vgg16", 3), ("vgg16", 3)],
    "workers": [("vgg16", 5), ("vgg16", 2)],
    "models": [("vgg16", 3), ("resnet50", 3)],
}
PAPER_RATIO = {"equal": [0.9, 0.9], "models": [0.95, 0.9]}
PAPER_IMAGES = [145.6, 159.3]
NAMES = {"vgg16": "VGG16", "resnet50": "ResNet50"}
SHORT = {"vgg16": "VGG\n16", "resnet50": "ResNet\n50"}


def run(lab: Lab) -> Outcome:
    """Train each pair, and each of its jobs alone."""
    settings = setting.CONTENDED_QUICK if lab.quick else SWEPT
    swept = "" if lab.quick else OVER
    alone = sorted({job for pair in PAIRS.values() for job in pair})

    def pairs(settings: Sequence[Values]) -> dict[str, dict[str, Any]]:
        return {
            _name(name, more): _scenario(f"§D.2: {_named(jobs)}", jobs, more)
            for name, jobs in PAIRS.items()
            for more in settings
        }

    singles = {
        _name(f"{model}-{workers}", more): _scenario(
            f"§D.2: {NAMES[model]} alone, {workers} workers", [(model, workers)], more
        )
        for model, workers in alone
        for more in settings
    }
    # Settings differ by more than seeds do, and these choose nothing that matters to one alone.
    runs = lab.play(pairs(settings[:1])) | lab.play(pairs(settings[1:]) | singles, once=True)

    def images(name: str, job: int, more: Values) -> list[float]:
        return [setting.images_per_s(one, job) for one in runs[_name(name, more)].reports]

    def by_alone(name: str, job: int, more: Values) -> list[float]:
        model, workers = PAIRS[name][job]
        (single,) = images(f"{model}-{workers}", 0, more)
        return [shared / single for shared in images(name, job, more)]

    def over(one: Callable[[Values], Sequence[float]]) -> Spread:
        return Spread.over([Spread.of(one(more)) for more in settings])

    def equal(more: Values) -> list[float]:
        pairs = zip(*(by_alone("equal", job, more) for job in (0, 1)), strict=True)
        return [min(pair) / max(pair) for pair in pairs]

    def five_by_two(more: Values) -> list[float]:
        pairs = zip(*(images("workers", job, more) for job in (0, 1)), strict=True)
        return [five / two for five, two in pairs]

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        figure.set_size_inches(3.5 * len(settings) + 2, 4.8)
        for axes, more in zip(many, settings, strict=True):
            _bars(axes, {n: [by_alone(n, job, more) for job in (0, 1)] for n in PAIRS})
            y = "throughput beside the other job, by that alone" if axes is many[0] else ""
            finish(axes, "", y, words.settings(more))

    findings = [
        Finding(
            "§D.2",
            f"{NAMES[model]} of {workers} workers beside "
            f"{_named([PAIRS[name][1 - job]])}, by alone",
            PAPER_RATIO[name][job],
            over(functools.partial(by_alone, name, job)),
            unit="x",
            swept=swept,
        )
        for name in PAPER_RATIO
        for job, (model, workers) in enumerate(PAIRS[name])
        if not (name == "equal" and job)
    ]
    findings += [
        Finding(
            "§D.2, Fig. 20",
            "VGG16 of 3 workers beside VGG16 of 3: the slower job by the faster",
            1.0,
            over(equal),
            unit="x",
            swept=swept,
        ),
        Finding(
            "§D.2",
            "VGG16 of 5 workers beside VGG16 of 2: 5 by 2",
            PAPER_IMAGES[0] / PAPER_IMAGES[1],
            over(five_by_two),
            unit="x",
            swept=swept,
        ),
        *(
            Finding(
                "§D.2",
                f"VGG16 of {PAIRS['workers'][job][1]} of these",
                paper,
                over(functools.partial(images, "workers", job)),
                unit="images/s",
                swept=swept,
            )
            for job, paper in enumerate(PAPER_IMAGES)
        ),
    ]
    series = {
        _name(name, more): [by_alone(name, job, more) for job in (0, 1)]
        for name in PAIRS
        for more in settings
    }
    return Outcome(findings, draw, {"by_alone": series})


def _bars(axes: Axes, ratios: dict[str, list[list[float]]]) -> None:
    labels, at = [], 0
    for name, jobs in PAIRS.items():
        for job, (model, workers) in enumerate(jobs):
            spread = Spread.of(ratios[name][job])
            error = [[spread.median - spread.least], [spread.most - spread.median]]
            axes.bar(at, spread.median, color=f"C{job}", yerr=error, capsize=3)
            if name in PAPER_RATIO:
                ends, paper = [at - 0.4, at + 0.4], PAPER_RATIO[name][job]
                label = "paper (none for 5 and 2 workers)" if at == 0 else None
                axes.plot(ends, [paper] * 2, **PAPER, label=label)
            labels.append((at, f"{SHORT[model]}\nof {workers}"))
            at += 1
        at += 1
    axes.set_xticks([x for x, _ in labels], [label for _, label in labels], fontsize="small")
    axes.set_ylim(0, 1.1)


def _scenario(title: str, jobs: list[tuple[str, int]], more: Values) -> dict[str, Any]:
    values = {"servers": "together", **setting.CONTENDED, **more}
    scale, round_trip_us = values["scale"], values["round_trip_us"]
    count = sum(workers for _, workers in jobs)
    places = {"together": [0] * len(jobs), "apart": range(len(jobs))}[values["servers"]]
    own = [
        {"window": setting.WINDOWS[round_trip_us], "server": f"h{count + place}"}
        for place in places
    ]
    return {
        "title": title,
        "until": setting.ms(1000 * TIME_S / scale),
        "warm_up": setting.ms(1000 * TIME_S / 4 / scale),
        "payload": "sample",
        "network": setting.rack(
            count + max(places) + 1, delay=setting.delay("rack", round_trip_us)
        ),
        "switch": setting.switch(values["aggregators"]),
        "job": setting.sharing([(*job, more) for job, more in zip(jobs, own, strict=True)], scale),
    }


def _name(name: str, more: Values) -> str:
    return "-".join(["pairs", name, *(f"{key}-{value}" for key, value in more.items())])


def _named(jobs: list[tuple[str, int]]) -> str:
    return " and ".join(f"{NAMES[model]} of {workers}" for model, workers in jobs)


EXPERIMENT = Experiment("pairs", "Two jobs on one switch (§D.2)", run)
