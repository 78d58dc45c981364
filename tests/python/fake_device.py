"""A device for tests: memory of its own, and streams that run behind the host, as CUDA's do.

Any tensor of the host is taken to be on it. Its streams are threads that work through what they are
given; a test can stop one, and let it go operation by operation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from fanin.torch.backend import channel, gloo_tensors
from fanin.torch.backend.delegating import DelegatingBackend
from ranks import DEADLINE
from torch.utils._pytree import tree_leaves

Tensors = list[torch.Tensor]


class Mark:
    """A point in a stream's work."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(DEADLINE), "the device never got here"


class Stream:
    """Operations in order, on a thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object] | None, Mark]] = (
            queue.SimpleQueue()
        )
        self._passes = threading.Semaphore(0)
        self._stopped = False
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, operation: Callable[[], object] | None) -> Mark:
        mark = Mark()
        self._work.put((operation, mark))
        return mark

    def stop(self) -> None:
        """From now on each operation needs a `step`."""
        self._stopped = True

    def step(self, operations: int = 1) -> None:
        self._passes.release(operations)

    def go(self) -> None:
        """Runs freely again, as soon as the thread looks: a step might be left for after `stop`."""
        self._stopped = False

    def _run(self) -> None:
        while True:
            operation, mark = self._work.get()
            if operation is not None:
                while self._stopped and not self._passes.acquire(timeout=0.01):
                    pass
                operation()
            mark.event.set()


class FakeDevice:
    """`Copies` of such a device, which also keeps book."""

    def __init__(self) -> None:
        self.out, self.into = Stream(), Stream()
        self.producer: Mark | None = None
        self.buffers: list[torch.Tensor] = []
        self.copied_out: list[int] = []
        self.copied_in: list[int] = []
        self.blocked_streams = 0
        self.fail_copies_out = False
        self.fail_copies_in = False

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def begin(self, tensor: torch.Tensor) -> Mark:
        del tensor
        made = Mark()
        made.event.set()
        return self.producer or made

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.empty(size_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Sequence[Mark]) -> Mark:
        if self.fail_copies_out:
            raise RuntimeError("the device is broken")
        assert source.is_contiguous()
        assert source.dtype == host.dtype
        assert source.shape == host.shape
        waited = list(after)

        def operation() -> None:
            for mark in waited:
                mark.wait()
            _copy(source, host)
            self.copied_out.append(source.numel())

        return self.out.enqueue(operation)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        if self.fail_copies_in:
            raise RuntimeError("the device is broken")
        # Torch's copies refuse it when they are queued.
        assert torch._debug_has_internal_overlap(target) != 1, "an element is written twice"

        def operation() -> None:
            _copy(source, target)
            self.copied_in.append(target.numel())

        return self.into.enqueue(operation)

    def arrived(self, device: torch.device) -> Mark:
        del device
        return self.into.enqueue(None)

    def reached(self, mark: Mark) -> bool:
        return mark.event.is_set()

    def block_host(self, mark: Mark) -> None:
        mark.wait()

    def block_stream(self, device: torch.device, mark: Mark) -> None:
        """The host is this device's current stream."""
        del device
        self.blocked_streams += 1
        mark.wait()

    def future_devices(self, tensors: Sequence[torch.Tensor]) -> list[torch.device]:
        del tensors
        return []

    def complete(
        self,
        future: torch.futures.Future[Tensors],
        tensors: Tensors,
        marks: Mapping[torch.device, Mark],
    ) -> None:
        for mark in marks.values():
            mark.wait()
        future.set_result(tensors)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.inference_mode():
        target.copy_(source)


def plug_in(patch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Make all-reduces of this process go through a fake device a membership; return them."""
    made: list[FakeDevice] = []

    def make() -> FakeDevice:
        made.append(FakeDevice())
        return made[-1]

    patch.setattr(channel, "CudaCopies", make)
    return made


def hands_over() -> list[torch.device]:
    """Have Gloo get copies of all tensors, as of CUDA's; return the devices waited for."""
    waited_for: list[torch.device] = []
    copies: dict[int, torch.Tensor] = {}
    handing, calling = gloo_tensors.Handed._handed, DelegatingBackend._hand

    def hand(self: gloo_tensors.Handed, tensor: torch.Tensor, stand: torch.Tensor) -> torch.Tensor:
        given = handing(self, tensor, stand)
        if given is not tensor:
            copies[given.data_ptr()] = given
        return given

    def call(self: DelegatingBackend, name: str, *args: Any, **keywords: Any) -> Any:
        for each in tree_leaves(args):
            if isinstance(each, torch.Tensor) and each.numel():
                assert each.data_ptr() in copies, f"{name} of what is on a device"
        return calling(self, name, *args, **keywords)

    patch = pytest.MonkeyPatch()
    patch.setattr(gloo_tensors, "_is_on_device", lambda _: True)
    patch.setattr(gloo_tensors, "_wait_for_stream", waited_for.append)
    patch.setattr(gloo_tensors.Handed, "_handed", hand)
    patch.setattr(DelegatingBackend, "_hand", call)
    return waited_for
