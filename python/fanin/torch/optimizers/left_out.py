"""Ranks that take part in no sum of asynchronous training, as their links are slow (GOAT §V).

They send nothing to the switches. Each sends its gradient to rank 0 on a connection of its own, as
to a parameter server, and nobody waits for that: the gradient counts in the epoch in which it has
come, and the model goes back the same way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fanin._connections import Followers, Gone

SAMPLE_BYTES = 1 << 20
"""Of what a link's rate is measured with, at most."""
SAMPLES = 3
"""How often: the first one finds a connection that begins slowly."""


@dataclass(frozen=True)
class Gradient:
    """What a rank that is left out has computed."""

    rank: int
    number: int
    """Of this rank's words."""
    squares: float
    pieces: list[bytes]
    """Of the parameters of each dtype and device, one behind the other."""


@dataclass(frozen=True)
class Model:
    """What it gets for that, or in the end."""

    epoch: int
    gradients: int
    pieces: list[bytes]
    state: bytes | None = None
    """Of the optimizer, in the end."""


class Carrier:
    """Rank 0's end: a thread for each rank that is left out."""

    def __init__(self, connections: Followers, arrived: Callable[[Gradient], None]) -> None:
        """`arrived` is called from a thread, once for each gradient."""
        self._connections = connections
        self._arrived = arrived
        self._models: dict[int, queue.SimpleQueue[Model]] = {}

    def seconds(
        self, rank: int, ask: Callable[[int], None], size_bytes: int, timeout: float
    ) -> float:
        """Return how long a rank needs to send so much, by samples that `ask` lets it send.

        Raises `Gone`, and `Silent` if the rank sends nothing within the timeout.
        """
        sample = max(1, min(size_bytes, SAMPLE_BYTES))
        found = []
        for _ in range(SAMPLES):
            begun = time.monotonic()
            ask(sample)
            self._connections.hear_one(rank, timeout)
            found.append(time.monotonic() - begun)
        return min(found) * max(size_bytes, 1) / sample

    def begin(self, rank: int) -> None:
        """Take a rank's gradients from now on."""
        self._models[rank] = queue.SimpleQueue()
        threading.Thread(
            target=self._serve, args=(rank,), name=f"fanin-left-out-{rank}", daemon=True
        ).start()

    def give(self, rank: int, model: Model) -> None:
        """Give the model back for a gradient, while others go on."""
        self._models[rank].put(model)

    def end(self, model: Model) -> None:
        """Give all of these ranks the last model; none of them has a gradient on its way."""
        for rank in self._models:
            self._connections.tell_one(rank, model)

    def close(self) -> None:
        """Let go of all connections."""
        self._connections.shut()
        self._connections.close()

    def _serve(self, rank: int) -> None:
        try:
            while True:
                self._arrived(self._connections.hear_one(rank))
                self._connections.tell_one(rank, self._models[rank].get())
        except Gone:  # whoever waits for it is told otherwise
            return
        except BaseException:
            self._connections.shut()  # these ranks do not wait for an answer that never comes
            raise


def packed(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of contiguous tensors."""
    return [tensor.detach().cpu().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def unpacked(piece: bytes, like: Tensor) -> Tensor:
    """Return what was packed of a tensor as this one."""
    return torch.frombuffer(bytearray(piece), dtype=like.dtype).to(like.device)
