"""Requests of ranks and answers of rank 0: the words between engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from fanin._layers import Layer


class ReduceOp(IntEnum):
    """How tensors of several ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Kind(Enum):
    """The kind of a request; a name is of one operation at a time for each kind."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"
    SHUTDOWN = "shutdown"
    END = "end"
    """A shutdown of a process that ends: it will not begin anew with the others."""


class DType(Protocol):
    """A framework's dtype: it can be hashed and pickled, and its text names it."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        ...


@dataclass(frozen=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: DType
    device: str
    """Its type: "cpu" or "cuda"."""

    @property
    def size_bytes(self) -> int:
        """The size of all its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The size of a row: all that has one index in the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


Key = tuple[int, Kind, str]


@dataclass(frozen=True)
class Request:
    """An operation, as a rank asks for it."""

    rank: int
    kind: Kind
    name: str = ""
    process_set: int = 0
    tensors: tuple[Form, ...] = ()
    """Several if it is grouped: they are summed together or not at all."""
    op: ReduceOp = ReduceOp.Sum
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors before and after the sum."""
    root: int = 0
    splits: tuple[int, ...] = ()
    """The rows that each rank of the process set gets, in an alltoall."""
    ranks: tuple[int, ...] = ()
    """The ranks of a new process set."""
    sparse: bool = False
    """Whether what is gathered is a sparse tensor: an allreduce, which others ask for as one."""
    layer: Layer | None = None
    """The layer of the gradients that are summed."""
    priority: int = 0
    """Of what is ready, the largest goes first."""

    @property
    def key(self) -> Key:
        """The part that it has in common with other ranks' requests for the operation."""
        return self.process_set, Kind.ALLREDUCE if self.sparse else self.kind, self.name


@dataclass(frozen=True)
class Operation:
    """An operation on which all ranks agree."""

    request: Request
    """The first rank's request; the others' may differ from it in `of_all` and in their layers."""
    since: float
    """When the first rank asked, by rank 0's clock."""
    of_all: tuple[tuple[int, ...], ...] = ()
    """For each rank of the process set, first dimensions (allgather) or splits (alltoall)."""
    number: int = 0
    """The number of a process set that is made."""


@dataclass(frozen=True)
class Batch:
    """Operations of one kind that all ranks execute together, and next."""

    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Repeat:
    """A batch of operations on which all ranks have agreed before, by their numbers."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """An operation that cannot be, because of what its ranks asked for."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Joined:
    """All ranks have joined."""

    last: int


@dataclass(frozen=True)
class Over:
    """The last word: nothing is executed any more."""

    reason: str
    cause: Exception | None = None
    ended: int | None = None
    """The rank whose process ends."""


Decision = Batch | Repeat | Refused | Joined | Over
