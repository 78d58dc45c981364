"""Gradients in fewer bits on their way: Horovod's two compressors, for tensors of any backend."""

from __future__ import annotations

from typing import Any

from keras import backend, ops

from fanin.horovod.array_compression import Compressor as Compressor
from fanin.horovod.array_compression import NoneCompressor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, str]:
        """Return the tensor in float16, and its dtype; others than floats as they are."""
        dtype = backend.standardize_dtype(tensor.dtype)
        return (ops.cast(tensor, "float16") if "float" in dtype else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: str) -> Any:
        """Return the tensor in the dtype that it had."""
        return ops.cast(tensor, ctx)


class Compression:
    """The compressors by Horovod's names."""

    none = NoneCompressor()
    fp16 = FP16Compressor()
