"""The interface by which an engine executes operations: one executor for each kind of tensor.

The engine, rank 0's decisions and the requests know no framework. `execution` executes with torch's
groups, and `array_execution` with a group of `fanin.arrays`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fanin.horovod.requests import Batch, DType, Form, ReduceOp


class Own:
    """The part of an operation that this rank has: its tensors, and where results go."""

    def __init__(self, inputs: Sequence[Any], in_place: bool) -> None:
        self.inputs = list(inputs)
        self.in_place = in_place
        self.results: list[Any] = [None] * len(self.inputs)
        self.received: tuple[int, ...] = ()
        """The rows that came from each rank, in an alltoall."""

    def begin(self) -> None:
        """Wait for what the program has queued on devices before it submitted."""

    def taken(self) -> None:
        """Let the thread that waited use the results."""


class Executor(ABC):
    """Executes what all ranks have agreed on. Every rank has one, of the same kind."""

    @abstractmethod
    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether one tensor can be made of several. Rank 0's answer counts."""

    @abstractmethod
    def own(self, inputs: Sequence[Any], in_place: bool) -> Own:
        """Return this rank's part of an operation that is submitted now."""

    @abstractmethod
    def form(self, tensor: Any) -> Form:
        """Return a tensor's form."""

    @abstractmethod
    def memory(self, own: Own) -> set[int]:
        """Return the addresses of memory that is read or written while a sum is under way."""

    @abstractmethod
    def of_words(self, words: bytes) -> Any:
        """Return bytes as a tensor of one dimension."""

    @abstractmethod
    def to_words(self, tensor: Any) -> bytes:
        """Return the bytes of a tensor that `of_words` has made on some rank."""

    @abstractmethod
    def execute(self, batch: Batch, mine: Sequence[Own | None]) -> Callable[[], None] | None:
        """Execute operations of one kind; `mine` has None for one that this rank has joined past.

        Those that are only begun are ended by what is returned, from any thread, in the same order.
        """

    def join_on(self, device: int) -> None:  # noqa: B027 - only CUDA has devices to choose of
        """Take the number of the CUDA device where this rank adds zeros, once it has joined."""

    @abstractmethod
    def settle(self, owns: Sequence[Own]) -> None:
        """Wait until results are where they go, on any device."""

    @abstractmethod
    def has(self, process_set: int) -> bool:
        """Return whether this rank is in a process set."""

    @abstractmethod
    def add(self, process_set: int, ranks: tuple[int, ...]) -> None:
        """Make a process set's group; all ranks of the job call it."""

    @abstractmethod
    def remove(self, process_set: int) -> None:
        """Leave a process set's group."""

    @abstractmethod
    def close(self, *, world: bool) -> None:
        """Leave all groups, but for the world's unless asked. Raises `ValueError` if it is left."""

    @abstractmethod
    def pulse(self) -> None:
        """Make a sum of nothing with all ranks; raises the error of one that is gone."""

    @abstractmethod
    def why(self) -> Exception | None:
        """Wait some seconds for the error that says which rank is gone; None if there is none."""
