"""What staging asks of a device, so that its logic can be tried without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

# A point in a device's work that can be waited for: for CUDA, an event.
Mark = Any


class Copies(Protocol):
    """Copies between a device's memory and the host's, in order within each direction and device.

    No method but `block_host` waits for the device. All may be called from any thread.
    """

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in a memory that the network cannot read."""

    def begin(self, tensor: torch.Tensor) -> Mark:
        """Hold the memory for the copies of a collective, for the thread that asks for it.

        Return the mark of all that the thread's current stream was given: of what makes the tensor.
        """

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return host memory, as bytes, that copies run into and out of asynchronously."""

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Mark]) -> Mark:
        """Copy device to host, once the marks are reached. Both are contiguous and alike."""

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Copy host, or device, to a tensor on the device, of any strides."""

    def arrived(self, device: torch.device) -> Mark:
        """Return the mark of all that was copied in so far."""

    def reached(self, mark: Mark) -> bool:
        """Whether the device is past the mark."""

    def block_host(self, mark: Mark) -> None:
        """Wait for the mark, without the GIL."""

    def block_stream(self, device: torch.device, mark: Mark) -> None:
        """Let what the calling thread's current stream is given from now on wait for the mark."""

    def future_devices(self, tensors: Sequence[torch.Tensor]) -> list[torch.device]:
        """Return what `torch.futures.Future` must know to order its users' streams."""

    def complete(
        self,
        future: torch.futures.Future[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        marks: Mapping[torch.device, Mark],
    ) -> None:
        """Set the result such that users of the future come after the marks. Runs callbacks."""
