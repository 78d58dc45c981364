"""§5.2.2, Figure 9: traffic into the parameter server, aggregated at two levels or at one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import PAPER, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = {"atp": "ATP", "rss": "rack-scale service", "ps": "no aggregation"}
PAPER_RATIO = 3.0
TENSORS = 8
TENSOR_BYTES = 1_000_000


def run(lab: Lab) -> Outcome:
    """Count the bytes that the server receives for the same tensors."""
    tensors = 2 if lab.quick else TENSORS
    runs = lab.play(
        {
            f"rack-scale-{system}": {
                "title": f"Figure 9: {name}",
                "network": setting.network("figure9"),
                "switch": setting.switch(),
                "job": [
                    setting.job(
                        system,
                        workers=[f"w{worker}" for worker in range(6)],
                        server="ps",
                        tensor=f"{TENSOR_BYTES}B",
                        tensors=tensors,
                    )
                ],
            }
            for system, name in SYSTEMS.items()
        },
        # Nothing in it is random.
        once=True,
        throughputs=False,
    )
    received = {
        system: [
            report["servers"][0]["received_bytes"] / (tensors * TENSOR_BYTES)
            for report in runs[f"rack-scale-{system}"].reports
        ]
        for system in SYSTEMS
    }
    ratios = [rss / atp for rss, atp in zip(received["rss"], received["atp"], strict=True)]
    reductions = [100 * (1 - 1 / ratio) for ratio in ratios]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        medians = [Spread.of(received[system]).median for system in SYSTEMS]
        bars = axes.bar(list(SYSTEMS.values()), medians, color=["C0", "C1", "C7"])
        axes.bar_label(bars, fmt="%.2f")
        axes.axhline(PAPER_RATIO * medians[0], **PAPER, label="paper: 3 times ATP's")
        finish(axes, "", "bytes into the server a byte of gradients")

    return Outcome(
        [
            Finding(
                "§5.2.2, Fig. 9",
                "traffic into the server, rack-scale service by ATP",
                PAPER_RATIO,
                Spread.of(ratios),
                unit="x",
                cannot_fail=COUNTING,
            ),
            Finding(
                "abstract",
                "less traffic than the rack-scale service in the multi-rack cluster",
                66.0,
                Spread.of(reductions),
                unit="%",
                cannot_fail=COUNTING,
            ),
        ],
        draw,
        {"bytes_by_gradient_byte": received},
    )


COUNTING = "three racks send three sums where ATP sends one: arithmetic of the topology"

EXPERIMENT = Experiment(
    "rack-scale", "Two racks and a server's (Figure 9): traffic into the server", run
)
