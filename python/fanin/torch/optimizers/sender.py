"""The gradients of a backward pass on their way, in the order on which all ranks agree.

Rank 0 makes the order of what it saw in earlier passes, and tells all; until then it is the
parameters' own, from the last one. Which pass that is, and from which on the order holds, is by
their number alone, so that no rank's moment decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Work

from fanin._bounds import losing
from fanin._layers import Layer, foremost, of_layer
from fanin.torch.optimizers import device_clock, send_order
from fanin.torch.optimizers.partitions import Piece, pieces
from fanin.torch.optimizers.send_order import Partition, Sent

Treated = tuple[Layer, float, int | None]
"""The layer of a gradient, how much of it may be lost, and its priority if one was said."""


class Sender:
    """Sends the gradients of one backward pass after the other."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.pieces: list[Piece] = []
        self.places: dict[Tensor, tuple[Piece, int]] = {}
        self.open = False
        """Whether a backward pass goes on."""
        self.read: dict[Piece, None] = {}
        """In which order they were read since the last step."""
        self._group = group
        self._treated: dict[Piece, tuple[Layer | None, float]] = {}
        self._share = 1.0 / group.size()
        self._learns = group.size() > 1 and group.rank() == 0
        # How many ranks have used each parameter: a piece as others, which is there at the end.
        self._used = Piece((), torch.zeros(0, dtype=torch.int32, device="cpu"), 1)
        self._counts: list[int] | None = None
        self._seen: dict[Tensor, tuple[int, int] | None] = {}
        self._passes = 0
        self._told: tuple[Tensor, Work | None] | None = None
        self._times: _Times | None = None

    def take_in(self, parameters: list[Tensor], treated: Mapping[Tensor, Treated]) -> None:
        """Send the gradients of further parameters, too; the same on all ranks."""
        added = list(pieces(parameters, lambda each: treated[each][1:]))
        self.pieces += added
        for piece in added:
            for place, parameter in enumerate(piece.parameters):
                self.places[parameter] = piece, place
            layer = foremost(treated[each][0] for each in piece.parameters)
            self._treated[piece] = layer, treated[piece.parameters[0]][1]
        self._used.wait()
        self._used = Piece(
            (),
            torch.zeros(len(self.places), dtype=torch.int32, device=parameters[0].device),
            1,
        )
        self._numbers = {parameter: number for number, parameter in enumerate(self.places)}
        # Gradients come about in this order. The order that was learned is for other pieces.
        self._partitions = [
            (piece, index)
            for piece in reversed(self.pieces)
            for index in range(len(piece.partitions))
        ]
        self._partitions.append((self._used, 0))
        self._order = list(range(len(self._partitions)))
        if self._told is not None:
            _wait(self._told[1])
        self._told = None
        self._passes = 0

    def begin(self) -> None:
        """Begin a backward pass. No sum of the one before is needed any more."""
        for piece in self.pieces:
            piece.begin()
        self._used.begin()
        if self._told is not None:
            told, work = self._told
            _wait(work)
            self._order = told.tolist()
            self._told = None
        if self._group.size() > 1 and send_order.is_learned(self._passes):
            self._tell()
        self._passes += 1
        self._counts = None
        self._seen = {}
        self._next = 0
        self._all_there = False
        self._times = _Times() if self._learns and send_order.is_learned(self._passes) else None
        self.open = True

    def put(self, parameter: Tensor) -> None:
        """Take a parameter's gradient, which is there, and send what can be sent."""
        piece, place = self.places[parameter]
        self._put(piece, place)
        if self._times is not None and not piece.left:
            self._times.note_ready(piece)
        self._send()

    def place_of(self, parameter: Tensor) -> Tensor:
        """Return what a parameter's gradient is put into."""
        piece, place = self.places[parameter]
        return piece.gradients[place]

    def coming(self) -> list[Piece]:
        """Return the pieces in the order in which the last of each was sent."""
        last = dict.fromkeys(self._partitions[number][0] for number in reversed(self._order))
        return [piece for piece in reversed(last) if piece is not self._used]

    def is_there(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient was put in this pass."""
        piece, place = self.places[parameter]
        return place not in piece.left

    def end(self) -> None:
        """End the pass: send the rest, zeros where there is no gradient."""
        for piece in self.pieces:
            for place in list(piece.left):
                self._put(piece, place)
        used = [int(parameter.grad is not None) for parameter in self.places]
        self._used.partitions[0].copy_(torch.tensor(used, dtype=torch.int32, device="cpu"))
        self._all_there = True
        if self._times is not None:
            for piece in [*self.pieces, self._used]:
                self._times.note_ready(piece)
        self._send()
        self.open = False

    def is_used(self, parameter: Tensor) -> bool:
        """Whether some rank had a gradient of a parameter in the last pass."""
        if self._counts is None:
            self._used.wait()
            self._counts = self._used.partitions[0].tolist()
        return self._counts[self._numbers[parameter]] > 0

    def is_as_sent(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient is what was put in the last pass."""
        return self._seen[parameter] == _seen(parameter.grad)

    def note_read(self, piece: Piece) -> None:
        """Note that the next forward pass needs a piece now."""
        self.read.setdefault(piece)

    def _put(self, piece: Piece, place: int) -> None:
        parameter = piece.parameters[place]
        piece.put(place, self._share)
        self._seen[parameter] = _seen(parameter.grad)

    def _send(self) -> None:
        while self._next < len(self._order):
            number = self._order[self._next]
            piece, index = self._partitions[number]
            if piece.left or (piece is self._used and not self._all_there):
                return
            self._next += 1
            if self._times is not None:
                self._times.submitted.append((number, time.monotonic()))
            layer, bound = self._treated.get(piece, (None, None))
            with of_layer(layer), losing(bound):
                work = distributed.all_reduce(
                    piece.partitions[index], group=self._group, async_op=True
                )
            piece.works[index] = work
            if self._times is not None and work is not None:
                work.get_future().add_done_callback(partial(self._times.note_done, number))

    def _tell(self) -> None:
        """Let all have the order that rank 0 makes of the last pass, from the next pass on."""
        made = torch.zeros(len(self._order), dtype=torch.int32, device="cpu")
        if self._times is not None:
            made = torch.tensor(self._made(self._times), dtype=torch.int32, device="cpu")
        work = distributed.broadcast(made, group_src=0, group=self._group, async_op=True)
        self._told = made, work

    def _made(self, times: _Times) -> list[int]:
        ready = times.ready_seconds()
        first = min(ready.values())
        needed = {piece: number for number, piece in enumerate(self.read, start=1)}
        last = len(needed) + 1
        partitions = [
            Partition(
                ready[piece] - first,
                0 if piece is self._used else needed.get(piece, last),
                piece.partitions[index].nbytes,
            )
            for piece, index in self._partitions
        ]
        sent = [
            # A device may make the gradient long after the host has submitted it.
            Sent(
                max(moment, ready[self._partitions[number][0]]),
                times.done[number],
                partitions[number].size_bytes,
            )
            for number, moment in times.submitted
            if number in times.done
        ]
        if not sent:
            return self._order
        return send_order.order(partitions, send_order.seconds_a_byte(sent))


class _Times:
    """What rank 0 sees of a pass from which it learns."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, float]] = []
        self.done: dict[int, float] = {}
        self._ready: dict[Piece, tuple[torch.device, device_clock.Moment]] = {}

    def note_ready(self, piece: Piece) -> None:
        """Note that all gradients of a piece are there, or are queued on its device."""
        if piece not in self._ready:
            device = piece.partitions[0].device
            self._ready[piece] = device, device_clock.now(device)

    def ready_seconds(self) -> dict[Piece, float]:
        """Return when each piece was there, once the pass is over."""
        return dict(zip(self._ready, device_clock.seconds(list(self._ready.values())), strict=True))

    def note_done(self, number: int, _: Any) -> None:
        """Note that a partition's sum is there."""
        self.done[number] = time.monotonic()


def _seen(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return what tells one gradient from another, and from itself once it has changed."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
