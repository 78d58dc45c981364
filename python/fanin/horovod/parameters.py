"""Names of parameters, and passes: distributed optimizers share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fanin.horovod.errors import HorovodInternalError


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the name of each parameter; raises `ValueError` if one has none, or a name is twice.

    Names that are not given are the places in the optimizer's groups.
    """
    parameters = [
        (f"parameter.{number}.{place}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {parameter: name for name, parameter in parameters}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters are pairs, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has names twice: {', '.join(sorted(twice))}")
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(parameter not in names for _, parameter in parameters)
    if unnamed:
        raise ValueError(
            f"{unnamed} of the optimizer's {len(parameters)} parameters are not in named_parameters"
        )
    return names


def name_added(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> list[Tensor]:
    """Name the parameters of an optimizer's last group, and return them: it was added later."""
    number = len(optimizer.param_groups) - 1
    parameters: list[Tensor] = optimizer.param_groups[-1]["params"]
    names.update((each, f"added.{number}.{place}") for place, each in enumerate(parameters))
    return parameters


def when_ready(parameter: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call something each time that a parameter's gradient has been computed."""
    register: Any = parameter.register_post_accumulate_grad_hook
    register(call)


def all_of(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, also after one that fails, and raise the first failure at the end."""
    failures = []
    for call in calls:
        try:
            call()
        except HorovodInternalError as error:
            failures.append(error)
    if failures:
        raise failures[0]


class Passes:
    """How many backward passes each parameter's gradient still waits for."""

    def __init__(self, of: Iterable[Tensor], each: int) -> None:
        self.each = each
        self.of = list(of)
        self._left: dict[Tensor, int] = {}
        self.begin(self.of)

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Wait for all passes again."""
        self._left.update(dict.fromkeys(parameters, self.each))

    def add(self, parameters: list[Tensor]) -> None:
        """Count the passes of further parameters, too."""
        self.of += parameters
        self.begin(parameters)

    def ready(self, parameter: Tensor) -> bool:
        """Count a pass, and return whether it was the last one."""
        if self._left[parameter] == 0:
            raise AssertionError(
                f"one backward() too many: {self.each} of them make a step by "
                "backward_passes_per_step, so call step(), or set that higher"
            )
        self._left[parameter] -= 1
        return self.is_ready(parameter)

    def is_ready(self, parameter: Tensor) -> bool:
        """Whether all passes have been counted."""
        return self._left[parameter] == 0
