"""Optimizers made of others: with other steps before theirs, or for some of their parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

Settings = dict[str, Any]
"""What an optimizer's group is but for its parameters: its learning rate, ..."""


class Steps(torch.optim.Optimizer):
    """What is put before an optimizer's class, once."""

    named: ClassVar[str]
    """The function that puts it there."""


def with_steps(optimizer: torch.optim.Optimizer, steps: type[Any]) -> Any:
    """Return an optimizer with the given one's state and settings, and other steps before its.

    Raises `ValueError` for one that has `Steps` before its own already.
    """
    if isinstance(optimizer, Steps):
        raise ValueError(f"{optimizer.named} has made the optimizer already: give the one it is of")
    made_of = type(type(optimizer).__name__, (steps, type(optimizer)), {})
    made: Any = object.__new__(made_of)
    vars(made).update(all_but_step(optimizer))
    return made


class StepsOfFew:
    """Steps some of an optimizer's parameters as it would step all of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._few: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(self._few).update(all_but_step(optimizer))
        # They are for steps of all.
        self._few._optimizer_step_pre_hooks = OrderedDict()
        self._few._optimizer_step_post_hooks = OrderedDict()

    @property
    def unscales(self) -> bool:
        """Whether the optimizer itself does what a gradient scaler says, as fused ones do."""
        return bool(getattr(self._few, "_step_supports_amp_scaling", False))

    def step(self, groups: Sequence[tuple[Settings, list[Tensor]]], state: Any) -> None:
        """Step the parameters of each group by its settings; `state` is of all.

        Raises `RuntimeError` where the optimizer writes to its settings: it would do so for some
        of its parameters, and not for others.
        """
        self._few.state = state
        self._few.param_groups = [
            {**settings, "params": parameters} for settings, parameters in groups
        ]
        self._few.step()
        for group, (settings, _) in zip(self._few.param_groups, groups, strict=True):
            written = [
                name
                for name, value in group.items()
                if name != "params" and not _is_same(value, settings.get(name, _NONE))
            ]
            if written or len(group) != len(settings) + 1:
                names = ", ".join(written) or "one of them"
                raise RuntimeError(
                    f"{type(self._few).__name__} writes to its settings in a step ({names}), and "
                    "here each parameter steps by itself: train with DistributedDataParallel"
                )


def settings_of(group: dict[str, Any]) -> Settings:
    """Return the settings of an optimizer's group as they are now."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


_NONE = object()


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return value is before
    return bool(value == before)


def all_but_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer has."""
    # A scheduler has put one there to count the calls.
    return {name: value for name, value in vars(optimizer).items() if name != "step"}
