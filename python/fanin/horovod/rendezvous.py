"""Which processes make a job: those that a launcher started, later those that are left of them.

A *place* is the rank that the launcher gave a process. It stays, also when others are gone and the
ranks of the job are counted anew.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, Protocol

from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from fanin._elastic_members import ELASTIC
from fanin._launchers import MEETING, launched
from fanin.horovod.elastic_rendezvous import ElasticRendezvous
from fanin.horovod.errors import Apart
from fanin.horovod.world import Meeting
from fanin.torch.rendezvous.survivors import SURVIVORS_SECONDS, agree_on_survivors, announce

_PREFIX: Final = "fanin/horovod"


class Stored(Meeting, Protocol):
    """A meeting in a store that outlives the processes."""

    def meet(self) -> tuple[Store, list[int]]:
        """Return a store for the next job, and the places in it: one for each rank."""
        ...


def of_launcher() -> Stored:
    """Return where the processes meet that a launcher has started."""
    return ElasticRendezvous() if os.environ.get(ELASTIC) else Rendezvous()


class Rendezvous:
    """Where the processes of a job meet, as often as they begin anew."""

    def __init__(self) -> None:
        self._generation = 0
        self.lost: set[int] = set()
        """Places that an error named since the last meeting."""
        self.failed = False
        """Whether the last job ended by an error."""
        if distributed.is_initialized():
            # The program's own: what it was made by, the environment need not say.
            self._base: Store = _get_default_store()
            self.place, size = distributed.get_rank(), distributed.get_world_size()
        elif (said := launched(os.environ)) is not None and all(map(os.environ.get, MEETING)):
            found = next(iter(rendezvous("env://", said.rank, said.size)))
            self._base, self.place, size = found
        else:
            self._base, self.place, size = HashStore(), 0, 1
        self.places = list(range(size))
        self.job = self.places
        """The place of each rank of the last job: of all, unless `init(comm)` named some."""

    def announce(self, lost: list[int]) -> None:
        """Say, once an engine has failed, that this process is still there."""
        self.failed = True
        self.lost.update(self.job[rank] for rank in lost)
        with contextlib.suppress(RuntimeError):  # gone, too: `meet` says so
            announce(self._of_job(), self.place, self.lost)

    def has_state(self) -> None:
        """Do nothing: nobody comes later, who would need the state."""

    def change(self) -> tuple[bool, bool]:
        """Return that nobody is to leave, or comes: there is no launcher that says so."""
        return False, False

    def meet(self) -> tuple[Store, list[int]]:
        """Return a store for the next job, and the places in it: one for each rank."""
        if self.failed:
            try:
                left = self._survivors()
            except DistError as error:
                raise Apart(
                    "the store where ranks meet is gone with the process that had it: to go on "
                    "without any rank, it must be the launcher's (docs/horovod.md, Elastic)"
                ) from error
            gone = set(self.job) - set(left)
            self.places = [place for place in self.places if place not in gone]
            self.failed = False
            self.lost = set()
        self._generation += 1
        return self._store(), self.places

    def _store(self) -> Store:
        return PrefixStore(f"{_PREFIX}/{self._generation}", self._base)

    def _of_job(self) -> Store:
        # Other processes of the launcher's may have a job of their own.
        return PrefixStore(f"of/{self.job}", self._store())

    def _survivors(self) -> list[int]:
        """Agree on who is left."""
        places = agree_on_survivors(self._of_job(), self.job, SURVIVORS_SECONDS)
        if self.place not in places:
            raise Apart(
                f"the other processes went on without this one, which came back more than "
                f"{SURVIVORS_SECONDS:g} s after them: {places} of {self.job}"
            )
        return places
