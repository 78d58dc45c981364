"""§2.2, Figure 2: smaller gradients end earlier in the mean, and not in the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import PAPER, finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOSTS = 80
BYTES = "27.2MB"
"""6.8 million parameters of GoogLeNet, of four bytes each."""
FACTORS = [1, 2, 4, 8, 16]
"""Of compression; 1 is the original job."""
TAIL_MS = 10.0
"""The paper's, with every factor: about one shortest retransmission timeout."""
SWEPT: list[dict[str, Any]] = [
    {},
    {"alpha": 8.0},
    {"port_buffer": "200kB"},
    {"delay": "5us"},
]
"""The paper gives neither the switch's way to share its memory nor the links' delay."""
OVER = "16 MB shared with alpha 1 or 8 or split among ports, links of 1 or 5 us"


def run(lab: Lab) -> Outcome:
    """Let 80 workers send to 80 servers beside them, all at once."""
    factors = [2, 16] if lab.quick else FACTORS
    swept = SWEPT[:1] if lab.quick else SWEPT
    runs = {
        **lab.play(_scenarios(factors, swept[:1]), throughputs=False),
        # Settings differ by more than seeds do.
        **lab.play(_scenarios(factors, swept[1:]), once=True, throughputs=False),
    }

    def over(factor: int, of: str) -> Spread:
        return Spread.over([_spread(runs[_name(factor, more)], of) for more in swept])

    def flat() -> Spread:
        def ratio(more: dict[str, Any]) -> Spread:
            ends = [
                runs[_name(factor, more)].samples(lambda report: _ms(report, "p99_s"))
                for factor in (16, 2)
            ]
            return Spread.of([last / first for last, first in zip(*ends, strict=True)])

        return Spread.over([ratio(more) for more in swept])

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, 2)
        for axes, of, title in zip(
            many, ("mean_s", "p99_s"), ("mean", "99th percentile"), strict=True
        ):
            for at, more in enumerate(swept):
                spreads = [_spread(runs[_name(factor, more)], of) for factor in factors]
                label = words.settings(more) if more else f"usual ({words.setting('alpha', 1)})"
                medians = [spread.median for spread in spreads]
                axes.plot(factors, medians, "o-", color=f"C{at}", label=label)
            if of == "p99_s":
                axes.axhline(TAIL_MS, **PAPER, label="paper")
            else:
                axes.plot([2, 16], [4.19, 0.78], "x", color="black", label="paper")
            axes.set_xscale("log", base=2)
            axes.set_ylim(0)
            finish(axes, "compression factor", "flow completion time (ms)", title)

    swept_over = "" if lab.quick else OVER
    return Outcome(
        [
            Finding(
                "Fig. 2",
                "mean completion time at a factor of 2",
                4.19,
                over(2, "mean_s"),
                unit="ms",
                swept=swept_over,
            ),
            Finding(
                "Fig. 2",
                "mean completion time at a factor of 16",
                0.78,
                over(16, "mean_s"),
                unit="ms",
                swept=swept_over,
            ),
            *(
                Finding(
                    "Fig. 2",
                    f"tail completion time (99 %) at a factor of {factor}",
                    TAIL_MS,
                    over(factor, "p99_s"),
                    unit="ms",
                    swept=swept_over,
                )
                for factor in (2, 16)
            ),
            Finding(
                "Fig. 2",
                "tail at a factor of 16, by that at a factor of 2",
                "almost the same",
                flat(),
                holds=Range(0.8, 1.25),
                unit="x",
                swept=swept_over,
            ),
        ],
        draw,
        {
            "factors": factors,
            "settings": swept,
            "mean_ms": [[over(factor, "mean_s").median] for factor in factors],
            "tail_ms": [[over(factor, "p99_s").median] for factor in factors],
        },
    )


def _scenarios(factors: list[int], settings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {_name(factor, more): _scenario(factor, more) for factor in factors for more in settings}


def _scenario(factor: int, more: dict[str, Any]) -> dict[str, Any]:
    if "port_buffer" in more:
        memory = {"port_buffer": more["port_buffer"]}
    else:
        memory = {"shared_buffer": "16MB", "alpha": more.get("alpha", 1.0)}
    return {
        "title": f"Figure 2: compressed by {factor}",
        "until": "5s",
        "network": {
            "topology": "rack",
            "hosts": HOSTS,
            "queue": "16MB",
            "delay": more.get("delay", "1us"),
            **memory,
        },
        "parameter_server": [
            {
                "name": "googlenet",
                "workers": HOSTS,
                "tensor": BYTES,
                "compression": float(factor),
                "divide_above": "0B",
                "transport": {"rto_min": "10ms"},
            }
        ],
    }


def _name(factor: int, more: dict[str, Any]) -> str:
    return "-".join([f"compression-{factor}", *(f"{key}-{value}" for key, value in more.items())])


def _spread(runs: Runs, of: str) -> Spread:
    return runs.spread(lambda report: _ms(report, of))


def _ms(report: Report, of: str) -> float:
    (job,) = report["parameter_servers"]
    return 1e3 * float(job["flow_times"][of])


EXPERIMENT = Experiment("compression", "Completion times of compressed gradients (Figure 2)", run)
