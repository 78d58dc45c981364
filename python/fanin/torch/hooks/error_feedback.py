"""What rounding to int8 takes of a rank's gradients, added to those of its next step."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

import torch
from torch._C._distributed_c10d import GradBucket

from fanin import _fanin
from fanin.torch.works.collectives import DTYPES

# As crates/quant/src/packed.rs has it: elements that share a step, how a step is made of the bits
# of their largest magnitude, and the largest that has one.
BLOCK: Final = 32
_BEYOND_127: Final = 0x1FFFF
_LARGEST: Final = 127.0 * 2.0**121
# Longer ones are rounded on their way, of these types (docs/wire.md).
_AS_IT_IS_MAX: Final = 4096
_ROUNDED: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass
class _Residual:
    """What is missing in the gradients of a bucket's parameters."""

    parameters: list[weakref.ref[torch.Tensor]]
    missing: torch.Tensor

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether it is of these, in this order."""
        return [id(each()) for each in self.parameters] == [id(each) for each in parameters]

    def is_over(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether it has one of those that are in another bucket now, or that is no more."""
        held = [each() for each in self.parameters]
        elsewhere = {id(each) for each in parameters}
        return any(each is None or id(each) in elsewhere for each in held)


class ErrorFeedback:
    """The residuals of one rank's buckets, in float32: as much memory again as its gradients.

    Those of several models, whose steps may alternate. DDP may cut other buckets after the first
    step, or when it is made anew: a bucket of other parameters begins without a residual.
    """

    def __init__(self) -> None:
        self._residuals: list[_Residual] = []

    def round(self, bucket: GradBucket) -> None:
        """Add to a bucket what rounding took of it before, and round it to what int8 can say.

        What is left in the bucket travels unchanged, however the network rounds it.
        """
        gradients = bucket.buffer()
        if gradients.dtype not in _ROUNDED or gradients.numel() <= _AS_IT_IS_MAX:
            return
        residual = self._residual(bucket.parameters(), gradients)
        if gradients.device.type == "cpu":
            elements, dtype = gradients.numel(), DTYPES[gradients.dtype]
            _fanin.feed_back(gradients.data_ptr(), elements, dtype, residual.data_ptr())
        else:
            feed_back(gradients, residual)

    def _residual(self, parameters: list[torch.Tensor], gradients: torch.Tensor) -> torch.Tensor:
        found = next((each for each in self._residuals if each.is_of(parameters)), None)
        if found is None:
            missing = torch.zeros_like(gradients, dtype=torch.float32)
            found = _Residual([weakref.ref(each) for each in parameters], missing)
            self._residuals = [
                found,
                *(each for each in self._residuals if not each.is_over(parameters)),
            ]
        return found.missing


def feed_back(gradients: torch.Tensor, residual: torch.Tensor) -> None:
    """Do on any device what `_fanin.feed_back` does, which on a CPU is many times faster."""
    whole = gradients.numel() // BLOCK * BLOCK
    for part, width in ((slice(None, whole), BLOCK), (slice(whole, None), -1)):
        rest = residual[part]
        if rest.numel() == 0:
            continue
        rest.add_(gradients[part])
        blocks = rest.view(-1, BLOCK) if width > 0 else rest.view(1, -1)
        magnitude = torch.linalg.vector_norm(blocks, torch.inf, dim=1, keepdim=True)
        step, finite = _step(magnitude), magnitude <= _LARGEST
        # Exact except for the rounding: a step is a power of two.
        rounded = torch.where(finite, (blocks / step).round_() * step, blocks)
        gradients[part].copy_(rounded.view(-1))
        missing = (rest - gradients[part]).view_as(blocks)
        # The nearest float16 may be an infinity.
        blocks.copy_(torch.where(finite & missing.isfinite(), missing, 0.0))


def _step(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the least power of two by which a magnitude is at most 127, down to 2^-126."""
    exponent = ((magnitude.view(torch.int32) + _BEYOND_127) >> 23) - 6
    return (exponent.clamp_(min=1) << 23).view(torch.float32)
