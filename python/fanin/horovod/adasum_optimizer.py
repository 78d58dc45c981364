"""Steps of each rank by itself, whose changes of the parameters are reduced by Adasum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fanin.horovod import operations
from fanin.horovod.compression import Compressor
from fanin.horovod.operations import Adasum, synchronize
from fanin.horovod.parameters import Passes, name_added, when_ready


class AdasumSteps(torch.optim.Optimizer):
    """What is put before an optimizer's class: each gradient is stepped with when it is there."""

    def prepare_adasum(
        self, names: dict[Tensor, str], passes: Passes, compression: Compressor
    ) -> None:
        """Step with each gradient when it is there."""
        self._names = names
        self._passes = passes
        self._compression = compression
        self._under_way: dict[Tensor, tuple[Any, Any]] = {}
        self._required: list[Tensor] = []
        self._watch([parameter for each in self.param_groups for parameter in each["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as all ranks do; they are named by their place."""
        super().add_param_group(param_group)
        added = name_added(self, self._names)
        self._passes.add(added)
        self._watch(added)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up another number of passes from now on."""
        self._passes.each = passes
        self._passes.begin(self._passes.of)

    def synchronize(self) -> None:
        """Do nothing: `step` waits."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise: a step and its reduction are one with Adasum."""
        raise AssertionError("with Adasum there is nothing to skip: step() is the reduction")
        yield

    def step(self, closure: Any = None) -> Any:
        """Wait for what all ranks' steps change, and change the parameters by it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._required:
            if parameter not in self._under_way:
                self._start(parameter)
        with torch.no_grad():
            for parameter, (handle, context) in self._under_way.items():
                parameter.add_(self._compression.decompress(synchronize(handle), context))
        self._under_way = {}
        self._passes.begin(self._passes.of)
        return loss

    def zero_grad(self, *args: Any, **keywords: Any) -> None:
        """Forget gradients; raises `AssertionError` while they are under way."""
        if self._under_way:
            raise AssertionError(
                "zero_grad() is called between backward() and step(), while changes are being "
                "reduced: call it before backward()"
            )
        super().zero_grad(*args, **keywords)

    def _watch(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self._required.append(parameter)
                when_ready(parameter, self._gradient_is_there)

    def _gradient_is_there(self, parameter: Tensor) -> None:
        if self._passes.ready(parameter):
            self._start(parameter)

    def _start(self, parameter: Tensor) -> None:
        """Step with one gradient, and reduce the change; the parameter is as it was until then."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        kept = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [each for each in group["params"] if each is parameter]
        try:
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, kept, strict=True):
                group["params"] = parameters
        with torch.no_grad():
            change = parameter.detach() - before
            parameter.copy_(before)
        sent, context = self._compression.compress(change)
        handle = operations.allreduce_async_(sent, name=self._names[parameter], op=Adasum)
        self._under_way[parameter] = handle, context
