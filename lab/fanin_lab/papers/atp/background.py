"""§5.5, Figure 16: jobs beside a flow that would fill one worker's uplink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Between, Lab, Report, Runs, Spread
from fanin_lab.papers.plot import PAPER, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
USUAL = {"scale": 50.0, "ecn": "100kB", "round_trip_us": setting.ROUND_TRIP_US}
SWEPT: dict[str, list[dict[str, Any]]] = {
    "vgg16": [
        {},
        {"ecn": "300kB"},
        {"scale": 20.0},
        {"round_trip_us": BDP_ROUND_TRIP_US, "scale": 20.0},
    ],
    "micro": [{}, {"ecn": "300kB"}, {"round_trip_us": BDP_ROUND_TRIP_US}],
}
SWEPT_QUICK = {"vgg16": [{"scale": 200.0}], "micro": SWEPT["micro"][:1]}
OVER = {
    "vgg16": "round trips of 24 or 4.8 us, marks at the uplink from 100 or 300 kB on, "
    "scales of 50 or 20",
    "micro": "round trips of 24 or 4.8 us, marks at the uplink from 100 or 300 kB on",
}
NAMES = {"vgg16": "VGG16", "micro": "micro-benchmark"}
WHATS = {
    "vgg16": "VGG16 beside a flow, by VGG16 alone",
    "micro": "micro-benchmark beside a flow, by its fair share of the link",
}


def run(lab: Lab) -> Outcome:
    """Let each job run alone where nothing marks, and beside a flow from one of its workers."""
    swept = SWEPT_QUICK if lab.quick else SWEPT
    few = {work: settings[1:] for work, settings in swept.items()}
    runs = lab.play(_beside({work: settings[:1] for work, settings in swept.items()}))
    # Settings differ by more than seeds do.
    runs |= lab.play(_beside(few) | _alone(swept["vgg16"]), once=True)
    by = {work: _over(runs, work, settings) for work, settings in swept.items()}
    together = {
        work: Spread.over([runs[_name(work, more)].spread(_wire) for more in settings])
        for work, settings in swept.items()
    }
    alone = _goodput_alone(runs, swept["vgg16"][0])

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, 2, sharey=True)
        for axes, work in zip(many, NAMES, strict=True):
            report = runs[_name(work, swept[work][0])].reports[0]
            job = report["jobs"][0]["series"]["aggregation_gbps"]
            other = report["background"][0]["delivered_gbps"]
            width = DRAWN_OVER_MS[work]
            means = [_running_mean(series, width) for series in (job, other)]
            both = [one + two for one, two in zip(*means, strict=False)]
            times = [at + width / 2 for at in range(len(both))]
            axes.plot(times, means[0][: len(times)], "C0-", label="ATP")
            axes.plot(times, means[1][: len(times)], "C1-", label="other flow")
            axes.plot(times, both, "C2:", label="together")
            label = "paper: what the job gets alone" if work == "vgg16" else "paper: fair share"
            axes.axhline(alone if work == "vgg16" else FAIR_GBPS, **PAPER, label=label)
            axes.set_ylim(0, 105)
            title = f"{NAMES[work]}, marks from {USUAL['ecn']} on"
            finish(axes, "time (ms)", "goodput over the uplink (Gbit/s)", title)

    over = dict.fromkeys(OVER, "") if lab.quick else OVER
    letters = (("a", "vgg16"), ("b", "micro"))
    return Outcome(
        [
            *(
                Finding(f"Fig. 16{letter}", WHATS[work], 1.0, by[work], unit="x", swept=over[work])
                for letter, work in letters
            ),
            *(
                Finding(
                    f"Fig. 16{letter}",
                    f"{NAMES[work]} and flow together, of the uplink's rate",
                    100.0,
                    together[work],
                    unit="%",
                    swept=over[work],
                )
                for letter, work in letters
            ),
        ],
        draw,
        {"alone_gbps": alone, "fair_gbps": FAIR_GBPS, "settings": swept},
    )


def _beside(swept: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {
        _name(work, more): _scenario(work, more)
        for work, settings in swept.items()
        for more in settings
    }


def _alone(settings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return VGG16 alone at each scale and round trip: one baseline, in which nothing marks."""
    return {
        _name_alone(more): _scenario("vgg16", {**more, "ecn": USUAL["ecn"]}, beside=False)
        for more in settings
    }


def _over(runs: Mapping[str, Runs], work: str, settings: Sequence[Mapping[str, Any]]) -> Spread:
    def by(more: Mapping[str, Any]) -> Spread:
        fair = _goodput_alone(runs, more) if work == "vgg16" else FAIR_GBPS
        return runs[_name(work, more)].spread(lambda report: setting.goodput_gbps(report) / fair)

    return Spread.over([by(more) for more in settings])


def _goodput_alone(runs: Mapping[str, Runs], more: Mapping[str, Any]) -> float:
    (report,) = runs[_name_alone(more)].reports
    return setting.goodput_gbps(report)


def _scenario(work: str, more: Mapping[str, Any], *, beside: bool = True) -> dict[str, Any]:
    of = {**USUAL, **more}
    if work == "vgg16":
        job = setting.training("vgg16", of["scale"], workers=6)
    else:
        job = setting.job(workers=6, tensor="250kB", in_flight=12)
    flow = {"kind": "tcp", "from": "h0", "to": "h7"}
    start = Between(START_MS / 2, START_MS * 3 / 2)
    return {
        "title": f"Figure 16: {work} {'beside a flow' if beside else 'alone'}",
        "until": setting.ms(SETTLED_MS + MEASURED_MS[work]),
        "warm_up": setting.ms(SETTLED_MS),
        "interval": "1ms",
        "payload": "sample",
        "network": setting.rack(
            8,
            setting.HOSTS_FREE,
            ecn=of["ecn"],
            delay=setting.delay("rack", of["round_trip_us"]),
        ),
        # The worker's own NIC is where its job and the flow meet: it marks, or neither hears of it.
        "node": [{"name": "h0", "ecn": of["ecn"]}] if beside else [],
        "switch": setting.switch(4096),
        "job": [{**job, "server": "h6", "start": start}],
        "background": [flow] if beside else [],
    }


def _name(work: str, more: Mapping[str, Any]) -> str:
    return "-".join(["background", work, *(f"{key}-{value}" for key, value in more.items())])


def _name_alone(more: Mapping[str, Any]) -> str:
    of = {**USUAL, **more}
    return f"background-alone-{of['scale']:g}-{of['round_trip_us']:g}"


def _running_mean(series: Sequence[float], width: int) -> list[float]:
    return [sum(series[at : at + width]) / width for at in range(len(series) - width + 1)]


def _wire(report: Report) -> float:
    # A segment of 1460 bytes takes 1538 of the link.
    series = report["background"][0]["delivered_gbps"][int(SETTLED_MS) : -1]
    flow: float = sum(series) / len(series)
    return setting.goodput_gbps(report) / PAYLOAD_SHARE + flow * 1538 / 1460


EXPERIMENT = Experiment(
    "background", "Beside a flow that fills one worker's uplink (Figure 16)", run
)
