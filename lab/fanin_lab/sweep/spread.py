"""A figure over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BOUNDING = 6
"""Samples of which the least and the most bound the median with 95 % confidence."""


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    median: float
    least: float
    most: float
    interval: tuple[float, float]
    """In which the median of all seeds lies with 95 % confidence, whatever the distribution; with
    fewer than six seeds there is no such interval, and it is all that was seen."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of one figure in runs with different seeds.

        Where one of them was not measured (NaN), none is.
        """
        if any(map(math.isnan, samples)):
            return cls(math.nan, math.nan, math.nan, (math.nan, math.nan))
        ordered = sorted(samples)
        cut = _ranks_cut(len(ordered))
        interval = ordered[cut], ordered[-1 - cut]
        return cls(statistics.median(ordered), ordered[0], ordered[-1], interval)

    @classmethod
    def over(cls, spreads: Sequence[Spread]) -> Spread:
        """Return the spread of the medians, one for each value of what is swept.

        Its interval has all of the spreads' intervals.
        """
        found = cls.of([spread.median for spread in spreads])
        lows, highs = zip(*(spread.interval for spread in spreads), strict=True)
        # NaN, if one is, whatever its place.
        interval = cls.of(lows).least, cls.of(highs).most
        return cls(found.median, found.least, found.most, interval)

    @classmethod
    def of_each(cls, samples: Iterable[Sequence[float]]) -> Spread:
        """Return the spread over what is swept, of the samples with each value."""
        return cls.over([cls.of(of_value) for of_value in samples])


def in_brackets(seeds: int) -> str:
    """Return what the intervals of so many seeds are."""
    return "their 95 % intervals" if seeds >= BOUNDING else "least and most"


def _ranks_cut(samples: int) -> int:
    """Return how many of the least and of the most lie outside the median's 95 % interval.

    The median lies below the sample of rank r + 1 when at most r of n fair coins show heads.
    """
    below, cut = 0.0, 0
    for rank in range(samples // 2):
        below += math.comb(samples, rank) / 2**samples
        if 2 * below > 0.05:
            break
        cut = rank
    return cut
