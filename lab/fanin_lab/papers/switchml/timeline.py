"""§6.3, Figure 7: what a worker sends over time while links lose packets, in Figure 6's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import LESS, Finding, at_least
from fanin_lab.papers.lab import Report, Runs
from fanin_lab.papers.plot import finish
from fanin_lab.papers.switchml import setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSSES = [0.0, 1e-4, 1e-2]
WORKER = ("h0", "s0")
"""The link of the worker that is looked at."""


def findings(runs: Mapping[float, Runs], *, whole: bool) -> Sequence[Finding]:
    """Return what SwitchML's runs show, by loss; `whole` is whether the tensor is the paper's."""
    little, much = runs[1e-4], runs[1e-2]
    ideal = runs[0.0].spread(lambda report: _mean(_sent(report))).median

    def close(report: Report) -> float:
        return _mean(_sent(report)) / ideal

    found = [
        Finding(
            "§6.3, Fig. 7",
            "0.01 % loss: packets sent in a second by that without loss",
            "relatively close to the ideal: 0.8 at least",
            little.spread(close),
            holds=at_least(0.8),
            unit="x",
        ),
        Finding(
            "§6.3, Fig. 7",
            "1 % loss: packets sent in a second in the last fifth of the time by before",
            "less than 1: some slots are behind, and none takes work from them",
            much.spread(_slows),
            holds=LESS,
            unit="x",
        ),
    ]
    if whole:
        found.append(
            Finding(
                "§6.3, Fig. 7",
                "1 % loss: the last moment at which as much is sent as in the first half",
                150.0,
                much.spread(_slow_from_ms),
                unit="ms",
            )
        )
    return found


def draw(axes: Axes, runs: Mapping[float, Runs]) -> None:
    """Draw Figure 7, of the first seed."""
    for at in LOSSES:
        report = runs[at].reports[0]
        sent = _sent(report)
        times = [1000 * report["interval_s"] * (n + 0.5) for n in range(len(sent))]
        axes.plot(times, sent, label=f"loss {100 * at:g} %")
    axes.set_ylim(0)
    finish(axes, "time (ms)", "packets that a worker sends in a millisecond", "Figure 7")


def series(runs: Mapping[float, Runs]) -> dict[str, Any]:
    """Return what is drawn."""
    return {f"packets in each ms at {at:g}": _sent(runs[at].reports[0]) for at in LOSSES}


def _slows(report: Report) -> float:
    sent = _sent(report)
    fifth = max(1, len(sent) // 5)
    return _mean(sent[-fifth:]) / _mean(sent[: len(sent) - fifth])


def _slow_from_ms(report: Report) -> float:
    sent = _sent(report)
    usual = _mean(sent[: len(sent) // 2])
    last = max(at for at, packets in enumerate(sent) if packets >= usual)
    return float(1e3 * report["interval_s"] * (last + 1))


def _sent(report: Report) -> list[float]:
    """Return how many packets the worker sent in each interval, but for the last, cut short one."""
    [link] = [one for one in report["links"] if (one["from"], one["to"]) == WORKER]
    packets = 1e9 * link["rate_gbps"] * report["interval_s"] / 8 / setting.WIRE_BYTES
    until = int(report["jobs"][0]["finished_s"] / report["interval_s"])
    return [load * packets for load in link["loads"][:until]]


def _mean(series: list[float]) -> float:
    return sum(series) / len(series)
