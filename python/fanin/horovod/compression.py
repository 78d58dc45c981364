"""Gradients in fewer bits on their way: Horovod's two compressors.

`FANIN_WIRE_DTYPE` (docs/settings.md) makes the packets smaller, and leaves tensors as they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """What `compression=` takes: a class, or an object, with two functions."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what `decompress` needs to know."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return what was sent as it was."""
        ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor in float16, and its dtype; others than floats as they are."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The compressors by Horovod's names."""

    none = NoneCompressor()
    fp16 = FP16Compressor()
