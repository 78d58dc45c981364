"""§5.3.2, Figure 12: two VGG16 jobs, each with a worker beyond a link that both share."""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Between, Report, Scenario
from fanin_lab.papers.plot import Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, figure, ratio
from fanin_lab.sweep import words

TIME_S = 4.0
"""Of the unscaled time; the first quarter is warm-up."""
PACKET = "1,344"
SYSTEMS: dict[str, str] = {
    "atp": "ATP",
    "ps-n-to-n": "a server beside each worker (BytePS NtoN RDMA)",
    "ring": "ring (Horovod RDMA)",
}
FASTER = "two VGG16 over a shared link: the faster job, ATP by {}"
PAPER_GAIN = {"ps-n-to-n": 1.20, "ring": 1.25}
JOBS = [("l0", "r0", "r1", "r4"), ("l1", "r2", "r3", "r5")]
"""Three workers, and the server where there is one."""


def scenario(
    system: str,
    scale: float,
    round_trip_us: float,
    aggregators: int,
    batch: int = setting.BATCH,
    ecn: str = setting.ECN,
    byteps: str | None = None,
) -> Scenario:
    """Return both jobs on one system; `byteps` is what a host of BytePS's moves."""
    delay = setting.delay("dumbbell", round_trip_us)
    if system == "atp":
        # Links are what jobs share: a frame takes as long as the paper's. BytePS's long ones are
        # within 3 % of RoCE's.
        rate = setting.RATE_OF_FRAMES
        network = setting.network("dumbbell", hosts=6, delay=delay, rate=rate, ecn=ecn)
        keys = {"system": system, "window": setting.WINDOWS[round_trip_us]}
    else:
        network = setting.rdma(
            "dumbbell", PACKET, byteps if system == "ps-n-to-n" else None, hosts=6, delay=delay
        )
        keys = setting.rdma_keys(system, PACKET)

    def job(hosts: tuple[str, ...]) -> dict[str, Any]:
        *workers, server = hosts
        own = {"server": server} if system == "atp" else {}
        more = {"start": Between(0, 280 / scale), "batch": batch, **keys, **own}
        return setting.training("vgg16", scale, workers=workers, **more)

    return {
        "title": f"Figure 12: {SYSTEMS[system]}",
        **setting.measured(TIME_S, scale),
        "payload": "sample",
        "network": network,
        "switch": setting.switch(aggregators),
        "job": [job(hosts) for hosts in JOBS],
    }


SHARED = {"batch": 16, "ecn": "300kB", "scale": 20.0}
SWEPT: list[dict[str, Any]] = [
    *setting.CONTENDED_SWEPT,
    {"batch": 16},
    {"batch": 64},
    {"ecn": "300kB"},
    {"scale": 20.0},
    {"byteps": "90Gbit"},
    {"byteps": "41Gbit"},
    {**SHARED},
    {**SHARED, "byteps": "41Gbit"},
]
"""Each alone; and three at once with which jobs wait for the link that they share: with 32 samples
they compute for longer than they send, on any system."""
OVER = (
    f"{setting.CONTENDED_OVER}, batches of 16 to 64, marks from 100 or 300 kB on, scales of 20 or "
    "50, BytePS's hosts that move 41, 90 or 100 Gbit/s"
)


def _faster(report: Report) -> float:
    return max(setting.images_of_jobs(report))


def _equal(report: Report) -> float:
    images = setting.images_of_jobs(report)
    return min(images) / max(images)


def picture(at: At) -> Picture:
    """Show both jobs' images a second in every setting, a row for each."""
    marks: list[Mark] = []
    for number, (system, name) in enumerate(SYSTEMS.items()):
        for job in range(len(JOBS)):
            images = [of.spread(setting.images_of(job), system=system).median for of in at.settings]
            rows = [row + 0.2 * (number - 1) for row in range(len(images))]
            marks.append(Line(images, rows, f"C{number}{'ox'[job]}", f"{name}, job {job + 1}"))
    names = dict(enumerate(words.settings(of.setting) for of in at.settings))
    return Picture([Panel(marks, "images/s and worker", "", y_ticks=names, least_x=0)], (12, 6.4))


GAINS = [
    Row(
        "§5.3.2, Fig. 12",
        FASTER.format(SYSTEMS[system]),
        paper,
        ratio(_faster, {"system": "atp"}, {"system": system}),
        "x",
    )
    for system, paper in PAPER_GAIN.items()
]
EQUAL = [
    Row(
        "§5.3.2, Fig. 12",
        f"the same, {SYSTEMS[system]}: the slower job by the faster",
        1.0,
        figure(_equal, system=system),
        "x",
    )
    for system in ("atp", "ring")
]
EXPERIMENT = Simulated(
    "dumbbell",
    "Two VGG16 jobs over a link that they share (Figure 12)",
    scenario,
    [Cases({"system": SYSTEMS}, Either(SWEPT, setting.CONTENDED_QUICK), seeds_swept=1)],
    [*GAINS, *EQUAL],
    picture,
    usual=setting.CONTENDED,
    over=OVER,
).experiment()
