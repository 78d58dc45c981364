"""The job of this process: its rank and those of its machine, its engine, its groups."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import distributed
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store

import fanin.torch  # noqa: F401 - makes its backend known to torch
from fanin.errors import JoinTimeout, RankLost
from fanin.horovod.engine import Engine
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.errors import Apart, HorovodInternalError
from fanin.horovod.rendezvous import Rendezvous
from fanin.horovod.timeline import Timeline
from fanin.torch.rendezvous import connections

# The variable in which a launcher says which of its machines this is: hosts may share a name.
_MACHINE = "GROUP_RANK"


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


class World:
    """An `init` of this process. All ranks make it; it blocks until all are there."""

    _engine: Engine

    def __init__(self, meeting: Rendezvous, ranks: Sequence[int], *, again: bool) -> None:
        if ranks and distributed.is_initialized():
            raise ValueError("init(comm) names ranks, and there is a group already: leave it out")
        if meeting.failed and distributed.is_initialized():
            raise Apart(
                "a rank of the program's own group is gone: to go on without it, leave "
                "init_process_group to hvd.init(), or call destroy_process_group() first"
            )
        # Before others are met: a value may be wrong on this rank alone.
        settings = EngineSettings.of(os.environ)
        self._process = os.getpid()
        self._ours = not distributed.is_initialized()
        self._group: ProcessGroup | None = None
        connected: connections.Followers | connections.Leader | None = None
        try:
            store, rank, size = self._join(meeting, ranks, again=again)
            machines = PrefixStore("machines", store)
            machines.set(f"{rank}", f"{os.environ.get(_MACHINE, '')}/{socket.gethostname()}")
            named = [machines.get(f"{other}").decode() for other in range(size)]
            self.position = Position.of(rank, named)
            self.timeline = Timeline()
            connected = connections.connect(PrefixStore("engine", store), rank, size)
            assert self._group is not None
            self._engine = Engine(
                self._group,
                connected,
                rank,
                size,
                self.timeline,
                meeting.announce,
                settings,
            )
        except BaseException:
            if connected is not None:
                connected.close()
            self._leave()
            raise

    def _join(
        self, meeting: Rendezvous, ranks: Sequence[int], *, again: bool
    ) -> tuple[Store, int, int]:
        """Make the engine's group; return a store of all, this rank and the number of ranks."""
        if self._ours:
            store, rank, size = _seat(meeting, ranks, again=again)
            distributed.init_process_group(
                "fanin", store=PrefixStore("world", store), rank=rank, world_size=size
            )
        else:
            store, _ = meeting.meet()
            rank, size = distributed.get_rank(), distributed.get_world_size()
        # Not the default one: what the program calls there comes in no order with the engine's.
        group = distributed.new_group(backend="fanin")
        assert isinstance(group, ProcessGroup)
        self._group = group
        return store, rank, size

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

    def _leave(self) -> None:
        if self._ours or self._group is not None:
            # Left already, if the engine had failed.
            with contextlib.suppress(ValueError, AssertionError):
                distributed.destroy_process_group(None if self._ours else self._group)


def _seat(meeting: Rendezvous, ranks: Sequence[int], *, again: bool) -> tuple[Store, int, int]:
    """Return where this process and others meet, its rank there, and how many they are."""
    store, places = meeting.meet()
    if again:
        ranks = [rank for rank in ranks if rank in places]
    if not ranks:
        meeting.job = places
        return store, places.index(meeting.place), len(places)
    if meeting.place not in ranks or not set(ranks) <= set(places):
        raise ValueError(
            f"init(comm={list(ranks)}) is for processes that are in it, and of those that there "
            f"are; this is rank {meeting.place} of {len(places)}"
        )
    meeting.job = list(ranks)
    name = ",".join(map(str, ranks))
    return PrefixStore(f"of/{name}", store), list(ranks).index(meeting.place), len(ranks)


_world: World | None = None
_comm: list[int] = []
# The meeting of the launcher's processes. It counts how often they met, so it is kept.
_launched: Rendezvous | None = None
# The store of the program's own group, and where its ranks meet; of the last such group alone.
_grouped: tuple[Store, Rendezvous] | None = None
_LOST = (JoinTimeout, RankLost, connections.Gone, DistError, OSError, EOFError)
"""The error of `init` when a rank is gone, or does not come."""


def world() -> World:
    """Return this process's job; raises `ValueError` before `init`."""
    if _world is None:
        raise ValueError("fanin.horovod is not initialized: call hvd.init() first")
    return _world


def begin(ranks: Sequence[int]) -> bool:
    """Make this process's job; false if there is one."""
    return _begin(list(ranks), again=False)


def begin_again() -> bool:
    """Make the job of the same ranks as before, but for those that are lost."""
    return _begin(_comm, again=True)


def _begin(comm: list[int], *, again: bool) -> bool:
    global _world, _comm
    if _world is not None:
        return False
    meeting = _meeting()
    try:
        _world = World(meeting, comm, again=again)
    except _LOST as error:
        meeting.announce([])
        raise HorovodInternalError(f"hvd.init(): {error}") from error
    _comm = comm
    return True


def _meeting() -> Rendezvous:
    global _launched, _grouped
    if not distributed.is_initialized():
        _launched = _launched or Rendezvous()
        return _launched
    store = _get_default_store()
    if _grouped is None or _grouped[0] is not store:
        _grouped = store, Rendezvous()
    return _grouped[1]


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
