"""§5.5, Figure 16: jobs beside a flow that would fill one worker's uplink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Between, Report, Scenario
from fanin_lab.papers.plot import Level, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, computed, figure

RATE_GBPS = 100.0
"""Of the uplink, which is the bottleneck here: its hosts' cores are left out."""
START_MS = 1.0
SETTLED_MS = 8.0
"""Windows grow by an MTU in a round trip, and need hundreds of these to settle."""
MEASURED_MS = {"vgg16": 50.0, "micro": 12.0}
"""A dozen of VGG16's iterations, or five; the micro-benchmark is even."""
DRAWN_OVER_MS = {"vgg16": 10, "micro": 1}
"""What is averaged. A tensor counts when it is whole, and three quarters of VGG16 are one tensor:
less than an iteration or two would show more than the link carries."""
PAYLOAD_SHARE = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
FAIR_GBPS = RATE_GBPS / 2 * PAYLOAD_SHARE
BDP_ROUND_TRIP_US = 4.8
"""§3.7 has 60 kB as the bandwidth-delay product of 100 Gbit/s."""
ECN, SCALE = "100kB", 50.0
SWEPT: dict[str, Either[list[dict[str, Any]]]] = {
    "vgg16": Either(
        [
            {},
            {"ecn": "300kB"},
            {"scale": 20.0},
            {"round_trip_us": BDP_ROUND_TRIP_US, "scale": 20.0},
        ],
        quick=[{"scale": 200.0}],
    ),
    "micro": Either([{}, {"ecn": "300kB"}, {"round_trip_us": BDP_ROUND_TRIP_US}], quick=[{}]),
}
OVER = {
    "vgg16": "round trips of 24 or 4.8 us, marks at the uplink from 100 or 300 kB on, "
    "scales of 50 or 20",
    "micro": "round trips of 24 or 4.8 us, marks at the uplink from 100 or 300 kB on",
}
NAMES = {"vgg16": "VGG16", "micro": "micro-benchmark"}
LETTERS = {"vgg16": "a", "micro": "b"}


def scenario(
    work: str,
    beside: bool = True,
    scale: float = SCALE,
    ecn: str = ECN,
    round_trip_us: float = setting.ROUND_TRIP_US,
) -> Scenario:
    """Return a job and a flow from one of its workers, or the job alone, where nothing marks."""
    if work == "vgg16":
        job = setting.training("vgg16", scale, workers=6)
    else:
        job = setting.job(workers=6, tensor="250kB", in_flight=12)
    if not beside:
        ecn = ECN
    delay = setting.delay("rack", round_trip_us)
    start = Between(START_MS / 2, START_MS * 3 / 2)
    return {
        "title": f"Figure 16: {work} {'beside a flow' if beside else 'alone'}",
        "until": setting.ms(SETTLED_MS + MEASURED_MS[work]),
        "warm_up": setting.ms(SETTLED_MS),
        "interval": "1ms",
        "payload": "sample",
        "network": setting.rack(8, setting.HOSTS_FREE, ecn=ecn, delay=delay),
        # The worker's own NIC is where its job and the flow meet: it marks, or neither hears of it.
        "node": [{"name": "h0", "ecn": ecn}] if beside else [],
        "switch": setting.switch(4096),
        "job": [{**job, "server": "h6", "start": start}],
        "background": [{"kind": "tcp", "from": "h0", "to": "h7"}] if beside else [],
    }


def fair_gbps(at: At, work: str) -> float:
    """Return what the job is to get: what VGG16 gets alone, or half of the link."""
    if work == "micro":
        return FAIR_GBPS
    (alone,) = at.samples(setting.goodput_gbps, work=work, beside=False)
    return alone


def by_fair(at: At, work: str) -> list[float]:
    """Return the job's goodput by what it is to get."""
    return [one / fair_gbps(at, work) for one in at.samples(setting.goodput_gbps, work=work)]


def _wire(report: Report) -> float:
    # A segment of 1460 bytes takes 1538 of the link.
    series = report["background"][0]["delivered_gbps"][int(SETTLED_MS) : -1]
    flow: float = sum(series) / len(series)
    return setting.goodput_gbps(report) / PAYLOAD_SHARE + flow * 1538 / 1460


def _running_mean(series: Sequence[float], width: int) -> list[float]:
    return [sum(series[at : at + width]) / width for at in range(len(series) - width + 1)]


def picture(at: At) -> Picture:
    """Show the goodput of job and flow over time, in the usual setting."""

    def panel(work: str) -> Panel:
        usual = at.at(SWEPT[work].of(at.quick)[0])
        report = usual.runs(work=work).reports[0]
        job = report["jobs"][0]["series"]["aggregation_gbps"]
        other = report["background"][0]["delivered_gbps"]
        width = DRAWN_OVER_MS[work]
        one, two = (_running_mean(series, width) for series in (job, other))
        both = [ours + theirs for ours, theirs in zip(one, two, strict=False)]
        times = [place + width / 2 for place in range(len(both))]
        label = "paper: what the job gets alone" if work == "vgg16" else "paper: fair share"
        marks: list[Mark] = [
            Line(times, one[: len(times)], "C0-", "ATP"),
            Line(times, two[: len(times)], "C1-", "other flow"),
            Line(times, both, "C2:", "together"),
            Level(fair_gbps(usual, work), label),
        ]
        title = f"{NAMES[work]}, marks from {ECN} on"
        y = "goodput over the uplink (Gbit/s)"
        return Panel(marks, "time (ms)", y, title, least_y=0, most_y=105)

    return Picture([panel(work) for work in NAMES], share_y=True)


EXPERIMENT = Simulated(
    "background",
    "Beside a flow that fills one worker's uplink (Figure 16)",
    scenario,
    # Settings differ by more than seeds do, and one run of VGG16 alone is the baseline of all.
    [
        *(Cases({"work": work}, swept, seeds_swept=1) for work, swept in SWEPT.items()),
        Cases({"work": "vgg16", "beside": False}, SWEPT["vgg16"], seeds=1),
    ],
    [
        Row(
            "Fig. 16a",
            "VGG16 beside a flow, by VGG16 alone",
            1.0,
            computed(by_fair, "vgg16"),
            "x",
            over=OVER["vgg16"],
        ),
        Row(
            "Fig. 16b",
            "micro-benchmark beside a flow, by its fair share of the link",
            1.0,
            computed(by_fair, "micro"),
            "x",
            over=OVER["micro"],
        ),
        *(
            Row(
                f"Fig. 16{LETTERS[work]}",
                f"{name} and flow together, of the uplink's rate",
                100.0,
                figure(_wire, work=work),
                "%",
                over=OVER[work],
            )
            for work, name in NAMES.items()
        ),
    ],
    picture,
).experiment()
