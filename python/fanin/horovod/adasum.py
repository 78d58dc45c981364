"""Adasum: gradients that point alike are averaged, and those at right angles are added.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021), Equation 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the adaptive sum of a power of two of tensors: of neighbours, then of those pairs."""
    level = list(tensors)
    while len(level) > 1:
        level = [_of_two(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _of_two(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    along = torch.dot(wide_a, wide_b)
    of_a = 1.0 - _share(along, torch.dot(wide_a, wide_a))
    of_b = 1.0 - _share(along, torch.dot(wide_b, wide_b))
    return (of_a * a.double() + of_b * b.double()).to(a.dtype)


def _share(along: Tensor, square: Tensor) -> Tensor:
    """Return how much of a tensor the other one has, halved; nothing of a tensor of zeros."""
    return torch.where(square > 0, along / (2.0 * square.clamp_min(1e-300)), 0.0)
