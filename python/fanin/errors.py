"""Errors as types: one class for each variant of the Rust enums, with its fields.

Each error is made as ``Class(message, **fields)`` (the binding does so); fields are attributes.
"""

# The names are those of the Rust enums, which say what happened: no "Error" at their end.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Tensor(NamedTuple):
    """Which all-reduce, or other collective, of a job an error is about.

    Every rank calls the same one by its number. Of a CUDA tensor it is a segment, which is an
    all-reduce of its own.
    """

    number: int
    """Its number among the job's (a torch group's) collectives, from 0; empty tensors count."""
    elements: int
    """The number of its elements; if it has slices, of all slices together."""
    dtype: str
    """"uint8" where bytes are only moved."""
    op: str
    """"sum" or "avg"; "sum" where nothing is added."""
    collective: str = "all_reduce"
    """"all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather"."""


class FaninError(RuntimeError):
    """Base of everything that fanin raises about the network, the switch and the other ranks.

    A `RuntimeError`, because that is what programs written for other backends catch.
    """

    tensor: Tensor | None = None
    """The all-reduce that this error ended. A timeout's message also names one before it, which was
    waited for, if there is one. None where nothing of it was on the network."""
    switch: str | None = None
    """The switch, as "host:port"."""
    waited: float | None = None
    """How long was waited, in seconds."""

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (multiprocessing); `args` holds the message only.
        return type(self), (self.message,), dict(self.__dict__)


class LaunchIncomplete(ValueError):
    """The launcher says that there are other ranks, and not all that is needed to meet them."""


class SwitchUnreachable(FaninError):
    """Nothing answers at the switch's address, or no address was given."""


class NotASwitch(FaninError):
    """Something answers at the switch's address, and it is not a fanin switch."""


class Untrusted(FaninError):
    """Something answers at the switch's address, and cannot show that it is the switch.

    Or this process cannot show that it may take part; the message says which (docs/security.md).
    """


class ProtocolVersionMismatch(FaninError):
    """The switch speaks another version of the protocol."""

    def __init__(
        self, message: str = "", *, ours: int = -1, theirs: int = -1, **fields: object
    ) -> None:
        super().__init__(message, ours=ours, theirs=theirs, **fields)

    ours: int
    theirs: int


class JoinRefused(FaninError):
    """The switch refused this rank; the subclasses and the message say why."""


class DuplicateRank(JoinRefused):
    """Another process holds this rank in this job."""


class WorldSizeMismatch(JoinRefused):
    """The job was opened with another world size."""


class SettingMismatch(JoinRefused):
    """The ranks of the job ask for different values of a setting that they must have alike.

    Ranks that had joined hear it, too. `field` says which setting, for people.
    """

    def __init__(self, message: str = "", *, field: str = "", **fields: object) -> None:
        super().__init__(message, field=field, **fields)
        self.field = field


class ProtocolMismatch(JoinRefused):
    """The ranks speak another protocol (FANIN_PROTOCOL) than the switch serves."""


class PoolExhausted(JoinRefused):
    """The switch has less free memory than the job needs, in units of 256 elements."""

    def __init__(
        self, message: str = "", *, asked: int = -1, free: int = -1, **fields: object
    ) -> None:
        super().__init__(message, asked=asked, free=free, **fields)

    asked: int
    free: int


class RankOutOfRange(JoinRefused):
    """The rank is not in ``range(world_size)``, or the world is larger than a switch can serve."""


class _MissingRanks(FaninError):
    def __init__(
        self, message: str = "", *, missing_ranks: Sequence[int] = (), **fields: object
    ) -> None:
        super().__init__(message, missing_ranks=list(missing_ranks), **fields)

    missing_ranks: list[int]


class JoinTimeout(_MissingRanks):
    """Not all ranks joined the job in time; `missing_ranks` names them."""


class AllReduceTimeout(_MissingRanks):
    """A collective did not complete in time; `missing_ranks` did not contribute.

    It may be another one than an all-reduce: the message names it, and `tensor.collective`. The
    time counts from its submission, or from the end of the one before it if that is later.
    """


class CollectiveMismatch(FaninError):
    """The ranks disagree about a collective: its kind, length, dtype, loss bound, or place."""


class GroupMismatch(FaninError):
    """The ranks were given different lists for the same call of `new_group`."""

    def __init__(
        self,
        message: str = "",
        *,
        lists: Mapping[int, Sequence[int]] | None = None,
        **fields: object,
    ) -> None:
        super().__init__(message, lists=dict(lists or {}), **fields)

    lists: dict[int, list[int]]
    """The lists of this rank and of one with another list: ranks of the default group."""


class _OneRank(FaninError):
    def __init__(self, message: str = "", *, rank: int = -1, **fields: object) -> None:
        super().__init__(message, rank=rank, **fields)

    rank: int


class RankLost(_OneRank):
    """A rank stopped answering (killed, crashed, cut off) while it was needed."""


class BeganAnew(RankLost):
    """A rank was started again while the others found each other or joined.

    `fanin.connect` then meets once more; it raises this when its timeout is over by then.
    """


class RankLeft(_OneRank):
    """A rank left the job while the others still needed it."""


class SwitchLost(FaninError):
    """The switch stopped answering, and did not come back in time."""


class ParametersRefused(FaninError):
    """A parameter service does not serve this training: it lost it, or has no room for it."""


class Closed(FaninError):
    """The group was closed, here, before this all-reduce was done (or started)."""


__all__ = [
    "AllReduceTimeout",
    "BeganAnew",
    "Closed",
    "CollectiveMismatch",
    "DuplicateRank",
    "FaninError",
    "GroupMismatch",
    "JoinRefused",
    "JoinTimeout",
    "LaunchIncomplete",
    "NotASwitch",
    "ParametersRefused",
    "PoolExhausted",
    "ProtocolMismatch",
    "ProtocolVersionMismatch",
    "RankLeft",
    "RankLost",
    "RankOutOfRange",
    "SettingMismatch",
    "SwitchLost",
    "SwitchUnreachable",
    "Tensor",
    "Untrusted",
    "WorldSizeMismatch",
]
