"""The way of a device's tensor through host memory: out in segments, over the network, back in.

    tensor  --copy out-->  buffer  --collective-->  buffer  --copy in-->  tensor
            out thread               the client              completion threads

While one segment is on the network, the next is copied out and the one before copied in. Each
segment is a collective of its own, of a stretch of every tensor; a rank copies out only what it
gives, and in only what it gets. The borders follow from the number of elements and the dtype
alone, so all ranks cut alike; and one thread submits all segments, in the order of the calls, as
every rank must submit in the same order.

The buffers are few. When all are in use, what is not yet copied out waits; nobody else does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from fanin import _fanin
from fanin.errors import Closed
from fanin.torch.device.copies import Copies, Mark
from fanin.torch.device.staged_work import StagedWork
from fanin.torch.works.under_way import UnderWay
from fanin.torch.works.work import Kept, Part, Request

# Large enough that Python's work for a segment hides behind its transfer. The work takes about 0.1
# ms, more when the training holds the GIL; the transfer takes 1.3 ms at 25 Gbit/s. Small enough
# that the first and the last copy, which are not hidden, take little: 0.2 ms at 20 GB/s. On
# loopback, with a stand-in for the copies, 1, 2 and 4 MiB were alike. It is a constant, as all
# ranks must cut alike.
SEGMENT_BYTES: Final = 4 << 20

# Host memory that one membership pins at most: 64 MiB. A few segments each are on the way out, on
# the network and on the way in.
BUFFERS_MAX: Final = 16


@dataclass
class Buffer:
    """Host memory for one segment."""

    memory: torch.Tensor
    marks: list[Mark] = field(default_factory=list)
    """After them the device is done with what the buffer was used for last."""


class Segment(Kept):
    """A stretch of a collective's tensors on its way."""

    def __init__(
        self, work: StagedWork, request: Request, ready: Sequence[Mark], staging: Staging
    ) -> None:
        self.work = work
        self.request = request
        self.ready = ready
        self.staging = staging
        self.buffer: Buffer | None = None
        # Marks that must be over before the segment is on the network.
        self.awaited: list[Mark] = []

    def host(self, part: int) -> torch.Tensor:
        """Return a tensor's place in the buffer: they stand one behind the other."""
        assert self.buffer is not None  # only between copying out and copying in
        memory = self.request.memory[part]
        place = self.buffer.memory[part * memory.nbytes : (part + 1) * memory.nbytes]
        return place.view(memory.dtype)

    def completed(self, pending: _fanin.Pending) -> None:
        """For completion threads: the sum, or an error, is there."""
        self.staging.summed(self, pending.exception())


class Staging:
    """The buffers of one membership, and the thread that copies out and submits.

    `under_way` knows the membership's works. The thread starts with the first tensor and ends with
    `close`.
    """

    def __init__(self, client: _fanin.Client, copies: Copies, under_way: UnderWay) -> None:
        self._client = client
        self._rank = client.rank
        self._copies = copies
        self._under_way = under_way
        self._changed = threading.Condition()
        self._queue: deque[Segment] = deque()
        self._unsubmitted = 0
        self._free: deque[Buffer] = deque()
        self._buffers = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[Part], limit: float | None
    ) -> StagedWork:
        """Start the parts, whose results are in `tensors`. Does not block.

        Raises while a graph is captured.
        """
        work = StagedWork(tensors, parts, self._copies, self._under_way)
        segments = [
            Segment(work, stretch, ready, self)
            for request, ready in work.begin()
            for stretch in cut(request)
        ]
        work.expect(len(segments))
        self._under_way.begin(work, limit)
        work.take_turn()
        with self._changed:
            closed = self._closed
            if not closed:
                if self._thread is None:
                    self._start()
                self._queue.extend(segments)
                self._unsubmitted += len(segments)
                self._changed.notify_all()
        if closed:
            for _ in segments:
                work.segment_done(_closed(), here=False)
        return work

    def flush(self) -> None:
        """Wait until all that was given to `start` is on the network, or has failed."""
        if self._unsubmitted:
            with self._changed:
                self._changed.wait_for(lambda: self._unsubmitted == 0)

    def summed(self, segment: Segment, error: Exception | None) -> None:
        """Copy in what this rank gets, and give the buffer back."""
        buffer, request = segment.buffer, segment.request
        assert buffer is not None  # it was submitted from it
        if error is None:
            try:
                for part, memory in enumerate(request.memory):
                    if request.gets(part, self._rank):
                        buffer.marks.append(self._copies.copy_in(segment.host(part), memory))
            except Exception as failure:  # for the waiter: this thread has nobody to tell
                error = failure
        self._release(segment)
        segment.work.segment_done(error, here=True)

    def close(self, timeout: float) -> None:
        """Fail what is not submitted, end the thread, let the buffers go. Idempotent.

        The membership is to be left before: what is on the network is failed by that.
        """
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start(self) -> None:
        # A daemon, ended by closing, at the latest at exit (see `channel`).
        thread = threading.Thread(target=self._run, name="fanin-copy-out", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        copying: deque[Segment] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: copying or self._closed or self._can_copy())
                if self._closed and not copying:
                    break
            # All that there is room for, so that the device never waits for this thread.
            while (segment := self._next()) is not None:
                if self._copy_out(segment):
                    copying.append(segment)
            if copying:
                self._send(copying.popleft())
        # Nothing is put into the queue of a closed staging.
        while self._queue:
            self._refuse(self._queue.popleft(), _closed())

    def _can_copy(self) -> bool:
        return bool(self._queue) and (bool(self._free) or self._buffers < BUFFERS_MAX)

    def _next(self) -> Segment | None:
        """Take the next segment and a buffer for it, if there are both."""
        with self._changed:
            if self._closed or not self._can_copy():
                return None
            segment = self._queue.popleft()
            # The one that was given back first: the device is done with it most likely.
            segment.buffer = self._free.popleft() if self._free else None
            self._buffers += segment.buffer is None
            return segment

    def _copy_out(self, segment: Segment) -> bool:
        try:
            if segment.buffer is None:
                segment.buffer = self._new_buffer()
            after, request = [*segment.ready, *segment.buffer.marks], segment.request
            copied = [
                self._copies.copy_out(memory, segment.host(part), after)
                for part, memory in enumerate(request.memory)
                if request.gives(part, self._rank)
            ]
        except Exception as error:
            self._break_off(segment, error)
            return False
        # A segment that gives nothing waits until its memory and its buffer are free to be written.
        segment.awaited = copied or after
        segment.buffer.marks = copied
        return True

    def _new_buffer(self) -> Buffer:
        try:
            return Buffer(self._copies.host_memory(SEGMENT_BYTES))
        except BaseException:
            with self._changed:
                self._buffers -= 1
            raise

    def _send(self, segment: Segment) -> None:
        try:
            for mark in segment.awaited:
                self._copies.block_host(mark)
            host = [segment.host(part) for part in range(len(segment.request.memory))]
            request = replace(segment.request, memory=host)
            pending = request.submit(self._client, segment, True)
        except Exception as error:
            self._break_off(segment, error)
            return
        self._submitted()
        segment.work.started(pending)

    def _break_off(self, segment: Segment, error: Exception) -> None:
        """Leave: a segment is missing in this rank's order, and nobody must sum what follows.

        The other ranks hear of it once nothing has moved for some seconds, and what follows here
        fails. The reason is noted before, as leaving fails the work's other segments, and whoever
        waits in `flush` is let go after.
        """
        segment.work.failed(error)
        self._client.close()
        self._refuse(segment, error)

    def _refuse(self, segment: Segment, error: Exception) -> None:
        if segment.buffer is not None:
            self._release(segment)
        self._submitted()
        # Callbacks not on this thread: they may wait for what it is yet to refuse.
        segment.work.segment_done(error, here=False)

    def _submitted(self) -> None:
        with self._changed:
            self._unsubmitted -= 1
            self._changed.notify_all()

    def _release(self, segment: Segment) -> None:
        with self._changed:
            buffer, segment.buffer = segment.buffer, None
            if buffer is not None and not self._closed:
                self._free.append(buffer)
            self._changed.notify_all()


def cut(request: Request) -> list[Request]:
    """Return a collective's segments; one, empty, of empty tensors.

    Like an empty tensor on the CPU it counts in the order that the ranks must agree about.
    """
    flat = [memory.view(-1) for memory in request.memory]
    if request.dtype is None:
        # Its bytes are moved, whatever they are.
        flat = [memory.view(torch.uint8) for memory in flat]
    length = flat[0].numel()
    elements = SEGMENT_BYTES // flat[0].element_size() // len(flat)
    return [
        replace(request, memory=[memory[begin : begin + elements] for memory in flat])
        for begin in range(0, max(length, 1), elements)
    ]


def _closed() -> Closed:
    return Closed("the process group was destroyed before this collective was on the network")
