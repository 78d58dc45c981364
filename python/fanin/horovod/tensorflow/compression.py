"""Gradients in fewer bits on their way: Horovod's two compressors.

`FANIN_WIRE_DTYPE` (docs/settings.md) makes the packets smaller, and leaves tensors as they are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fanin.horovod.array_compression import Compressor as Compressor
from fanin.horovod.array_compression import NoneCompressor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16, and its dtype; others than floats as they are."""
        is_floating = tensor.dtype.is_floating
        return (tf.cast(tensor, tf.float16) if is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors by Horovod's names."""

    none = NoneCompressor()
    fp16 = FP16Compressor()
