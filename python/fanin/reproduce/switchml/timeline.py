"""§6.3, Figure 7: how a tensor goes on while every link loses packets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin.reproduce.finding import LESS, Experiment, Finding, Outcome, at_least
from fanin.reproduce.lab import Lab, Report
from fanin.reproduce.plot import finish
from fanin.reproduce.switchml import loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = [0.0, 1e-4, 1e-2]
PIECES, PIECES_QUICK = 200, 80


def run(lab: Lab) -> Outcome:
    """Sum one tensor, and look at what each hundredth of its time has brought."""
    pieces = PIECES_QUICK if lab.quick else PIECES
    runs = lab.play(
        {f"timeline-{at:g}": loss.scenario("switchml", at, pieces) for at in LOSSES},
        throughputs=False,
    )

    def series(report: Report) -> list[float]:
        of_job = report["jobs"][0]
        # The last interval is cut short by the end.
        until = int(of_job["finished_s"] / report["interval_s"])
        return list(of_job["series"]["aggregation_gbps"][:until])

    ideal = runs["timeline-0"].spread(lambda report: _mean(series(report))).median

    def close(report: Report) -> float:
        return _mean(series(report)) / ideal

    def slows(report: Report) -> float:
        found = series(report)
        fifth = max(1, len(found) // 5)
        return _mean(found[-fifth:]) / _mean(found[: len(found) - fifth])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at in LOSSES:
            report = runs[f"timeline-{at:g}"].reports[0]
            found = series(report)
            times = [1000 * report["interval_s"] * (n + 0.5) for n in range(len(found))]
            axes.plot(times, found, label=f"loss {100 * at:g} %")
        finish(axes, "time (ms)", "elements summed at a worker (Gbit/s)")

    little, much = (runs[f"timeline-{at:g}"] for at in LOSSES[1:])
    return Outcome(
        [
            Finding(
                "§6.3, Fig. 7",
                "0.01 % loss: mean rate by that without loss",
                "relatively close to the ideal: 0.8 at least",
                little.spread(close),
                holds=at_least(0.8),
                unit="x",
            ),
            Finding(
                "§6.3, Fig. 7",
                "1 % loss: the rate of the last fifth of the time by that before",
                "less than 1: some slots are behind, and none takes work from them",
                much.spread(slows),
                holds=LESS,
                unit="x",
            ),
        ],
        draw,
        {f"gbps at {at:g}": series(runs[f"timeline-{at:g}"].reports[0]) for at in LOSSES},
    )


def _mean(series: list[float]) -> float:
    return sum(series) / len(series)


EXPERIMENT = Experiment("timeline", "A tensor's sums over time, 10 Gbit/s (Figure 7)", run)
