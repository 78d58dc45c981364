"""Appendix E, Figure 12: float16 by float32."""

from __future__ import annotations

from fanin_lab.papers.lab import Report, Scenario
from fanin_lab.papers.plot import Bars, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Row, Simulated, ratio
from fanin_lab.papers.switchml import setting

WORKERS = 8
RATES = [10, 100]
TENSORS = {"float32": "8MB", "float16": "4MB"}
"""As in the paper, float16 is half of the tensor (§6.3); the same packets."""


def scenario(dtype: str, gbps: int) -> Scenario:
    """Return one tensor's sum, or that of half of one."""
    return {
        "title": f"Figure 12: {dtype} at {gbps} Gbit/s",
        "network": setting.rack(WORKERS, gbps),
        "job": [setting.job("switchml", WORKERS, gbps, tensor=TENSORS[dtype], tensors=1)],
    }


def _time_s(report: Report) -> float:
    return float(report["jobs"][0]["tensor_times"]["mean_s"])


def picture(at: At) -> Picture:
    """Show the times by rate."""

    def bars(number: int, dtype: str) -> Bars:
        places = [place + 0.35 * (number - 0.5) for place in range(len(RATES))]
        times = [1000 * at.spread(_time_s, dtype=dtype, gbps=gbps).median for gbps in RATES]
        return Bars(places, times, dtype, 0.35)

    ticks = {place: f"{gbps} Gbit/s" for place, gbps in enumerate(RATES)}
    both = [bars(number, dtype) for number, dtype in enumerate(TENSORS)]
    return Picture([Panel(both, "", "time of 2 million elements (ms)", ticks=ticks)])


EXPERIMENT = Simulated(
    "halves",
    "float32 and float16 (Figure 12)",
    scenario,
    # Nothing in it is random: every seed would give the same.
    [Cases({"dtype": TENSORS, "gbps": RATES}, seeds=1, throughputs=False)],
    [
        Row(
            "§6.3, Fig. 12",
            f"{gbps} Gbit/s: time of float32 by that of float16",
            2.0,
            ratio(_time_s, {"dtype": "float32", "gbps": gbps}, {"dtype": "float16", "gbps": gbps}),
            "x",
            cannot_fail="half of the tensor stands for float16, here and there",
        )
        for gbps in RATES
    ],
    picture,
).experiment()
