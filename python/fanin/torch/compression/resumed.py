"""The part of a `CompressionState` that is in a checkpoint, and the first step after it.

The rest of a bucket belongs to a list of parameters. After a restart DDP cuts other buckets in
its first step than it had before, and from the second step on the same ones again. So in the first
step the gradients of all buckets are collected, cut as they were before, and exchanged so. A
training that goes on from a checkpoint then has the same bits as one that was never interrupted.

A parameter's number is its place among those that DDP brings in its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from fanin.torch.compression.cut import Cut

VERSION: Final = 1
Average = Callable[["Bucket"], torch.futures.Future[Tensor]]


class Bucket:
    """As much of DDP's bucket as is needed, of gradients that are elsewhere."""

    def __init__(self, index: int, is_last: bool, parts: list[tuple[Tensor, Tensor]]) -> None:
        self._index, self._is_last, self._parts = index, is_last, parts
        self._buffer = torch.cat([gradient.reshape(-1) for _, gradient in parts])
        flat = torch.split(self._buffer, [gradient.numel() for _, gradient in parts])
        self._gradients = [
            each.view(gradient.shape) for each, (_, gradient) in zip(flat, parts, strict=True)
        ]

    def index(self) -> int:
        """Return its number, in the order in which buckets are exchanged."""
        return self._index

    def is_last(self) -> bool:
        """Return whether the step has no other behind it."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients, one behind the other."""
        return self._buffer

    def parameters(self) -> list[Tensor]:
        """Return what the gradients are of."""
        return [parameter for parameter, _ in self._parts]

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return self._gradients

    def put_back(self) -> None:
        """Write the averages over the gradients."""
        for (_, gradient), average in zip(self._parts, self._gradients, strict=True):
            gradient.copy_(average)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is found to be one."""

    step: int
    shapes: list[list[int]]
    """The parameters' shapes, by their numbers."""
    buckets: list[list[int]]
    """The parameters' numbers."""
    unsent: dict[int, tuple[Tensor, Tensor]]
    """By bucket: what was not sent of the gradient, and of the own shard's sum."""
    velocities: dict[int, Tensor]
    dice: Tensor | None

    @staticmethod
    def of(state: Mapping[str, Any], terms: Mapping[str, Any]) -> Saved:
        """Read a checkpoint; raises `ValueError` if it is of other terms, or is none."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise ValueError(
                "this is no checkpoint that CompressionState.state_dict of this fanin has made"
            )
        for name, own in terms.items():
            if state.get(name) != own:
                raise ValueError(
                    f"the checkpoint is of {name} {state.get(name)}, and this state of {own}: "
                    "each rank loads what it saved itself, in a job of as many ranks, with the "
                    "same compressor and numbers"
                )
        try:
            found = Saved(**{field: state[field] for field in Saved.__dataclass_fields__})
            if found._is_whole(terms["ranks"]):
                return found
        except (AttributeError, IndexError, KeyError, TypeError):
            pass
        raise ValueError("the checkpoint is damaged: its parts do not fit each other")

    def _is_whole(self, ranks: int) -> bool:
        numbers = sorted(number for bucket in self.buckets for number in bucket)
        if not self.unsent.keys() <= set(range(len(self.buckets))):
            return False
        for index, unsent in self.unsent.items():
            cut = Cut.of(sum(prod(self.shapes[n]) for n in self.buckets[index]), ranks)
            if [list(each.shape) for each in unsent] != [[cut.padded], [1, cut.length]]:
                return False
        of_parameters = (list(v.shape) == self.shapes[n] for n, v in self.velocities.items())
        return numbers in ([], list(range(len(self.shapes)))) and all(of_parameters)

    def check(self, parameters: list[Tensor]) -> None:
        """Raise `ValueError` unless it is of a model with such parameters."""
        shapes = [list(parameter.shape) for parameter in parameters]
        if shapes != self.shapes:
            raise ValueError(
                "the checkpoint is of another model: its parameters, as DDP brings them, have the "
                f"shapes {self.shapes}, and those of this model {shapes}"
            )


class FirstStep:
    """The first step after a checkpoint was loaded: buckets are exchanged as they were before."""

    def __init__(self, saved: Saved, known: list[Tensor]) -> None:
        """Take the parameters by their numbers, if there was a step before."""
        self.saved = saved
        self.known = known
        self._buckets: list[list[Tensor]] = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    def take(
        self, bucket: GradBucket, resume: Callable[[list[Tensor]], None], average: Average
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket; with the last one all are averaged, after `resume` got the parameters.

        Raises `ValueError` in the last one if the checkpoint is another model's.
        """
        if bucket.index() == 0:
            # They are of a backward pass that an error ended.
            self._buckets, self._gradients, self._waiting = [], {}, []
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = None
        if buffer.device.type != "cpu":
            devices = [buffer.device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._waiting.append((buffer, done))
        self._buckets.append(bucket.parameters())
        self._gradients.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if bucket.is_last():
            parameters = self.known or list(self._gradients)
            if self._gradients.keys() != set(parameters):
                parameters = list(self._gradients)
            self.saved.check(parameters)
            resume(parameters)
            cut = [[parameters[n] for n in numbers] for numbers in self.saved.buckets]
            cut = cut or self._buckets
            buckets = [
                Bucket(index, index == len(cut) - 1, [(p, self._gradients[p]) for p in each])
                for index, each in enumerate(cut)
            ]
            for each, averaged in [(each, average(each)) for each in buckets]:
                average_of = averaged.wait()
                each.buffer().copy_(average_of)
                each.put_back()
            for its_buffer, its_done in self._waiting:
                its_done.set_result(its_buffer)
        # DDP dies of an exception in a future that was made in Python, and not of one in its child.
        return done.then(lambda future: future.value())
