"""Which gradients of a step are reduced together, as `groups=` says it; no framework is known."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average

Groups = int | Sequence[Sequence[Any]]
"""A number of groups, or lists of variables; the others are each alone."""


def checked(
    groups: Groups | None, num_groups: int, op: ReduceOp, predivide: float
) -> Groups | None:
    """Return the groups. Raises `ValueError` for a number below 1, and for a wrong factor."""
    if predivide != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is a part of the average: op must be Average")
    if num_groups:
        warnings.warn("num_groups is deprecated: give groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups is {groups}: a number above 0, or lists of variables")
    return groups


def grouped(
    there: Sequence[int], variables: Sequence[Any], groups: Groups | None
) -> list[list[int]]:
    """Return the places of gradients that are `there`, those together that go together."""
    if groups is None:
        return [[place] for place in there]
    if isinstance(groups, int):
        least, more = divmod(len(there), groups)
        lengths = [least + 1] * more + [least] * (groups - more)
        rest = iter(there)
        lists = [[next(rest) for _ in range(length)] for length in lengths]
        return [places for places in lists if places]
    group_of = {id(variable): number for number, group in enumerate(groups) for variable in group}
    together: dict[int, list[int]] = {}
    for place in there:
        number = group_of.get(id(variables[place]), -1 - place)
        together.setdefault(number, []).append(place)
    return list(together.values())
