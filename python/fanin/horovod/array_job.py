"""Jobs of TensorFlow and Keras: ranks meet as `fanin.connect` has it, and engines have its group.

Nothing here needs torch. If the launcher has a store, it is torchrun's, and torch is there; then
ranks that are left of a job can meet there once more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from fanin._launchers import MEETING, launched
from fanin._planes import own_address
from fanin._services import bracketed
from fanin.arrays.connecting import AGENT_STORE, connect
from fanin.arrays.group import Group
from fanin.errors import FaninError
from fanin.horovod.array_execution import ArrayExecutor
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.errors import Apart
from fanin.horovod.process_sets import ProcessSet
from fanin.horovod.starting import start
from fanin.horovod.world import LOST, Joined, Meeting, chosen

if TYPE_CHECKING:
    from fanin.horovod.rendezvous import Stored


class Addressed:
    """The meeting of processes at rank 0's address, as long as that process lives.

    Raises `LaunchIncomplete` if a launcher names several ranks, and nothing says where they meet.
    """

    def __init__(self) -> None:
        said = launched(os.environ)
        self.place, size = (0, 1) if said is None else (said.rank, said.size)
        self.job = list(range(size))
        self.failed = False

    def announce(self, lost: list[int]) -> None:
        """Remember that a rank is gone: the others cannot agree here on who is left."""
        del lost
        self.failed = True

    def has_state(self) -> None:
        """Do nothing: nobody comes later, who would need the state."""

    def change(self) -> tuple[bool, bool]:
        """Return that nobody is to leave, or comes: there is no launcher that says so."""
        return False, False

    def address(self) -> str | None:
        """Return HOST:PORT of rank 0; None for a job of one rank."""
        if self.failed:
            raise Apart(
                "the job has failed, and its ranks met at rank 0's address, where nobody counts "
                "who is left: to go on without a rank, start with a launcher that has a store "
                "(docs/tensorflow.md, Elastic)"
            )
        if len(self.job) == 1:
            return None
        host, port = (os.environ[name] for name in MEETING)
        return f"{bracketed(host)}:{port}"


class Told:
    """What all ranks of a group say once, each under a key of its own: they all call `set`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._told: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        """Say something, and hear what all others say."""
        words = np.frombuffer(json.dumps([key, value]).encode(), np.uint8)
        lengths = self._group.all_gather(np.array([words.size], np.int64))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: words.size] = words
        rows = self._group.all_gather(padded).reshape(self._group.world_size, -1)
        for row, length in zip(rows, lengths, strict=True):
            said, what = json.loads(row[:length].tobytes())
            self._told[said] = what

    def get(self, key: str, /) -> bytes:
        """Return what a rank has said."""
        return self._told[key].encode()

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return what several ranks have said."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str], /) -> bool:
        """Return whether ranks have said something under all keys."""
        return all(key in self._told for key in keys)


class Arrays:
    """Frameworks whose tensors become NumPy arrays, as `world.Framework`."""

    name = "fanin.horovod.tensorflow or fanin.horovod.keras"
    lost = (*LOST, FaninError)

    def __init__(self) -> None:
        # It counts how often processes met, so it is kept.
        self._meeting: Addressed | Stored | None = None

    def meeting(self) -> Addressed | Stored:
        """Return the launcher's store, or else rank 0's address."""
        if self._meeting is None:
            self._meeting = _met()
        return self._meeting

    def join(
        self, meeting: Meeting, ranks: Sequence[int], settings: EngineSettings, *, again: bool
    ) -> Joined:
        """Join the others by `fanin.connect`, with the settings of the environment."""
        del settings
        if isinstance(meeting, Addressed):
            if ranks:
                raise ValueError(
                    "init(comm) names ranks, and ranks meet at MASTER_ADDR: leave it out, or start "
                    "the ranks with a launcher that has a store (fanin run, torchrun)"
                )
            place, size = meeting.place, len(meeting.job)
            group = connect(rank=place, world_size=size, rendezvous=meeting.address())
        else:
            from torch._C._distributed_c10d import PrefixStore

            store, places = cast("Stored", meeting).meet()
            job = chosen(meeting, places, ranks, again=again)
            if job is not places:
                store = PrefixStore(f"of/{','.join(map(str, job))}", store)
            group = connect(rank=job.index(meeting.place), world_size=len(job), rendezvous=store)
        return Joined(
            ArrayExecutor(group),
            group.rank,
            group.world_size,
            lambda _name: Told(group),
            _own_address,
            group.close,
        )


def _met() -> Addressed | Stored:
    if os.environ.get(AGENT_STORE) != "True":
        return Addressed()
    # The store is a launcher's of torch, so torch is there.
    from fanin.horovod.rendezvous import of_launcher

    return of_launcher()


def _own_address() -> str:
    """Return this machine's address as others reach it; see `interface.own_address` for torch."""
    host, port = (os.environ.get(name, "") for name in MEETING)
    return own_address(f"{bracketed(host)}:{port}" if host and port else None)


ARRAYS = Arrays()


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet] | str | None = None,
) -> None:
    """Join the job of all ranks, and return once all have; nothing if this process is in it.

    The arguments and the errors are those of `fanin.horovod.init`. The ranks are the launcher's.
    """
    start(ARRAYS, comm, process_sets)
