"""Gradients in fewer bits on their way: Horovod's two compressors, for tensors of any backend."""

from __future__ import annotations

from typing import Any, Protocol

from keras import backend, ops


class Compressor(Protocol):
    """The type of `compression=`: a class, or an object, with two functions."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return what is sent, and what `decompress` needs to know."""
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return what was sent as it was."""
        ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:  # noqa: ARG004
        """Return the tensor."""
        return tensor


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
