"""The job of this process: its rank and those of its machine, its engine, its groups."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fanin import _connections as connections
from fanin._handshake import Store
from fanin.errors import JoinTimeout, RankLost
from fanin.horovod.engine import Engine
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.errors import HorovodInternalError
from fanin.horovod.executor import Executor
from fanin.horovod.timeline import Timeline

# The variable in which a launcher says which of its machines this is: hosts may share a name.
_MACHINE = "GROUP_RANK"
LOST: Final[tuple[type[Exception], ...]] = (
    JoinTimeout,
    RankLost,
    connections.Gone,
    OSError,
    EOFError,
)
"""The errors of `init` when a rank is gone, or does not come; frameworks have more of them."""


@dataclass(frozen=True)
class Position:
    """A rank among all, on its machine, and among those with its place on other machines."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    """Whether all machines have as many ranks."""

    @staticmethod
    def of(rank: int, machines: Sequence[str]) -> Position:
        """Return the position of a rank, given the machine of each."""
        ours = machines[rank]
        local_rank = machines[:rank].count(ours)
        sizes = Counter(machines)  # in the order of each one's first rank
        peers = [name for name, size in sizes.items() if size > local_rank]
        return Position(
            rank=rank,
            size=len(machines),
            local_rank=local_rank,
            local_size=sizes[ours],
            cross_rank=peers.index(ours),
            cross_size=len(peers),
            homogeneous=len(set(sizes.values())) == 1,
        )


class Meeting(Protocol):
    """Where the processes of a job meet, as often as they begin anew."""

    failed: bool
    """Whether the last job ended by an error."""
    place: int
    """The rank of this process among all that were launched."""
    job: list[int]
    """The place of each rank of the last job."""

    def announce(self, lost: list[int]) -> None:
        """Say that a job has failed, in which these ranks were lost, and that this one lives."""
        ...

    def has_state(self) -> None:
        """Note that this process has the state of the training, and could give it to others."""
        ...

    def change(self) -> tuple[bool, bool]:
        """Return whether some of the job are to leave, and whether others have come to join it."""
        ...


@dataclass(frozen=True)
class Joined:
    """A job that this process has joined."""

    executor: Executor
    rank: int
    size: int
    store: Callable[[str], Store]
    """Returns a store of all ranks, in which the name stands for a part; all ranks call it."""
    address: Callable[[], str]
    """Returns where other ranks reach this machine."""
    leave: Callable[[], None]


class Framework(Protocol):
    """How the processes of a framework meet, and which tensors their engines take."""

    @property
    def name(self) -> str:
        """The module that programs import as hvd."""
        ...

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """The errors of `join` when a rank is gone, or does not come: `LOST`, and its own."""
        ...

    def meeting(self) -> Meeting:
        """Return where this process and the others meet."""
        ...

    def join(
        self, meeting: Meeting, ranks: Sequence[int], settings: EngineSettings, *, again: bool
    ) -> Joined:
        """Join the others; blocks until all are there. What fails leaves nothing behind."""
        ...


class World:
    """An `init` of this process. All ranks make it; it blocks until all are there."""

    sets: dict[int, Sequence[int]]
    """The ranks of each process set, by its number."""

    def __init__(
        self, framework: Framework, meeting: Meeting, ranks: Sequence[int], *, again: bool
    ) -> None:
        # Before others are met: a value may be wrong on this rank alone.
        settings = EngineSettings.of(os.environ)
        self.framework = framework
        self.meeting = meeting
        self._process = os.getpid()
        joined = framework.join(meeting, ranks, settings, again=again)
        self._leave = joined.leave
        with contextlib.ExitStack() as undo:
            undo.callback(joined.leave)
            machines = joined.store("machines")
            ours = f"{os.environ.get(_MACHINE, '')}/{socket.gethostname()}"
            machines.set(f"{joined.rank}", ours)
            named = [machines.get(f"{other}").decode() for other in range(joined.size)]
            self.position = Position.of(joined.rank, named)
            self.sets = {0: range(joined.size)}
            self.timeline = Timeline()
            connected = connections.connect(
                joined.store("engine"), joined.rank, joined.size, joined.address
            )
            undo.callback(connected.close)
            self._engine = Engine(
                joined.executor,
                connected,
                joined.rank,
                joined.size,
                self.timeline,
                meeting.announce,
                settings,
            )
            undo.pop_all()

    @property
    def engine(self) -> Engine:
        """The engine of operations; raises `ValueError` in a child that this process forked."""
        if self.is_of_parent():
            raise ValueError(
                f"this process was forked from rank {self.position.rank}, whose connections are "
                "not its own: call collectives in the parent alone"
            )
        return self._engine

    def is_of_parent(self) -> bool:
        """Whether this process is a forked child: threads and sockets are its parent's."""
        return os.getpid() != self._process

    def close(self, *, ends: bool) -> None:
        """Let all ranks end, and leave the groups."""
        self.engine.stop(ends=ends)
        self.timeline.stop()
        self._leave()


def chosen(meeting: Meeting, places: list[int], ranks: Sequence[int], *, again: bool) -> list[int]:
    """Return the places of a job's processes: of those that are there, the named ones.

    If it is made `again`, named ones that are lost are left out. Raises `ValueError` if this
    process is not among them, or if one that is named is not there.
    """
    if again:
        ranks = [rank for rank in ranks if rank in places]
    if not ranks:
        meeting.job = places
    elif meeting.place in ranks and set(ranks) <= set(places):
        meeting.job = list(ranks)
    else:
        raise ValueError(
            f"init(comm={list(ranks)}) is for processes that are in it, and of those that there "
            f"are; this is rank {meeting.place} of {len(places)}"
        )
    return meeting.job


_world: World | None = None
# The last `init`: its framework, and the ranks that it named.
_begun: tuple[Framework, list[int]] | None = None


def world() -> World:
    """Return this process's job; raises `ValueError` before `init`."""
    if _world is None:
        raise ValueError("fanin.horovod is not initialized: call hvd.init() first")
    return _world


def begin(framework: Framework, ranks: Sequence[int]) -> bool:
    """Make this process's job; false if there is one.

    Raises `ValueError` if that is another framework's.
    """
    if _world is not None and _world.framework is not framework:
        raise ValueError(
            f"{_world.framework.name} is initialized in this process, and has the tensors of its "
            f"framework alone: call its shutdown() before {framework.name}.init()"
        )
    return _begin(framework, list(ranks), again=False)


def begin_again() -> bool:
    """Make the job of the same ranks as before, but for those that are lost."""
    assert _begun is not None
    return _begin(*_begun, again=True)


def _begin(framework: Framework, ranks: list[int], *, again: bool) -> bool:
    global _world, _begun
    if _world is not None:
        return False
    meeting = framework.meeting()
    try:
        _world = World(framework, meeting, ranks, again=again)
    except framework.lost as error:
        meeting.announce([])
        raise HorovodInternalError(f"hvd.init(): {error}") from error
    _begun = framework, ranks
    return True


def shutdown() -> None:
    """End this process's part, and with it the job of all ranks; nothing before `init`.

    What other ranks still wait for fails there with a `HorovodInternalError`. It comes by itself
    when the interpreter ends. `init` may follow. A forked child's ends nothing: the job is its
    parent's.
    """
    _close(ends=False)


def end() -> None:
    """End this process's part for good: what elastic training goes on with, it does without it."""
    _close(ends=True)


def _close(*, ends: bool) -> None:
    global _world
    if _world is not None and not _world.is_of_parent():
        closing, _world = _world, None
        closing.close(ends=ends)


def is_initialized() -> bool:
    """Whether there was an `init`, and no `shutdown` since."""
    return _world is not None


def is_current(one: World) -> bool:
    """Whether a job is the one that this process is in."""
    return one is _world


def rank() -> int:
    """Return this process's rank."""
    return world().position.rank


def size() -> int:
    """Return the number of ranks."""
    return world().position.size


def local_rank() -> int:
    """Return this process's place among the ranks of its machine: the GPU to take."""
    return world().position.local_rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return world().position.local_size


def cross_rank() -> int:
    """Return this machine's place among those that have a rank of this `local_rank`."""
    return world().position.cross_rank


def cross_size() -> int:
    """Return the number of machines that have a rank of this `local_rank`."""
    return world().position.cross_size


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks."""
    return world().position.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of all operations to a file of rank 0's, in place of one that it writes."""
    if rank() == 0:
        world().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline's file."""
    world().timeline.stop()
