"""§2.2, Figure 3: VGG16 of one worker and one server sends now and then."""

from __future__ import annotations

from functools import partial

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import at_least
from fanin_lab.papers.lab import Report, Scenario
from fanin_lab.papers.plot import Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Row, Simulated, figure

SCALE = 100.0
TIME_S = 2.0
INTERVAL_S = 0.01
IDLE, BUSY = 0.05, 0.5
"""Of the greatest rate of an interval: below the one a job is off, above the other it is on."""
COMPUTES = "how long it computes was chosen, and meanwhile it sends nothing"


def scenario() -> Scenario:
    """Return some iterations, looked at each hundredth of a second."""
    return {
        "title": "Figure 3: VGG16, one worker, one server",
        "until": setting.ms(1000 * TIME_S / SCALE),
        "interval": setting.ms(1000 * INTERVAL_S / SCALE),
        "network": setting.rack(2),
        "switch": setting.switch(),
        "job": [setting.training("vgg16", SCALE, system="ps", workers=1)],
    }


def _received(report: Report) -> list[float]:
    # What the server receives: what a worker has back counts by whole tensors.
    return list(report["servers"][0]["received_gbps"])


def _off(report: Report) -> float:
    found = _received(report)
    return 100 * sum(one < IDLE * max(found) for one in found) / len(found)


def _on(report: Report) -> float:
    found = _received(report)
    return 100 * sum(one > BUSY * max(found) for one in found) / len(found)


def picture(at: At) -> Picture:
    """Show what the server receives over time."""
    found = _received(at.runs().reports[0])
    times = [INTERVAL_S * (at + 0.5) for at in range(len(found))]
    x = f"time (s, unscaled; scale {SCALE:g})"
    return Picture([Panel([Line(times, found)], x, "received by the server (Gbit/s)")])


ROW = partial(Row, "Fig. 3", unit="%", holds=at_least(10), cannot_fail=COMPUTES)
EXPERIMENT = Simulated(
    "phases",
    "VGG16 is on and off, one worker and one server (Figure 3)",
    scenario,
    [Cases({}, throughputs=False)],
    [
        ROW(
            f"VGG16: intervals of {1000 * INTERVAL_S:g} ms with less than a twentieth of the "
            "greatest rate",
            "some are off: at least 10 %",
            figure(_off),
        ),
        ROW(
            "VGG16: such intervals with more than half of it",
            "some are on: at least 10 %",
            figure(_on),
        ),
    ],
    picture,
).experiment()
