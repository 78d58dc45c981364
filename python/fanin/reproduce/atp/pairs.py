"""§D.2, Figure 20: two jobs on one switch, whose servers share a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 400.0
AGGREGATORS = 1980
"""The paper's peak-throughput aggregators."""
PAIRS = {
    "equal": [("vgg16", 3), ("vgg16", 3)],
    "workers": [("vgg16", 5), ("vgg16", 2)],
    "models": [("vgg16", 3), ("resnet50", 3)],
}
PAPER_RATIO = {"equal": [0.9, 0.9], "models": [0.95, 0.9]}
PAPER_IMAGES = [145.6, 159.3]
NAMES = {"vgg16": "VGG16", "resnet50": "ResNet50"}


def run(lab: Lab) -> Outcome:
    """Train each pair, and each of its jobs alone."""
    alone = sorted({job for pair in PAIRS.values() for job in pair})

    def scenario(title: str, jobs: list[tuple[str, int]]) -> dict[str, Any]:
        hosts = sum(workers for _, workers in jobs) + 1
        return {
            "title": title,
            "until": setting.ms(8_000 / SCALE),
            "warm_up": setting.ms(2_000 / SCALE),
            "network": setting.rack(hosts),
            "switch": {"aggregators": AGGREGATORS},
            "job": setting.sharing([(model, workers, {}) for model, workers in jobs], SCALE),
        }

    runs = lab.play(
        {
            **{
                f"pairs-{name}": scenario(f"§D.2: {_named(jobs)}", jobs)
                for name, jobs in PAIRS.items()
            },
            **{
                f"pairs-{model}-{workers}": scenario(
                    f"§D.2: {NAMES[model]} alone, {workers} workers", [(model, workers)]
                )
                for model, workers in alone
            },
        }
    )

    def images(name: str, job: int = 0) -> list[float]:
        return [setting.images_per_s(report, job) for report in runs[f"pairs-{name}"].reports]

    ratios = {
        name: [
            [
                shared / single
                for shared, single in zip(
                    images(name, job), images(f"{model}-{workers}"), strict=True
                )
            ]
            for job, (model, workers) in enumerate(jobs)
        ]
        for name, jobs in PAIRS.items()
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        labels, at = [], 0
        for name, jobs in PAIRS.items():
            for job, (model, workers) in enumerate(jobs):
                spread = Spread.of(ratios[name][job])
                error = [[spread.median - spread.least], [spread.most - spread.median]]
                axes.bar(at, spread.median, color=f"C{job}", yerr=error, capsize=3)
                if name in PAPER_RATIO:
                    axes.plot(
                        [at - 0.4, at + 0.4],
                        [PAPER_RATIO[name][job]] * 2,
                        "k--",
                        label="paper" if at == 0 else None,
                    )
                labels.append((at, f"{NAMES[model]}\n{workers} workers"))
                at += 1
            at += 1
        axes.set_xticks([x for x, _ in labels], [label for _, label in labels])
        axes.set_ylim(0, 1.1)
        finish(axes, "", "throughput beside the other job, by that alone")

    findings = [
        Finding(
            "§D.2",
            f"{NAMES[model]} of {workers} workers beside "
            f"{_named([PAIRS[name][1 - job]])}, by alone",
            PAPER_RATIO[name][job],
            Spread.of(ratios[name][job]),
            unit="x",
        )
        for name in PAPER_RATIO
        for job, (model, workers) in enumerate(PAIRS[name])
        if not (name == "equal" and job)
    ]
    findings.append(
        Finding(
            "§D.2, Fig. 20",
            "VGG16 of 3 workers beside VGG16 of 3: the slower job by the faster",
            1.0,
            Spread.of([min(pair) / max(pair) for pair in zip(*ratios["equal"], strict=True)]),
            unit="x",
        )
    )
    five, two = images("workers", 0), images("workers", 1)
    findings += [
        Finding(
            "§D.2",
            "VGG16 of 5 workers beside VGG16 of 2: 5 by 2",
            PAPER_IMAGES[0] / PAPER_IMAGES[1],
            Spread.of([a / b for a, b in zip(five, two, strict=True)]),
            unit="x",
        ),
        Finding(
            "§D.2",
            "VGG16 of 5 of these",
            PAPER_IMAGES[0],
            Spread.of(five),
            unit="images/s",
        ),
        Finding("§D.2", "VGG16 of 2 of these", PAPER_IMAGES[1], Spread.of(two), unit="images/s"),
    ]
    return Outcome(findings, draw, {"by_alone": ratios, "images_per_s": [five, two]})


def _named(jobs: list[tuple[str, int]]) -> str:
    return " and ".join(f"{NAMES[model]} of {workers}" for model, workers in jobs)


EXPERIMENT = Experiment("pairs", "Two jobs on one switch, their servers on one host (§D.2)", run)
