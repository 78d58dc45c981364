"""What rank 0 decides in asynchronous training (GOAT §V).

Whose gradients count in an epoch: of those who are ready, when there are enough. And who sums them:
all ranks but those whose links are so slow that nobody should wait for them.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fanin import _fanin
from fanin._connections import Followers, Gone, Silent
from fanin.errors import AllReduceTimeout, FaninError
from fanin.torch.optimizers.left_out import Carrier, Gradient
from fanin.torch.optimizers.wrapper import settings_of

PULSE = 1.0
"""Seconds after which an epoch of nobody shows that all ranks are still there."""
SMOOTHING = 0.9
"""Of what is measured of gradients, which part of the earlier epochs' is kept."""
ENOUGH = 0.25
"""Of all workers, which part could just reach what is to be reached, where nobody says what is."""
SLOW = 2.0
"""How many times as long as others a rank that is left out needs for its gradient, at least."""
SLOW_SECONDS = 0.01
"""By how much longer it needs, at least: threads are later than that by chance."""
LONG_SUMS = 5
"""After so many sums in a row that took much longer than links were measured, they are again."""


@dataclass(frozen=True)
class Said:
    """A worker's word to rank 0: its gradient's squares are there, or it has left."""

    rank: int
    number: int
    """Of this rank's words. One that was interrupted while it spoke says its last word again."""
    squares: float | None


@dataclass(frozen=True)
class Epoch:
    """Rank 0's word to all: whose gradients count, and how the optimizer is set."""

    participants: frozenset[int] | None
    """None: all have left."""
    members: tuple[int, ...] | None
    """The ranks that sum: with zeros, if they are not ready. None: all."""
    settings: list[dict[str, Any]]
    loads: bool
    """Whether the optimizer gets a state of rank 0's before."""


@dataclass(frozen=True)
class Sample:
    """Rank 0's word to a rank: send so many bytes on the connection of ranks that are left out."""

    rank: int
    size_bytes: int


@dataclass(frozen=True)
class Confirm:
    """Rank 0's word to all: say that you have the sums of all epochs so far."""


@dataclass(frozen=True)
class Confirmed:
    """The answer."""

    rank: int


class Coordinator:
    """Decides on rank 0."""

    def __init__(
        self,
        size: int,
        words: Followers,
        wait_for: int | None,
        gradient_square: float | None,
        timeout: float,
        model_bytes: int = 0,
    ) -> None:
        self._size = size
        self._words = words
        self._wait_for = wait_for
        self._timeout = timeout
        self._model_bytes = model_bytes
        self._noise = Noise(gradient_square)
        self._own: queue.SimpleQueue[Said | Gradient] = queue.SimpleQueue()
        self._loads = False
        self._heard = dict.fromkeys(range(size), -1)
        self._ready: dict[int, float] = {}
        self._left: set[int] = set()
        # Since when nobody has said anything.
        self._silent = time.monotonic()
        # Since when each worker has had its model, and how long it took last.
        self._given = dict.fromkeys(range(size), time.monotonic())
        self._took: dict[int, float] = {}
        # How long each one's gradient is on the network.
        self._links = dict.fromkeys(range(size), 0.0)
        self._carrier: Carrier | None = None
        self._machines: Sequence[int] = range(size)
        self._measured = False
        # Sums in a row that took long for these links, and after how many they are measured again.
        self._long_sums = 0
        self._measures_after = LONG_SUMS
        self.left_out: dict[int, list[bytes]] = {}
        """The ranks that take part in no sum, each with the gradient that has come."""

    def leave_out_by(self, carrier: Carrier, machines: Sequence[int]) -> None:
        """Leave ranks with slow links out of sums, from now on; `machines` has each rank's."""
        self._carrier = carrier
        self._machines = machines

    def say(self, said: Said | Gradient) -> None:
        """Take a word of this process, from another thread."""
        self._own.put(said)
        self._words.wake()

    def load(self) -> None:
        """Let all load a state of rank 0's in the next epoch, which begins now."""
        self._loads = True
        self._words.wake()

    def begin(self, optimizer: torch.optim.Optimizer) -> Epoch:
        """Wait until an epoch can begin, and tell all ranks of it."""
        try:
            self._measure_links()
        except Silent as silent:
            raise silence([silent.rank], self._timeout) from None
        participants = self._next()
        loads, self._loads = self._loads, False
        settings = [settings_of(each) for each in optimizer.param_groups]
        members = tuple(rank for rank in range(self._size) if rank not in self.left_out)
        epoch = Epoch(participants, members if self.left_out else None, settings, loads)
        self._words.tell(epoch)
        return epoch

    def tell(self, error: FaninError) -> None:
        """Tell all ranks why the training is over: they may wait for nothing else."""
        with contextlib.suppress(Gone):
            self._words.tell(error)

    def close(self) -> None:
        """Let go of all connections."""
        self._words.close()
        if self._carrier is not None:
            self._carrier.close()

    def _measure_links(self) -> None:
        """Learn how long each rank needs to send a gradient: one after the other."""
        if self._measured or self._carrier is None:
            return
        self._measured = True
        begun = time.monotonic()
        # The way to ranks of rank 0's own machine is none of their links.
        here = [rank for rank in range(self._size) if self._machines[rank] == self._machines[0]]
        measured = [rank for rank in range(self._size) if rank not in {*here, *self.left_out}]
        for rank in measured:

            def ask(size_bytes: int, rank: int = rank) -> None:
                self._words.tell_one(rank, Sample(rank, size_bytes))

            self._links[rank] = self._carrier.seconds(rank, ask, self._model_bytes, self._timeout)
        # Their link cannot be slower than the fastest of these.
        least = min((self._links[rank] for rank in measured), default=0.0)
        self._links |= dict.fromkeys(here, least)
        took = time.monotonic() - begun
        self._given = {rank: since + took for rank, since in self._given.items()}

    def _next(self) -> frozenset[int] | None:
        """Return whose epoch begins: nobody's to see that all are there; None once all left."""
        while len(self._left) < self._size:
            self._leave_out_slow()
            enough = self._enough()
            heard = [*self._words.hear(0.0 if enough or self._loads else PULSE), *self._said()]
            if not heard:
                self._end_silence()
                return frozenset(self._ready) if enough else frozenset()
            self._silent = time.monotonic()
            for said in heard:
                self._note(said)
        return None

    def _end_silence(self) -> None:
        """Raise where some wait, and those for whom they do have been silent for too long."""
        if self._enough() or not (self._ready or self._left):
            return
        waited = time.monotonic() - self._silent
        if waited > self._timeout:
            absent = set(range(self._size)) - set(self._ready) - self._left
            raise silence(sorted(absent), waited)

    def _said(self) -> Iterable[Said | Gradient]:
        while not self._own.empty():
            yield self._own.get()

    def measure(
        self, participants: frozenset[int], mean_squares: float, sum_seconds: float
    ) -> None:
        """Learn from an epoch that is over, by the squares of its mean gradient."""
        squares = [self._ready.pop(rank) for rank in participants]
        self._noise.add(squares, mean_squares)
        now = time.monotonic()
        for rank in participants:
            self._given[rank] = now
        members = set(self._links) - set(self.left_out)
        is_long = sum_seconds > much_more(max(self._links[rank] for rank in members))
        self._long_sums = self._long_sums + 1 if is_long else 0
        if self._long_sums == self._measures_after:
            # A link may carry less than it did. This is asked ever more rarely, if none does.
            self._measured, self._long_sums = False, 0
            self._measures_after *= 2
        for rank in members:
            # The sum takes as long as the slowest of them needs.
            self._links[rank] = min(self._links[rank], sum_seconds)
        self._silent = now

    def _note(self, said: Said | Gradient) -> None:
        if isinstance(said, Gradient):
            self.left_out[said.rank] = said.pieces
        elif said.number <= self._heard[said.rank]:
            return  # again
        elif said.squares is not None and said.rank in self.left_out:
            return  # it had not heard yet that its gradient is to come otherwise
        self._heard[said.rank] = said.number
        if said.squares is None:
            self._left.add(said.rank)
            return
        self._ready[said.rank] = said.squares
        took = time.monotonic() - self._given[said.rank]
        # A gradient that is here has been on the network; another one will be.
        on_network = 0.0 if isinstance(said, Gradient) else self._links[said.rank]
        self._took[said.rank] = took + on_network

    def _leave_out_slow(self) -> None:
        """Leave out those that are not worth being waited for and whose links are slow."""
        there = [rank for rank in range(self._size) if rank not in self._left]
        if self._carrier is None or any(rank not in self._took for rank in there):
            return
        fastest = set(self._fastest(there))
        others = [self._links[rank] for rank in fastest - set(self.left_out)]
        least = much_more(max(others, default=math.inf))
        slow = [
            rank
            for rank in there
            if rank not in fastest and rank not in self.left_out and self._links[rank] > least
        ]
        # Ranks of a machine send one sum, which is as long without some of them.
        outside = {*slow, *self.left_out} - {0}
        of_others = {self._machines[rank] for rank in range(self._size) if rank not in outside}
        slow = [rank for rank in slow if self._machines[rank] not in of_others]
        if not slow:
            return
        self._measures_after = LONG_SUMS
        # The members change: all of the old ones must have their sums.
        self._confirm()
        for rank in slow:
            self.left_out[rank] = []
            self._ready.pop(rank, None)
            self._carrier.begin(rank)

    def _confirm(self) -> None:
        waited_for = set(range(1, self._size))
        begun = time.monotonic()
        self._words.tell(Confirm())
        while waited_for:
            for said in self._words.hear(PULSE):
                if isinstance(said, Confirmed):
                    waited_for.discard(said.rank)
                else:
                    self._note(said)
            waited = time.monotonic() - begun
            if waited > self._timeout:
                raise silence(sorted(waited_for), waited)

    def _enough(self) -> bool:
        """Whether as many are ready as an epoch waits for, or all who are still there."""
        there = self._size - len(self._left)
        return len(self._ready) >= min(max(1, self._needed()), there) > 0

    def _needed(self) -> int:
        if self._wait_for is not None:
            return self._wait_for
        there = [rank for rank in range(self._size) if rank not in self._left]
        if any(rank not in self._took for rank in there):
            return self._size
        return len(self._fastest(there))

    def _fastest(self, there: list[int]) -> list[int]:
        """Return for whom an epoch waits, of these: all have said something."""
        now = time.monotonic()
        # A rank that is late takes at least the time that it has taken already.
        late = {rank: now - self._given[rank] for rank in there if rank not in self._ready}
        took = [max(self._took[rank], late.get(rank, 0.0), 1e-9) for rank in there]
        needed = self._wait_for or self._noise.participants(took)
        return [rank for _, rank in sorted(zip(took, there, strict=True))[:needed]]


class Noise:
    """How far the workers' gradients are apart: σ² of GOAT's Eq. 36, measured."""

    def __init__(self, gradient_square: float | None) -> None:
        self._aim = gradient_square
        self._variance: float | None = None

    def add(self, squares: list[float], mean_squares: float) -> None:
        """Take the squares of an epoch's gradients and of their mean; one alone says nothing."""
        n = len(squares)
        if n < 2 or not math.isfinite(sum(squares) + mean_squares):
            return
        now = max(0.0, (sum(squares) - n * mean_squares) / (n - 1))
        before = now if self._variance is None else self._variance
        self._variance = SMOOTHING * before + (1 - SMOOTHING) * now

    def participants(self, took: list[float]) -> int:
        """Return `K` of Algorithm 2 by the workers' seconds; all of them if none is enough."""
        variance, square = ENOUGH * len(took), 1.0
        if self._aim is not None:
            if self._variance is None:
                return len(took)
            variance, square = self._variance, self._aim
        # By how much the loss is above its least is a factor of all numbers of epochs alike.
        try:
            return len(_fanin.participation(took, len(took), 1.0, variance, square))
        except ValueError:  # the noise of all together is above what is to be reached
            return len(took)


def much_more(seconds: float) -> float:
    """Return how long a slow link takes at least, by that."""
    return max(SLOW * seconds, seconds + SLOW_SECONDS)


def silence(ranks: list[int], waited: float) -> AllReduceTimeout:
    """Return the error of ranks that are waited for in vain."""
    return AllReduceTimeout(
        f"ranks {ranks} gave no gradient within {waited:.0f} s, and others wait for them: their "
        "programs are stuck, or have ended without close(); timeout= of init_process_group says "
        "how long is waited",
        missing_ranks=ranks,
        waited=waited,
    )
