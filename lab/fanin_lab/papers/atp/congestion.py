"""§5.5, Figure 15: half the aggregators that a job needs, with and without congestion control."""

from __future__ import annotations

from functools import partial
from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import at_most
from fanin_lab.papers.lab import Between, Report, Scenario
from fanin_lab.papers.plot import Level, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, figure, ratio
from fanin_lab.sweep import words

ITERATIONS = 10
"""As many as in the paper. Times and figures include everything from an empty network on."""
LIMIT_S = 30.0
"""Of the unscaled time: what is not done by then is not measured."""
SCALE = 200.0
FIRST_WINDOW = 200
"""Packets (§3.7)."""
SWEPT: list[dict[str, Any]] = [
    {},
    {"delay": setting.PAPER_DELAY},
    {"uncontrolled": FIRST_WINDOW},
    {"windows": 2},
    {"windows": 8},
    {"windows": 16},
    {"windows": 8, "delay": setting.PAPER_DELAY},
    {"nic": "64MB"},
    {"queue": "300kB"},
    {"ecn": "300kB"},
    {"scale": 100.0},
    {"batch": 16},
    {"batch": 64},
]
"""The paper has a first window, and no longest one. Sixteen times what fills a host is the whole
scaled model."""
FEW = SWEPT[:2]
SEEDS = 3
"""Of those that there are, with every setting but the first."""
OVER = (
    "links of 6 or 20 us, windows that fill a host 1, 2, 8 or 16 times, or without control have "
    "200 packets, 1 or 64 MB for the server's cores, queues of 0.3 or 1 MB, marks from 100 or 300 "
    "kB on, scales of 100 or 200, batches of 16 to 64"
)
PAPER_IMAGES = {"on": 66.8, "off": 23.2}
PAPER_GOODPUT_GBPS = 7.5
PAPER_OFF_GBPS = 4.0
"""Without control the goodput of a second is between this and none."""


def scenario(
    control: str,
    scale: float = SCALE,
    delay: str = setting.DELAY,
    windows: int = 1,
    nic: str = "1MB",
    queue: str = "1MB",
    ecn: str = "100kB",
    batch: int = setting.BATCH,
    uncontrolled: int | None = None,
) -> Scenario:
    """Return ten iterations of VGG16, with control or without.

    `windows`: how long those are at most, by what fills a host. `nic`: what waits for the server's
    cores at most; nothing of it is marked. `queue` and `ecn`: of the switch's queues.
    `uncontrolled`: how many packets a window has without control; None for as many as with it.
    """
    fills = setting.FILLS[delay]
    work = setting.training(
        "vgg16",
        scale,
        window=uncontrolled if uncontrolled and control == "off" else windows * fills,
        batch=batch,
        iterations=ITERATIONS,
        congestion_control=control == "on",
        start=Between(0, 1),
    )
    return {
        "title": f"Figure 15: congestion control {control}",
        "until": setting.ms(1000 * LIMIT_S / scale),
        "interval": setting.ms(1000 / scale),
        "payload": "sample",
        "network": setting.rack(9, delay=delay, queue=queue, ecn=ecn),
        # What peak throughput needs with all of it aggregated in the switch: what fills a host.
        "switch": setting.switch(fills // 2),
        "node": [{"name": "h8", "queue": nic}],
        "job": [{**work, "server": "h8"}],
    }


def _seconds(report: Report) -> list[float]:
    """Return the goodput of each unscaled second, but of the last, in which the job ends."""
    series: list[float] = report["jobs"][0]["series"]["aggregation_gbps"]
    return series[:-1] or series


def picture(at: At) -> Picture:
    """Show goodput over time in the usual setting, and images a second in every setting."""
    over_time: list[Mark] = []
    images: list[Mark] = []
    for control, colour in (("on", "C0"), ("off", "C3")):
        seconds = _seconds(at.runs(control=control).reports[0])
        times = [second + 0.5 for second in range(len(seconds))]
        over_time.append(Line(times, seconds, f"{colour}o-", f"control {control}"))
        shown = [of.spread(setting.images_per_s, control=control).median for of in at.settings]
        images += [
            Line(shown, range(len(shown)), f"{colour}o", f"control {control}"),
            Level(
                PAPER_IMAGES[control],
                f"paper, control {control}",
                {"color": colour, "linestyle": "--"},
                along="y",
            ),
        ]
    title = words.setting("scale", SCALE)
    x = "time until the job ends (s, unscaled)"
    names = dict(enumerate(words.settings(of.setting) for of in at.settings))
    return Picture(
        [
            Panel(over_time, x, "goodput of a worker (Gbit/s)", title, least_y=0),
            Panel(images, "images/s and worker", "", y_ticks=names, least_x=0),
        ]
    )


ROW = partial(Row, "§5.5, Fig. 15")
EXPERIMENT = Simulated(
    "congestion",
    "Half of the aggregators, VGG16 of 8 workers, one server (Figure 15)",
    scenario,
    # Without control it may take for ever, and that is the finding.
    [
        Cases(
            {"control": PAPER_IMAGES}, Either(SWEPT, quick=FEW), seeds_swept=SEEDS, unfinished=True
        )
    ],
    [
        ROW(
            "VGG16 with half of its aggregators, congestion control on by off",
            PAPER_IMAGES["on"] / PAPER_IMAGES["off"],
            ratio(setting.images_per_s, {"control": "on"}, {"control": "off"}),
            "x",
        ),
        *(
            ROW(
                f"VGG16 with half of its aggregators, congestion control {control}",
                paper,
                figure(setting.images_per_s, control=control),
                "images/s",
            )
            for control, paper in PAPER_IMAGES.items()
        ),
        ROW(
            "the same with congestion control: a worker's goodput",
            PAPER_GOODPUT_GBPS,
            figure(setting.goodput_gbps, control="on"),
            "Gbit/s",
        ),
        ROW(
            "the same without: a worker's goodput in its best second",
            PAPER_OFF_GBPS,
            figure(lambda report: max(_seconds(report)), control="off"),
            "Gbit/s",
        ),
        ROW(
            "the same without: a worker's goodput in its worst second",
            "0: less than a tenth of the best second's there",
            figure(lambda report: min(_seconds(report)), control="off"),
            "Gbit/s",
            at_most(PAPER_OFF_GBPS / 10),
        ),
    ],
    picture,
    over=OVER,
).experiment()
