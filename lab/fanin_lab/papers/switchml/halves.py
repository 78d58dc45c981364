"""Appendix E, Figure 12: float16 by float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Report, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.papers.switchml import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
RATES = [10, 100]
TENSORS = {"float32": "8MB", "float16": "4MB"}
"""As in the paper, float16 is half of the tensor (§6.3); the same packets."""


def run(lab: Lab) -> Outcome:
    """Sum one tensor and half of one."""
    runs = lab.play(
        {
            f"halves-{dtype}-{gbps}": {
                "title": f"Figure 12: {dtype} at {gbps} Gbit/s",
                "network": setting.rack(WORKERS, gbps),
                "job": [setting.job("switchml", WORKERS, gbps, tensor=tensor, tensors=1)],
            }
            for dtype, tensor in TENSORS.items()
            for gbps in RATES
        },
        # Nothing in it is random: every seed would give the same.
        once=True,
        throughputs=False,
    )

    def time(report: Report) -> float:
        return float(report["jobs"][0]["tensor_times"]["mean_s"])

    times = {
        dtype: [runs[f"halves-{dtype}-{gbps}"].spread(time).median for gbps in RATES]
        for dtype in TENSORS
    }
    ratios = [one / half for one, half in zip(times["float32"], times["float16"], strict=True)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, dtype in enumerate(TENSORS):
            places = [n + 0.35 * (at - 0.5) for n in range(len(RATES))]
            axes.bar(places, [1000 * s for s in times[dtype]], 0.35, label=dtype)
        axes.set_xticks(range(len(RATES)), [f"{gbps} Gbit/s" for gbps in RATES])
        finish(axes, "", "time of 2 million elements (ms)")

    return Outcome(
        [
            Finding(
                "§6.3, Fig. 12",
                f"{gbps} Gbit/s: time of float32 by that of float16",
                2.0,
                Spread.of([ratio]),
                unit="x",
                cannot_fail="half of the tensor stands for float16, here and there",
            )
            for gbps, ratio in zip(RATES, ratios, strict=True)
        ],
        draw,
        {"seconds": times},
    )


EXPERIMENT = Experiment("halves", "float32 and float16 (Figure 12)", run)
