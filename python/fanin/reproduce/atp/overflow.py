"""§B.2, Table 1: packets that a proactive overflow mechanism keeps from the switch for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_1 = {8: 37_002, 16: 231_528, 32: 1_156_126, 64: 14_602_998}
FITTED = 8
SCALING = 1e8
ELEMENTS = 62
"""Of the paper's packet: 248 bytes."""
PARAMETERS = 25_557_032
IMAGES = 1_281_167
BATCH = 32
SENT = -(-PARAMETERS // ELEMENTS) * (IMAGES / BATCH)
"""Packets of an epoch. Each worker sends all packets of an iteration, and an epoch has
IMAGES / (BATCH n) of these, so their number is the same for any n."""
TAIL = 3.0
"""Gradients have heavy tails. A value is beyond a bound x with a probability of (s / x)^3; the
exponent is a round one, s is fitted to the table's first line."""
WHAT = "ResNet50, {} workers: false positives an epoch"
TAILS = [2.5, 3.5, 4.0]
"""Other exponents, for the reasons."""
SAMPLES = 4_000_000
SAMPLES_QUICK = 400_000


def run(lab: Lab) -> Outcome:
    """Draw gradients, and count by the table's rule."""
    found = _counted(lab, TAIL)
    # Of a heavy tail, a sum that does not fit is nearly always one value that does not.
    overflows = SENT * ELEMENTS * (_scale(TAIL) * SCALING / 2**31) ** TAIL

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        counts = list(TABLE_1)
        axes.plot(counts, list(TABLE_1.values()), "ks--", label="paper (Table 1)")
        medians = [Spread.of(found[workers]).median for workers in counts]
        axes.plot(counts, medians, "C0o-", label=f"ours, fitted at {FITTED} workers")
        label = "reactive (ours): packets that do overflow"
        axes.plot(counts, [overflows] * len(counts), "C2^-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(workers) for workers in counts])
        finish(axes, "workers", "packets an epoch")

    return Outcome(
        [
            Finding(
                "Table 1",
                WHAT.format(workers),
                float(count),
                Spread.of(found[workers]),
                cannot_fail="the distribution's scale is fitted to it" if workers == FITTED else "",
            )
            for workers, count in TABLE_1.items()
        ],
        draw,
        {"false_positives": found, "overflows": overflows, "tail": TAIL},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let the tail be heavier or lighter."""
    counted = {tail: _counted(lab, tail) for tail in TAILS}
    return [
        Reason(WHAT.format(workers), f"a tail of exponent {tail:g}", Spread.of(found[workers]))
        for tail, found in counted.items()
        for workers in TABLE_1
        if workers != FITTED
    ]


def _counted(lab: Lab, tail: float) -> dict[int, list[float]]:
    """Return the false positives of an epoch by the number of workers, for each seed."""
    import numpy as np

    samples = SAMPLES_QUICK if lab.quick else SAMPLES
    found: dict[int, list[float]] = {workers: [] for workers in TABLE_1}
    for seed in lab.seeds:
        generator = np.random.default_rng(seed)
        for workers in TABLE_1:
            found[workers].append(SENT * _share(generator, workers, tail, samples))
    return found


def _scale(tail: float) -> float:
    """Return the scale of the distribution with which the table's first line is as it is."""
    return float(bound(FITTED) * (TABLE_1[FITTED] / SENT / ELEMENTS) ** (1 / tail))


def bound(workers: int) -> float:
    """Return the largest value that cannot overflow if all workers have it (§B.2)."""
    return (2**31 - workers) / (workers * SCALING)


def _share(generator: Any, workers: int, tail: float, samples: int) -> float:
    """Return the share of packets that are false positives.

    A packet beyond the bound is rare, so only such are drawn: one value of it is Pareto from the
    bound on; the values of others at its place are drawn from the whole distribution.
    """
    import numpy as np

    scale = _scale(tail)
    over = ELEMENTS * (scale / bound(workers)) ** tail
    draws = max(1, samples // workers)
    sign = generator.choice([-1.0, 1.0], (draws, workers))
    # Pareto beyond s, even below it: P(|x| > y) = (s / y)^tail for y > s.
    values = scale * generator.random((draws, workers)) ** (-1 / tail) * sign
    values[:, 0] = bound(workers) * generator.random(draws) ** (-1 / tail)
    overflowing = np.abs(values.sum(axis=1)) * SCALING >= 2**31
    return float(over * (1 - overflowing.mean()))


EXPERIMENT = Experiment(
    "overflow", "False positives of proactive overflow handling (Table 1)", run, why
)
