"""Optimizers made of others: with other steps before theirs, or for some of their parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Settings = dict[str, Any]
"""What an optimizer's group is but for its parameters: its learning rate, ..."""


def with_steps(optimizer: torch.optim.Optimizer, steps: type[Any]) -> Any:
    """Return an optimizer with the given one's state and settings, and other steps before its."""
    made_of = type(type(optimizer).__name__, (steps, type(optimizer)), {})
    made: Any = object.__new__(made_of)
    vars(made).update(_all_but_step(optimizer))
    return made


class StepsOfFew:
    """Steps some of an optimizer's parameters as it would step all of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._few: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(self._few).update(_all_but_step(optimizer))
        # They are for steps of all.
        self._few._optimizer_step_pre_hooks = OrderedDict()
        self._few._optimizer_step_post_hooks = OrderedDict()

    def step(self, groups: Sequence[tuple[Settings, list[Tensor]]], state: Any) -> None:
        """Step the parameters of each group by its settings; `state` is of all."""
        self._few.state = state
        self._few.param_groups = [
            {**settings, "params": parameters} for settings, parameters in groups
        ]
        self._few.step()


def settings_of(group: dict[str, Any]) -> Settings:
    """Return the settings of an optimizer's group as they are now."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _all_but_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # A scheduler has put one there to count the calls.
    return {name: value for name, value in vars(optimizer).items() if name != "step"}
