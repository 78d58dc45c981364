"""§5.5, Figure 16: jobs beside a flow that would fill one worker's link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Report, Spread
from fanin.reproduce.plot import PAPER, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE_GBPS = 100.0
"""The paper's links: here they are the bottleneck, and not its hosts."""
SCALE = 200.0
START_MS, STOP_MS, END_MS = 4.0, 30.0, 32.0
SETTLED_MS = 16.0
"""Windows grow by an MTU in a round trip, and need hundreds of these to settle."""
PAYLOAD_SHARE = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
WORKS: dict[str, dict[str, Any]] = {
    "vgg16": {
        "model": "vgg16",
        "batch": setting.BATCH,
        "flops": setting.FLOPS,
        "scale": SCALE,
    },
    "micro": {"tensor": "250kB", "in_flight": 12},
}


def run(lab: Lab) -> Outcome:
    """Let the flow run alone, then beside a job, then alone again."""
    runs = lab.play(
        {
            f"background-{work}-{'beside' if beside else 'alone'}": {
                "title": f"Figure 16: {work} {'beside a flow' if beside else 'alone'}",
                "until": setting.ms(END_MS),
                "interval": "1ms",
                "network": setting.rack(8, rate=f"{RATE_GBPS:g}Gbit"),
                "switch": {"aggregators": 4096},
                "job": [
                    setting.job(
                        workers=6,
                        server="h6",
                        start=setting.ms(START_MS),
                        stop=setting.ms(STOP_MS),
                        **keys,
                    )
                ],
                # Towards the worker: the switch's queue marks, a host's own does not.
                "background": [{"from": "h7", "to": "h0", "kind": "tcp"}] if beside else [],
            }
            for work, keys in WORKS.items()
            for beside in (False, True)
        }
    )

    def settled(series: Sequence[float]) -> float:
        part = series[int(SETTLED_MS) : int(STOP_MS) - 1]
        return sum(part) / len(part)

    def goodput(report: Report) -> float:
        return settled(report["jobs"][0]["series"]["aggregation_gbps"])

    def flow(report: Report) -> float:
        return settled(report["background"][0]["delivered_gbps"])

    alone = {work: runs[f"background-{work}-alone"].spread(goodput) for work in WORKS}
    beside = {work: runs[f"background-{work}-beside"] for work in WORKS}

    def wire(report: Report) -> float:
        # A segment of 1460 bytes takes 1538 of the link.
        return goodput(report) / PAYLOAD_SHARE + flow(report) * 1538 / 1460

    fair = RATE_GBPS / 2 * PAYLOAD_SHARE

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, 2, sharey=True)
        for axes, work in zip(many, WORKS, strict=True):
            report = beside[work].reports[0]
            job = report["jobs"][0]["series"]["aggregation_gbps"]
            other = report["background"][0]["delivered_gbps"]
            times = [at + 0.5 for at in range(min(len(job), len(other)))]
            together = [one + two for one, two in zip(job, other, strict=False)]
            axes.plot(times, job[: len(times)], "C0-", label="ATP")
            axes.plot(times, other[: len(times)], "C1-", label="other flow")
            axes.plot(times, together, "C2:", label="together")
            label = "paper: what the job gets alone" if work == "vgg16" else "paper: fair share"
            axes.axhline(alone[work].median if work == "vgg16" else fair, **PAPER, label=label)
            axes.set_ylim(0, 105)
            title = "VGG16" if work == "vgg16" else "micro-benchmark"
            finish(axes, "time (ms)", "goodput at the worker (Gbit/s)", title)

    vgg = [goodput(r) / alone["vgg16"].median for r in beside["vgg16"].reports]
    micro = [goodput(r) / fair for r in beside["micro"].reports]
    return Outcome(
        [
            Finding(
                "Fig. 16a",
                "VGG16 beside a flow, by VGG16 alone",
                1.0,
                Spread.of(vgg),
                unit="x",
                why=WHY_VGG,
            ),
            Finding(
                "Fig. 16b",
                "micro-benchmark beside a flow, by its fair share of the link",
                1.0,
                Spread.of(micro),
                unit="x",
                why=WHY_MICRO,
            ),
            *(
                Finding(
                    f"Fig. 16{letter}",
                    f"{name} and flow together, of the link's rate",
                    100.0,
                    beside[work].spread(wire),
                    unit="%",
                    why=WHY_VGG,
                )
                for letter, work, name in (
                    ("a", "vgg16", "VGG16"),
                    ("b", "micro", "micro-benchmark"),
                )
            ),
        ],
        draw,
        {"alone_gbps": {work: alone[work].median for work in WORKS}, "fair_gbps": fair},
    )


WHY_VGG = (
    "gradients come in bursts that want more than half of the link (beside a constant 50 Gbit/s it "
    "is 0.93), and each finds a flow that grew while the job computed"
)
WHY_MICRO = WHY_VGG

EXPERIMENT = Experiment("background", "Beside a flow that fills one worker's link (Figure 16)", run)
