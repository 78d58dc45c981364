"""Adasum of NumPy arrays; `adasum.py` is the same of torch's tensors, and has the source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fanin.arrays.operators import Array


def adasum(arrays: Sequence[Array]) -> Array:
    """Return the adaptive sum of a power of two of arrays: of neighbours, then of those pairs."""
    level = list(arrays)
    while len(level) > 1:
        level = [_of_two(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _of_two(a: Array, b: Array) -> Array:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    along = float(np.vdot(wide_a, wide_b))
    of_a = 1.0 - _share(along, float(np.vdot(wide_a, wide_a)))
    of_b = 1.0 - _share(along, float(np.vdot(wide_b, wide_b)))
    return (of_a * wide_a + of_b * wide_b).astype(a.dtype)


def _share(along: float, square: float) -> float:
    """Return how much of an array the other one has, halved; nothing of an array of zeros."""
    return along / (2.0 * square) if square > 0 else 0.0
