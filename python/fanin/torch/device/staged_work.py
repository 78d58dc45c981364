"""Works of collectives whose tensors are staged: on the network first, then on the device.

Such a work is *settled* when the network is done and the last copy is queued on the device. From
then on the device's streams order what follows, as with NCCL: `wait` blocks the host until then,
because that is how errors can be raised, and lets the current stream wait for the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch

from fanin import _fanin
from fanin.errors import AllReduceTimeout
from fanin.torch.device.copies import Copies, Mark
from fanin.torch.works.under_way import UnderWay
from fanin.torch.works.work import (
    Back,
    CollectiveWork,
    Part,
    Request,
    TensorsFuture,
    each_once,
    out_of_time,
    seconds,
)


class StagedWork(CollectiveWork):
    """A collective on some tensors of devices, under way or done."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[Part],
        copies: Copies,
        under_way: UnderWay,
    ) -> None:
        super().__init__(tensors, parts, under_way)
        self._copies = copies
        self._changed = threading.Condition(self._lock)
        self._parts = list(parts)
        # Pairs to copy on the device when all is there.
        self._back: Back = [pair for part in parts for pair in part.back]
        self._marks: dict[torch.device, Mark] = {}
        # The last submission, to ask it whom the network waits for.
        self._pending: _fanin.Pending | None = None
        self.devices = tuple(copies.future_devices(self._tensors))

    @classmethod
    def alone(
        cls, tensors: Sequence[torch.Tensor], copies: Copies, under_way: UnderWay
    ) -> StagedWork:
        """Make the work of a group of one rank: done as soon as the tensors are made."""
        work = cls(tensors, [], copies, under_way)
        for tensor in tensors:
            work._marks[tensor.device] = copies.begin(tensor)
        work._settled = True
        return work

    def begin(self) -> Iterator[tuple[Request, list[Mark]]]:
        """Yield what is asked for, on memory of devices, and the marks from which on that is there.

        For the thread that asks for the collective, whose current streams make the tensors.
        """
        for target, _ in self._back:
            self._copies.begin(target)  # what it holds is not looked at
        for part in self._parts:
            request = part.request
            assert request is not None  # nothing is settled before it has begun
            ready = {memory.device: self._copies.begin(memory) for memory in request.memory}
            self._marks.update(ready)
            yield request, list(ready.values())
        self._parts = []

    def expect(self, segments: int) -> None:
        """Note how many segments there are, before the first is under way."""
        self._awaited = segments

    def started(self, pending: _fanin.Pending) -> None:
        """Note that one more segment is under way. The work may be settled by now."""
        with self._lock:
            if not self._settled:
                self._pending = pending

    def segment_done(self, error: Exception | None, *, here: bool) -> None:
        """Note that one more segment is copied in, or failed.

        With `here`, this thread may run callbacks after the last one.
        """
        if error is not None:
            self.failed(error)
        self._one_over(here=here)

    def _late(self, limit: float) -> AllReduceTimeout:
        return out_of_time(f"{self._name} of device tensors", limit, self._pending)

    def _settle(self) -> None:
        """Queue the last copies. Nobody else is here: all segments are done, nothing is settled."""
        try:
            if self._error is None:
                for target, compact in self._back:
                    target, compact = each_once(target, compact)
                    self._copies.copy_in(compact, target)
            for device in self._marks:
                self._marks[device] = self._copies.arrived(device)
        except Exception as error:  # for the waiter: this thread has nobody to tell
            self._error = self._error or error
        with self._changed:
            self._pending = None
            self._back = []
            self._settled = True
            self._changed.notify_all()
        self._under_way.over(self)

    def _complete(self, future: TensorsFuture) -> None:
        try:
            self._copies.complete(future, self._tensors, self._marks)
        except Exception as error:  # the device's; a future that nobody completes would hang
            if future.done():
                raise
            self._error = error
            future.set_result([])  # `_outcome` raises

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block the host until the network is done, and the current stream until the sum is there.

        Raises the typed error of `fanin.errors`. Without a timeout (zero) the one of the group
        applies, which bounds each segment on the network.
        """
        limit = seconds(timeout)
        with self._changed:
            settled = self._changed.wait_for(lambda: self._settled, limit)
        if not settled:
            assert limit is not None
            raise self._late(limit)
        self._seen = True
        try:
            # After a failure too: some of the tensors may still be copied into.
            for device, mark in self._marks.items():
                self._copies.block_stream(device, mark)
        finally:
            self._raise_failure()
        return True

    def _make_future(self) -> TensorsFuture:
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = torch.futures.Future(devices=list(self.devices))
            complete = self._completes_at_once()
        if complete:
            self.deliver()
        return future.then(self._outcome)

    def is_completed(self) -> bool:
        """Whether the sum is in the tensors, for streams that did not wait as well."""
        completed = self._settled and all(map(self._copies.reached, self._marks.values()))
        self._seen = self._seen or completed
        return completed
