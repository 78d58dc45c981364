"""§5.5, Figure 15: half the aggregators that a job needs, with and without congestion control."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Report, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 100.0
SCALE_QUICK = 200.0
ITERATIONS = 10
QUEUE = "850kB"
AGGREGATORS = setting.WINDOW // 2
"""Half of what the job has on the way when all of it is aggregated in the switch."""
PAPER_IMAGES = {"on": 66.8, "off": 23.2}
LONGEST_S = 20
"""Of the unscaled time; whoever takes longer has stopped for practical purposes."""


def run(lab: Lab) -> Outcome:
    """Train for ten iterations, as the paper does; the time includes everything."""
    scale = SCALE_QUICK if lab.quick else SCALE
    runs = lab.play(
        {
            f"congestion-{case}": {
                "title": f"Figure 15: congestion control {case}",
                "until": setting.ms(1000 * LONGEST_S / scale),
                "stall": "1s",
                "interval": setting.ms(250 / scale),
                "network": setting.rack(9, queue=QUEUE),
                "switch": {"aggregators": AGGREGATORS},
                "job": [
                    setting.training(
                        "vgg16", scale, iterations=ITERATIONS, congestion_control=case == "on"
                    )
                ],
            }
            for case in PAPER_IMAGES
        }
    )

    def images(report: Report) -> float:
        of_job = report["jobs"][0]
        done = of_job["training"]["iterations"] * setting.BATCH
        return float(done / (of_job["finished_s"] * scale))

    reports = {case: runs[f"congestion-{case}"].reports for case in PAPER_IMAGES}
    rates = {case: [images(report) for report in reports[case]] for case in PAPER_IMAGES}
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    dropped = {
        case: sum(drop["count"] for drop in reports[case][0]["drops"]) for case in PAPER_IMAGES
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for case, style in (("on", "C0-"), ("off", "C3-")):
            report = reports[case][0]
            series = report["jobs"][0]["series"]["aggregation_gbps"]
            times = [report["interval_s"] * scale * (at + 0.5) for at in range(len(series))]
            shown = Spread.of(rates[case]).median
            axes.plot(
                times, series, style, label=f"congestion control {case}: {shown:.0f} images/s"
            )
        axes.plot(
            [],
            [],
            " ",
            label="paper: {on} and {off} images/s".format(**PAPER_IMAGES),
        )
        finish(axes, f"time (s, unscaled; scale {scale:g})", "goodput of a worker (Gbit/s)")

    return Outcome(
        [
            Finding(
                "Fig. 15",
                "VGG16 with half of its aggregators, congestion control on by off",
                PAPER_IMAGES["on"] / PAPER_IMAGES["off"],
                Spread.of(ratios),
                unit="x",
                why=WHY_RATIO,
            ),
            *(
                Finding(
                    "Fig. 15",
                    f"VGG16 with half of its aggregators, congestion control {case}",
                    PAPER_IMAGES[case],
                    Spread.of(rates[case]),
                    unit="images/s",
                    why=why,
                )
                for case, why in WHY.items()
            ),
        ],
        draw,
        {"images_per_s": rates, "dropped": dropped},
    )


WHY_RATIO = (
    "without control all hangs on the queue, whose length the paper does not give: with 0.7, 0.85 "
    "and 1 MB it is 10, 30 and 67 images/s; with control always 123"
)
WHY = {
    "on": (
        "our window shrinks until nearly all that is on the way finds an aggregator (5 to 7 % do "
        "not); in the paper half does not, and the server's link is what limits"
    ),
    "off": WHY_RATIO,
}

EXPERIMENT = Experiment(
    "congestion", "Half of the aggregators, 8 workers of VGG16 into one server (Figure 15)", run
)
