"""Steps of each rank by itself, whose changes of the parameters are reduced by Adasum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fanin.horovod import operations
from fanin.horovod.compression import Compressor
from fanin.horovod.parameters import Passes, all_of, name_added, when_ready
from fanin.horovod.submission import Adasum, synchronize


class AdasumSteps(torch.optim.Optimizer):
    """What is put before an optimizer's class: what a step changes, Adasum reduces."""

    def prepare_adasum(
        self, names: dict[Tensor, str], passes: Passes, compression: Compressor
    ) -> None:
        """Count the passes of each gradient."""
        self._names = names
        self._passes = passes
        self._compression = compression
        self._watched: list[Tensor] = []
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
        """Step alone, take that back, and change the parameters by what all ranks' steps make."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._passes.begin(self._passes.of)
        with torch.no_grad():
            before = [parameter.clone() for parameter in self._watched]
            for parameter in self._watched:
                if parameter.grad is None:  # others may have it
                    parameter.grad = torch.zeros_like(parameter)
            super().step()
            finishing = []
            for parameter, was in zip(self._watched, before, strict=True):
                sent, context = self._compression.compress(parameter - was)
                parameter.copy_(was)
                handle = operations.allreduce_async_(sent, name=self._names[parameter], op=Adasum)
                finishing.append(partial(self._change, parameter, handle, context))
            all_of(finishing)
        return loss

    def _change(self, parameter: Tensor, handle: Any, context: Any) -> None:
        parameter.add_(self._compression.decompress(synchronize(handle), context))

    def _watch(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self._watched.append(parameter)
                when_ready(parameter, self._count)

    def _count(self, parameter: Tensor) -> None:
        self._passes.ready(parameter)
