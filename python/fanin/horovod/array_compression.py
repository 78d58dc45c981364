"""Compressors of TensorFlow's and Keras's tensors: their type, and the one that does nothing."""

from __future__ import annotations

from typing import Any, Protocol


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
