"""Copies between CUDA devices and pinned host memory, on streams of their own."""

# The methods are documented in `copies`.
# ruff: noqa: D102

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch


class _Streams(NamedTuple):
    """One a direction: the two directions of the bus run at the same time."""

    out: torch.cuda.Stream
    into: torch.cuda.Stream


class CudaCopies:
    """`Copies` of CUDA devices. Touches CUDA only when the first CUDA tensor comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, _Streams] = {}

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def begin(self, tensor: torch.Tensor) -> torch.cuda.Event:
        device = tensor.device
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a collective of the backend fanin cannot be captured into a CUDA graph: the "
                    "host takes part in it; call it outside of the capture"
                )
        # Our copies are queued on streams that the caching allocator does not know. Otherwise it
        # would hand the memory on as soon as nobody refers to the tensor.
        for stream in self._of(device):
            tensor.record_stream(stream)
        return _mark(torch.cuda.current_stream(device))

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy_out(
        self, source: torch.Tensor, host: torch.Tensor, after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        stream = self._of(source.device).out
        for mark in after:
            stream.wait_event(mark)
        return _copy(stream, source, host)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        return _copy(self._of(target.device).into, source, target)

    def arrived(self, device: torch.device) -> torch.cuda.Event:
        return _mark(self._of(device).into)

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]  # torch's

    def block_host(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def block_stream(self, device: torch.device, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(device).wait_event(mark)

    def future_devices(self, tensors: Sequence[torch.Tensor]) -> list[torch.device]:
        return sorted({tensor.device for tensor in tensors}, key=lambda device: device.index)

    def complete(
        self,
        future: torch.futures.Future[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        marks: Mapping[torch.device, torch.cuda.Event],
    ) -> None:
        # Torch records an event on each device's current stream; the future's users wait for it.
        with ExitStack() as current:
            for device, mark in marks.items():
                stream = self._of(device).into
                stream.wait_event(mark)
                current.enter_context(_current(stream))
            future.set_result(tensors)

    def _of(self, device: torch.device) -> _Streams:
        with self._lock:
            streams = self._streams.get(device)
            if streams is None:
                streams = _Streams(*(_stream(device) for _ in _Streams._fields))
                self._streams[device] = streams
            return streams


@contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    # The device comes first. Leaving `torch.cuda.stream` alone would go back to the device of a
    # fresh thread, number 0. There it would make a context of some hundred megabytes, in every
    # rank.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


def _copy(
    stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor
) -> torch.cuda.Event:
    # In inference mode also tensors that were made in it may be written to.
    with torch.inference_mode(), _current(stream):
        target.copy_(source, non_blocking=True)
        return _mark(stream)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that waits for it sleeps, where CUDA's default is to spin on a core that
    # the training needs.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
    with torch.cuda.device(stream.device):
        event.record(stream)
    return event
