"""When a loss costs nothing: epochs to a target, beside those without loss (DLCP §2.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from fanin.profile import Metric

from fanin_lab.sweep.spread import Spread

MARGIN = 0.05
"""Which part of the epochs more is none: what `fanin reproduce` calls no effect, too."""

Verdict = Literal["as without loss", "cannot tell", "costs epochs"]


def epochs_to(target: float, curve: Sequence[float], metric: Metric) -> float:
    """Return after how many epochs a training reached the target; infinity where it did not.

    ``curve`` has the metric after each epoch. Between two of them it is a straight line, so that a
    difference of less than an epoch is seen, but before the first one nothing is known.
    """
    sign = 1 if metric == "accuracy" else -1
    before = math.nan
    for epoch, value in enumerate(curve, 1):
        if sign * value >= sign * target:
            # An infinite loss before is a line that comes down at the very end.
            part = (target - before) / (value - before) if math.isfinite(before) else 1.0
            return epoch - 1 + part
        before = value
    return math.inf


def cost(epochs: Sequence[float], without_loss: Sequence[float]) -> Spread:
    """Return which part of the epochs a loss costs in addition; a pair for each seed.

    Infinite where a training with loss did not reach the target.
    """
    return Spread.of([a / b - 1 for a, b in zip(epochs, without_loss, strict=True)])


def verdict(found: Spread) -> Verdict:
    """Return what the interval says: all of it within the margin, all of it above, or neither."""
    low, high = found.interval
    if high <= MARGIN:
        return "as without loss"
    return "costs epochs" if low > MARGIN else "cannot tell"


def bound(costs: Mapping[float, Spread]) -> tuple[float, float]:
    """Return between which probabilities of loss the bound is.

    The first is the largest one at which, and below which, all that was tried is as without loss; 0
    if none is. The second is the smallest one that costs epochs, or else infinity.
    """
    verdicts = {probability: verdict(costs[probability]) for probability in sorted(costs)}
    tolerated = 0.0
    for probability, said in verdicts.items():
        if said != "as without loss":
            break
        tolerated = probability
    costly = [probability for probability, said in verdicts.items() if said == "costs epochs"]
    return tolerated, min(costly, default=math.inf)
