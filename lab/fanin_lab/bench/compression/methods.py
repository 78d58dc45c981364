"""The ways to send gradients, by the names that the command takes."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Final, cast

from fanin._settings import PACKED, WireDtype

if TYPE_CHECKING:
    from fanin.torch import HookState
    from fanin.torch.compression import Compressor
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

UNCOMPRESSED_STEPS: Final = 2
"""Of every method alike: PowerSGD of torch has at least two."""
AS_THEY_ARE: Final = "float32"

# Bytes of an element. Each 32 elements of int8 and int4 have a byte more for their step. Shared
# exponents save none.
_WIRE_BYTES: Final[Mapping[WireDtype, float]] = {
    "native": 4,
    "bfloat16": 2,
    "int8": 33 / 32,
    "int4": 17 / 32,
}
# By what packets bring, and what the wire dtype is called.
_WIRE: Final[Mapping[str, WireDtype]] = {
    AS_THEY_ARE if wire_dtype == "native" else wire_dtype: wire_dtype for wire_dtype in _WIRE_BYTES
}
_PLAIN = "plain"
_NAMES = "onebit, topk:0.01, randomk:0.1, dithering:7, natural:7, powersgd:4"


@dataclass(frozen=True)
class Method:
    """One of them."""

    name: str
    wire_dtype: WireDtype = "native"
    """Of the group that it uses."""
    compressor: Compressor | None = None
    powersgd: int | None = None
    """The rank of its matrices."""
    is_hooked: bool = False
    """Whether DDP's hook adds to gradients what rounding took of those before."""

    def register(
        self,
        model: DistributedDataParallel,
        group: ProcessGroup,
        feedback: bool = True,
        momentum: float = 0.0,
    ) -> None:
        """Let a model's gradients be sent so; also short ones, as they are to be compared.

        The momentum is for those that are fanin's own: see `CompressionState`.
        """
        if self.compressor is not None:
            from fanin.torch import CompressionState, compression_hook

            state = CompressionState(
                self.compressor,
                error_feedback=feedback,
                momentum=momentum,
                uncompressed_steps=UNCOMPRESSED_STEPS,
                min_bytes=0,
                process_group=group,
            )
            model.register_comm_hook(state, compression_hook)
        elif self.powersgd is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            of_torch = powerSGD_hook.PowerSGDState(
                group,
                matrix_approximation_rank=self.powersgd,
                start_powerSGD_iter=UNCOMPRESSED_STEPS,
                use_error_feedback=feedback,
                orthogonalization_epsilon=1e-8,
            )
            model.register_comm_hook(of_torch, powerSGD_hook.powerSGD_hook)
        elif self.is_hooked and feedback:
            from fanin.torch import allreduce_hook

            model.register_comm_hook(_hook_state(self.wire_dtype, group), allreduce_hook)

    @property
    def has_feedback(self) -> bool:
        """Whether it keeps what it did not send."""
        return self.is_hooked or self.compressor is not None or self.powersgd is not None

    def sent_bytes(self, shapes: Sequence[Sequence[int]], ranks: int) -> int:
        """Return what a rank sends in a step, where the ranks are each other's services."""
        from fanin.torch.compression.compressors import VALUE_BYTES, summed_bytes
        from fanin.torch.compression.cut import Cut

        elements = sum(map(prod, shapes))
        if self.compressor is not None:
            return self.compressor.sent_bytes(Cut.of(elements, ranks))
        if self.powersgd is not None:
            sent = sum(_factors(shape, self.powersgd) for shape in shapes)
            return summed_bytes(VALUE_BYTES * sent, ranks)
        return summed_bytes(ceil(_WIRE_BYTES[self.wire_dtype] * elements), ranks)


@cache
def _hook_state(wire_dtype: WireDtype, group: ProcessGroup) -> HookState:
    """Return the state for all models of a group: its job is joined once."""
    from fanin.torch import HookState

    return HookState(process_group=group, wire_dtype=wire_dtype)


def _factors(shape: Sequence[int], rank: int) -> int:
    """Return how many values PowerSGD sends of a gradient: where that is not half of it, all."""
    rows = shape[0] if shape else 1
    columns = prod(shape[1:])
    sent = (rows + columns) * min(rows, columns, rank)
    return sent if len(shape) > 1 and 2 * sent < rows * columns else rows * columns


def method(text: str) -> Method:
    """Parse "onebit", "topk:0.01", "bfloat16", "int8:plain" (without error feedback), ..

    Raises `ArgumentTypeError`.
    """
    name, _, number = text.partition(":")
    if not number and name in _WIRE:
        return Method(text, wire_dtype=_WIRE[name], is_hooked=_WIRE[name] in PACKED)
    if number == _PLAIN and name in PACKED:
        return Method(text, wire_dtype=_WIRE[name])
    try:
        return _compressing(text, name, number)
    except (KeyError, ValueError) as error:
        why = f": {error}" if isinstance(error, ValueError) else ""
        raise ArgumentTypeError(
            f"{text!r} is no way to send gradients{why}; write {', '.join(_WIRE)}, {_NAMES}"
        ) from None


def _compressing(text: str, name: str, number: str) -> Method:
    from fanin.torch.compression import Dithering, OneBit, RandomK, TopK

    if name == "onebit" and not number:
        return Method(text, compressor=OneBit())
    if name == "powersgd":
        rank = int(number)
        if rank < 1:
            raise ValueError("its matrices have a rank of 1 or more")
        return Method(text, powersgd=rank)
    k: Any = float(number) if "." in number else int(number)
    made: dict[str, Callable[[], object]] = {
        "topk": lambda: TopK(k),
        "randomk": lambda: RandomK(k),
        "dithering": lambda: Dithering(k),
        "natural": lambda: Dithering(k, partition="natural"),
    }
    return Method(text, compressor=cast("Compressor", made[name]()))


def defaults() -> list[str]:
    """Return the names of the methods that are shown where none are given."""
    return [*_WIRE, *_NAMES.split(", ")]
