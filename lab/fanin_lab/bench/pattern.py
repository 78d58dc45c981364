"""The numbers that ranks sum: whole and small, so that the exact sum is known. Without torch."""

from __future__ import annotations

from typing import Any, TypeVar

PATTERN_MAX = 127
"""The largest absolute value of an element."""

_PERIOD = 97
_Numbers = TypeVar("_Numbers", bound=Any)


def pattern(rank: int, ramp: _Numbers) -> _Numbers:
    """Return a rank's elements, of the array 0, 1, .. of numpy or torch."""
    found: _Numbers = (ramp + 31 * rank) % _PERIOD - 48
    return found


def offset(number: int, tensor: int) -> int:
    """Return what a tensor adds to the pattern in that round: no two rounds sum alike."""
    return (5 * number + 3 * tensor) % 73
