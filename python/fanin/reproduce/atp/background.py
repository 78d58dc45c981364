"""§5.5, Figure 16: jobs beside a flow that would fill one worker's uplink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Between, Lab, Report, Runs, Spread
from fanin.reproduce.plot import PAPER, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE_GBPS = 100.0
"""Of the uplink, which is the bottleneck here: its hosts' cores are left out."""
SCALE = 200.0
START_MS, END_MS = 1.0, 12.0
SETTLED_MS = 6.0
"""Windows grow by an MTU in a round trip, and need hundreds of these to settle."""
PAYLOAD_SHARE = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
FAIR_GBPS = RATE_GBPS / 2 * PAYLOAD_SHARE
MARKS = ["100kB", "300kB"]
SWEPT = "marks at the uplink from 100 to 300 kB on"
NAMES = {"vgg16": "VGG16", "micro": "micro-benchmark"}
WHATS = {
    "vgg16": "VGG16 beside a flow, by VGG16 alone",
    "micro": "micro-benchmark beside a flow, by its fair share of the link",
}


def run(lab: Lab) -> Outcome:
    """Let each job run alone, and beside a flow from one of its workers."""
    runs = lab.play(
        {
            _name(work, mark, beside): _scenario(work, mark, beside)
            for work in NAMES
            for mark in MARKS
            for beside in ((False, True) if work == "vgg16" else (True,))
        },
        throughputs=False,
    )
    by = {
        "vgg16": Spread.over([_by_alone(runs, mark) for mark in MARKS]),
        "micro": Spread.over([_by_fair(runs[_name("micro", mark, True)]) for mark in MARKS]),
    }
    together = {
        work: Spread.over([runs[_name(work, mark, True)].spread(_wire) for mark in MARKS])
        for work in NAMES
    }
    alone = runs[_name("vgg16", MARKS[0], False)].spread(_goodput).median

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, 2, sharey=True)
        for axes, work in zip(many, NAMES, strict=True):
            report = runs[_name(work, MARKS[0], True)].reports[0]
            job = report["jobs"][0]["series"]["aggregation_gbps"]
            other = report["background"][0]["delivered_gbps"]
            times = [at + 0.5 for at in range(min(len(job), len(other)))]
            both = [one + two for one, two in zip(job, other, strict=False)]
            axes.plot(times, job[: len(times)], "C0-", label="ATP")
            axes.plot(times, other[: len(times)], "C1-", label="other flow")
            axes.plot(times, both, "C2:", label="together")
            label = "paper: what the job gets alone" if work == "vgg16" else "paper: fair share"
            axes.axhline(alone if work == "vgg16" else FAIR_GBPS, **PAPER, label=label)
            axes.set_ylim(0, 105)
            title = f"{NAMES[work]}, marks from {MARKS[0]} on"
            finish(axes, "time (ms)", "goodput over the uplink (Gbit/s)", title)

    return Outcome(
        [
            *(
                Finding(f"Fig. 16{letter}", WHATS[work], 1.0, by[work], unit="x", swept=SWEPT)
                for letter, work in (("a", "vgg16"), ("b", "micro"))
            ),
            *(
                Finding(
                    f"Fig. 16{letter}",
                    f"{NAMES[work]} and flow together, of the uplink's rate",
                    100.0,
                    together[work],
                    unit="%",
                    swept=SWEPT,
                )
                for letter, work in (("a", "vgg16"), ("b", "micro"))
            ),
        ],
        draw,
        {"alone_gbps": alone, "fair_gbps": FAIR_GBPS, "marks": MARKS},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let nothing mark at the uplink, or the bottleneck be the other direction."""
    played = {
        "no marks at the worker's own NIC": {"nic_ecn": False},
        "the flow towards the worker": {"towards": True},
    }
    reasons = []
    for change, more in played.items():
        runs = lab.play(
            {
                _name(work, f"why-{'-'.join(more)}", beside): _scenario(
                    work, MARKS[0], beside, **more
                )
                for work in NAMES
                for beside in ((False, True) if work == "vgg16" else (True,))
            },
            once=True,
            throughputs=False,
        )
        mark = f"why-{'-'.join(more)}"
        reasons += [
            Reason(WHATS["vgg16"], change, _by_alone(runs, mark)),
            Reason(WHATS["micro"], change, _by_fair(runs[_name("micro", mark, True)])),
        ]
    return reasons


def _scenario(
    work: str, mark: str, beside: bool, *, nic_ecn: bool = True, towards: bool = False
) -> dict[str, Any]:
    if work == "vgg16":
        job = setting.training("vgg16", SCALE, workers=6)
    else:
        job = setting.job(workers=6, tensor="250kB", in_flight=12)
    flow = {"from": "h7", "to": "h0"} if towards else {"from": "h0", "to": "h7"}
    start = Between(START_MS / 2, START_MS * 3 / 2)
    return {
        "title": f"Figure 16: {work} {'beside a flow' if beside else 'alone'}",
        "until": setting.ms(END_MS),
        "interval": "1ms",
        # The worker's own NIC is where its job and the flow meet: it marks, or neither hears of it.
        "network": setting.rack(8, setting.HOSTS_FREE, ecn=mark, nic_ecn=nic_ecn),
        "switch": {"aggregators": 4096},
        "job": [{**job, "server": "h6", "start": start}],
        "background": [{**flow, "kind": "tcp"}] if beside else [],
    }


def _name(work: str, mark: str, beside: bool) -> str:
    return f"background-{work}-{mark}-{'beside' if beside else 'alone'}"


def _by_alone(runs: dict[str, Runs], mark: str) -> Spread:
    both = zip(
        runs[_name("vgg16", mark, True)].reports,
        runs[_name("vgg16", mark, False)].reports,
        strict=True,
    )
    return Spread.of([_goodput(beside) / _goodput(alone) for beside, alone in both])


def _by_fair(runs: Runs) -> Spread:
    return runs.spread(lambda report: _goodput(report) / FAIR_GBPS)


def _goodput(report: Report) -> float:
    return _settled(report["jobs"][0]["series"]["aggregation_gbps"])


def _wire(report: Report) -> float:
    # A segment of 1460 bytes takes 1538 of the link.
    flow = _settled(report["background"][0]["delivered_gbps"])
    return _goodput(report) / PAYLOAD_SHARE + flow * 1538 / 1460


def _settled(series: Sequence[float]) -> float:
    part = series[int(SETTLED_MS) : int(END_MS) - 1]
    return sum(part) / len(part)


EXPERIMENT = Experiment(
    "background", "Beside a flow that fills one worker's uplink (Figure 16)", run, why
)
