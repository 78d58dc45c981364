"""§2.2, Figure 2: smaller gradients end earlier in the mean, and not in the tail."""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.dlcp import setting
from fanin_lab.papers.finding import Range
from fanin_lab.papers.lab import Scenario
from fanin_lab.papers.plot import Level, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, figure, ratio
from fanin_lab.sweep import words

HOSTS = 80
BYTES = "27.2MB"
"""6.8 million parameters of GoogLeNet, of four bytes each."""
FACTORS = Either([1, 2, 4, 8, 16], quick=[2, 16])
"""Of compression; 1 is the original job."""
MEAN_MS = {2: 4.19, 16: 0.78}
TAIL_MS = 10.0
"""The paper's, with every factor: about one shortest retransmission timeout."""
SWEPT: list[dict[str, Any]] = [
    {},
    {"alpha": 8.0},
    {"port_buffer": "200kB"},
    {"delay": "5us"},
    {"initial_window": "1460B"},
    {"initial_window": "5840B"},
    {"alpha": 8.0, "initial_window": "5840B"},
]
"""The paper gives neither the switch's way to share its memory nor the links' delay, nor, for this
figure, TCP's first window: one segment (RFC 2001), four (RFC 3390), or ten (RFC 6928)."""
OVER = (
    "16 MB shared with alpha 1 or 8 or split among ports, links of 1 or 5 us, first windows of 1, "
    "4 or 10 segments"
)


def scenario(
    factor: int,
    alpha: float = 1.0,
    port_buffer: str | None = None,
    delay: str = "1us",
    initial_window: str | None = None,
) -> Scenario:
    """Return 80 workers that send to 80 servers beside them, all at once."""
    shared = {"shared_buffer": "16MB", "alpha": alpha}
    first = {"initial_window": initial_window} if initial_window else {}
    memory = {"port_buffer": port_buffer} if port_buffer else shared
    return {
        "title": f"Figure 2: compressed by {factor}",
        "until": "5s",
        "network": {"topology": "rack", "hosts": HOSTS, "queue": "16MB", "delay": delay, **memory},
        "parameter_server": [
            {
                "name": "googlenet",
                "workers": HOSTS,
                "tensor": BYTES,
                "compression": float(factor),
                "divide_above": "0B",
                "transport": {"rto_min": "10ms", **first},
            }
        ],
    }


_mean_ms, _tail_ms = setting.flow_time_ms("mean_s"), setting.flow_time_ms("p99_s")


def picture(at: At) -> Picture:
    """Show mean and tail by the factor, a line for each setting."""
    factors = at.values("factor")

    def label(of: At) -> str:
        return words.settings(of.setting) if of.setting else f"usual ({words.setting('alpha', 1)})"

    panels = []
    papers: dict[str, Mark] = {
        "mean": Line(list(MEAN_MS), list(MEAN_MS.values()), "x", "paper", {"color": "black"}),
        "99th percentile": Level(TAIL_MS, "paper"),
    }
    for read, (title, paper) in zip((_mean_ms, _tail_ms), papers.items(), strict=True):
        lines = [
            Line(
                factors,
                [of.spread(read, factor=factor).median for factor in factors],
                "o-",
                label(of),
                {"color": f"C{number}"},
            )
            for number, of in enumerate(at.settings)
        ]
        x, y = "compression factor", "flow completion time (ms)"
        panels.append(Panel([*lines, paper], x, y, title, log_x=2, least_y=0))
    return Picture(panels)


EXPERIMENT = Simulated(
    "compression",
    "Completion times of compressed gradients (Figure 2)",
    scenario,
    # Settings differ by more than seeds do.
    [Cases({"factor": FACTORS}, Either(SWEPT, quick=[{}]), seeds_swept=1, throughputs=False)],
    [
        *(
            Row(
                "Fig. 2",
                f"mean completion time at a factor of {factor}",
                paper,
                figure(_mean_ms, factor=factor),
                "ms",
            )
            for factor, paper in MEAN_MS.items()
        ),
        *(
            Row(
                "Fig. 2",
                f"tail completion time (99 %) at a factor of {factor}",
                TAIL_MS,
                figure(_tail_ms, factor=factor),
                "ms",
            )
            for factor in MEAN_MS
        ),
        Row(
            "Fig. 2",
            "tail at a factor of 16, by that at a factor of 2",
            "almost the same",
            ratio(_tail_ms, {"factor": 16}, {"factor": 2}),
            "x",
            Range(0.8, 1.25),
        ),
    ],
    picture,
    over=OVER,
).experiment()
