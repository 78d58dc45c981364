"""§2.2, Figure 3: VGG16 of one worker and one server sends now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome, at_least
from fanin_lab.papers.lab import Lab, Report
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 100.0
TIME_S = 2.0
INTERVAL_S = 0.01
IDLE, BUSY = 0.05, 0.5
"""Of the greatest rate of an interval: below the one a job is off, above the other it is on."""
COMPUTES = "how long it computes was chosen, and meanwhile it sends nothing"


def run(lab: Lab) -> Outcome:
    """Train for some iterations, and look at each hundredth of a second."""
    runs = lab.play(
        {
            "phases": {
                "title": "Figure 3: VGG16, one worker, one server",
                "until": setting.ms(1000 * TIME_S / SCALE),
                "interval": setting.ms(1000 * INTERVAL_S / SCALE),
                "network": setting.rack(2),
                "switch": setting.switch(),
                "job": [setting.training("vgg16", SCALE, system="ps", workers=1)],
            }
        },
        throughputs=False,
    )["phases"]

    def series(report: Report) -> list[float]:
        # What the server receives: what a worker has back counts by whole tensors.
        return list(report["servers"][0]["received_gbps"])

    def off(report: Report) -> float:
        found = series(report)
        return 100 * sum(one < IDLE * max(found) for one in found) / len(found)

    def on(report: Report) -> float:
        found = series(report)
        return 100 * sum(one > BUSY * max(found) for one in found) / len(found)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        found = series(runs.reports[0])
        axes.plot([INTERVAL_S * (at + 0.5) for at in range(len(found))], found)
        finish(axes, f"time (s, unscaled; scale {SCALE:g})", "received by the server (Gbit/s)")

    times_off, times_on = runs.spread(off), runs.spread(on)
    return Outcome(
        [
            Finding(
                "Fig. 3",
                f"VGG16: intervals of {1000 * INTERVAL_S:g} ms with less than a twentieth of the "
                "greatest rate",
                "some are off: at least 10 %",
                times_off,
                holds=at_least(10),
                cannot_fail=COMPUTES,
                unit="%",
            ),
            Finding(
                "Fig. 3",
                "VGG16: such intervals with more than half of it",
                "some are on: at least 10 %",
                times_on,
                holds=at_least(10),
                cannot_fail=COMPUTES,
                unit="%",
            ),
        ],
        draw,
        {"received_gbps": series(runs.reports[0])},
    )


EXPERIMENT = Experiment("phases", "VGG16 is on and off, one worker and one server (Figure 3)", run)
