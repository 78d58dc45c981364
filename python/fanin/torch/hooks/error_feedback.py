"""The errors of rounding a rank's gradients to int8 or int4, added to those of its next step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakIdKeyDictionary

from fanin import _fanin
from fanin._settings import Packed
from fanin.torch.works.collectives import DTYPES

# As crates/quant/src/packed.rs has it: elements that share a step, and what the widths are.
BLOCK: Final = 32


class _Width(NamedTuple):
    """How a step is made of the bits of the largest magnitude, and the largest that has one."""

    beyond: int
    """The factor that lifts a mantissa above the largest level's to the next exponent."""
    exponent_max: int
    largest: float
    is_coarse: bool
    """Whether from 4 and from 8 steps on levels are 2 and 4 apart."""


_WIDTHS: Final[Mapping[Packed, _Width]] = {
    "int8": _Width(0x1FFFF, 6, 127.0 * 2.0**121, False),
    "int4": _Width(0x3FFFFF, 3, 12.0 * 2.0**124, True),
}
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

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters that are still there, and what is missing of each."""
        begin = 0
        for each in self.parameters:
            parameter = each()
            if parameter is None:
                return  # nobody knows how long it was
            yield parameter, self.missing[begin : begin + parameter.numel()]
            begin += parameter.numel()


class ErrorFeedback:
    """The residuals of one rank's buckets, in float32: as much memory again as its gradients.

    Those of several models, whose steps may alternate. DDP cuts other buckets after the first step,
    and when it is made anew: what is missing of a parameter goes with it into its new bucket.
    """

    def __init__(self, wire_dtype: Packed) -> None:
        self._wire_dtype: Packed = wire_dtype
        self._residuals: list[_Residual] = []
        # The errors of parameters whose new bucket has not come yet.
        # Any: torch does not say the types of its methods.
        self._loose: Any = WeakIdKeyDictionary()
        # All parameters in the order in which they came: their places are their numbers.
        self._known: list[weakref.ref[torch.Tensor]] = []
        # By such numbers: what was loaded of parameters that have not come yet.
        self._loaded: dict[int, torch.Tensor] = {}

    def round(self, bucket: GradBucket) -> None:
        """Add to a bucket what rounding took of it before, and round it to what its width can say.

        What is left in the bucket travels unchanged, however the network rounds it.
        """
        gradients = bucket.buffer()
        if gradients.dtype not in _ROUNDED or gradients.numel() <= _AS_IT_IS_MAX:
            return
        residual = self._residual(bucket.parameters(), gradients)
        if gradients.device.type == "cpu":
            elements, dtype = gradients.numel(), DTYPES[gradients.dtype]
            address, rest = gradients.data_ptr(), residual.data_ptr()
            _fanin.feed_back(address, elements, dtype, rest, self._wire_dtype)
        else:
            feed_back(gradients, residual, self._wire_dtype)

    def state(self) -> list[dict[str, Any]]:
        """Return the residuals by their parameters' numbers, as tensors and numbers."""
        numbers = {id(each()): number for number, each in enumerate(self._known)}
        missing = dict(self._loaded)
        for residual in self._residuals:
            for parameter, part in residual.parts():
                missing[numbers[id(parameter)]] = part
        for parameter, part in self._loose.items():
            missing[numbers[id(parameter)]] = part
        return [{"number": n, "missing": part.clone()} for n, part in sorted(missing.items())]

    def load(self, state: Any) -> None:
        """Go on with residuals that `state` returned; raises `ValueError` for anything else."""
        if self._known:
            raise RuntimeError(
                "residuals are loaded before the first backward pass: make a new HookState, and "
                "load them into that"
            )
        if not isinstance(state, list) or not all(map(_is_residual, state)):
            raise ValueError("the checkpoint is damaged: its residuals are no tensors with numbers")
        self._loaded = {each["number"]: each["missing"] for each in state}

    def _residual(self, parameters: list[torch.Tensor], gradients: torch.Tensor) -> torch.Tensor:
        found = next((each for each in self._residuals if each.is_of(parameters)), None)
        if found is None:
            self._introduce(parameters)
            for before in [each for each in self._residuals if each.is_over(parameters)]:
                self._loose.update(before.parts())
                self._residuals.remove(before)
            parts = [self._part(each, gradients.device) for each in parameters]
            found = _Residual([weakref.ref(each) for each in parameters], torch.cat(parts))
            self._residuals.append(found)
        return found.missing

    def _introduce(self, parameters: list[torch.Tensor]) -> None:
        """Give new ones their numbers, and what was loaded of them."""
        known = {id(each()) for each in self._known}
        for parameter in parameters:
            if id(parameter) in known:
                continue
            loaded = self._loaded.get(len(self._known))
            if loaded is not None and loaded.numel() != parameter.numel():
                raise ValueError(
                    f"the checkpoint is of another model: its parameter {len(self._known)}, as DDP "
                    f"brings them, has {loaded.numel()} elements, and that of this model "
                    f"{parameter.numel()}"
                )
            if loaded is not None:
                self._loose[parameter] = loaded
            self._loaded.pop(len(self._known), None)
            self._known.append(weakref.ref(parameter))

    def _part(self, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
        part = self._loose.pop(parameter, None)
        if part is None:
            return torch.zeros(parameter.numel(), dtype=torch.float32, device=device)
        return cast(torch.Tensor, part.to(device))


def feed_back(gradients: torch.Tensor, residual: torch.Tensor, wire_dtype: Packed) -> None:
    """Do on any device what `_fanin.feed_back` does, which on a CPU is many times faster."""
    to = _WIDTHS[wire_dtype]
    whole = gradients.numel() // BLOCK * BLOCK
    for part, width in ((slice(None, whole), BLOCK), (slice(whole, None), -1)):
        rest = residual[part]
        if rest.numel() == 0:
            continue
        rest.add_(gradients[part])
        blocks = rest.view(-1, BLOCK) if width > 0 else rest.view(1, -1)
        magnitude = torch.linalg.vector_norm(blocks, torch.inf, dim=1, keepdim=True)
        step, finite = _step(magnitude, to), magnitude <= to.largest
        if to.is_coarse:
            steps = (blocks / step).abs_()
            step = step * (1 + (steps >= 4).float() + 2 * (steps >= 8).float())
        # Exact except for the rounding: a step is a power of two.
        rounded = torch.where(finite, (blocks / step).round_() * step, blocks)
        gradients[part].copy_(rounded.view(-1))
        missing = (rest - gradients[part]).view_as(blocks)
        # The nearest float16 may be an infinity.
        blocks.copy_(torch.where(finite & missing.isfinite(), missing, 0.0))


def _step(magnitude: torch.Tensor, to: _Width) -> torch.Tensor:
    """Return the least power of two, from 2^-126 on, with which the levels reach a magnitude."""
    exponent = ((magnitude.view(torch.int32) + to.beyond) >> 23) - to.exponent_max
    return (exponent.clamp_(min=1) << 23).view(torch.float32)


def _is_residual(each: Any) -> bool:
    """Whether it is what rounding took of one parameter, with the parameter's number."""
    if not isinstance(each, dict) or not isinstance(each.get("number"), int):
        return False
    missing = each.get("missing")
    return isinstance(missing, torch.Tensor) and missing.dim() == 1 and missing.is_floating_point()
