"""Where the ranks of an elastic launcher meet: by the lists that it publishes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from fanin._elastic_members import Arrival, Listed, Members, TakenOut
from fanin._launchers import MEETING
from fanin.horovod.errors import Apart

_PAUSE: Final = 0.01
"""Between two looks at the store, in seconds."""


class Gone(Exception):  # noqa: N818 - what happened
    """A process of the list has ended: the others meet anew, by a newer one."""


class ElasticRendezvous:
    """Where the processes of a job meet, as often as the launcher's list changes."""

    def __init__(self) -> None:
        host, port = (os.environ[name] for name in MEETING)
        self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self._members = Members(self._store)
        # Kept here, as C++ keeps only the C++ half of a store.
        self._watched: list[_Watched] = []
        self._met = Listed(0, [])
        self.place = int(os.environ["RANK"])
        self.failed = False
        """Whether the last job ended by an error."""
        self.job: list[int] = []
        """The place of each rank of the last job."""

    def announce(self, lost: list[int]) -> None:
        """Note that a job has failed; the launcher knows by itself who is `lost`."""
        del lost
        self.failed = True

    def meet(self) -> tuple[Store, list[int]]:
        """Return a store for the next job, and the places in it: one for each rank.

        Waits until all of the newest list are there. Ends the process where its machine was taken
        out of the job.
        """
        try:
            arrival = Arrival(self._members, self.place, self._met)
            while (listed := arrival.look()) is None:
                time.sleep(_PAUSE)
        except DistError as error:
            raise Apart("the launcher is gone, and with it the store where ranks meet") from error
        except TakenOut:
            print(f"fanin: process {self.place} ends: its slot was taken away", file=sys.stderr)
            raise SystemExit(0) from None
        self._met, self.failed, self.job = listed, False, listed.places
        self._watched.append(_Watched(self._store, self._look))
        return PrefixStore(f"fanin/horovod/{listed.version}", self._watched[-1]), listed.places

    def has_state(self) -> None:
        """Tell the launcher that this process has the state of the training."""
        self._members.say_state(self.place)

    def change(self) -> tuple[bool, bool]:
        """Return whether the newest list lacks some of this job, and whether it has others."""
        listed = self._members.newest() or self._met
        ours, theirs = set(self._met.places), set(listed.places)
        return bool(ours - theirs), bool(theirs - ours)

    def _look(self) -> None:
        gone = self._members.gone() & set(self._met.places)
        if gone:
            raise Gone(f"process {min(gone)} of the job's {len(self._met.places)} has ended")
        if self._members.is_asked_anew(self._met.version):
            raise Gone("another process of the job has failed, and meets anew")


class _Watched(Store):
    """A store whose waits end when somebody is gone who would be waited for."""

    def __init__(self, store: TCPStore, look: Callable[[], None]) -> None:
        super().__init__()
        self._timeout = timedelta(minutes=5)  # as torch's stores have it
        self._store = store
        self._look = look

    @property
    def underlying_store(self) -> TCPStore:
        """The store behind it, which knows where the launcher is."""
        return self._store

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; raises `Gone`, and `TimeoutError`."""
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._store.check(keys):
            self._look()
            if time.monotonic() > end:
                raise TimeoutError(f"nobody has set {', '.join(keys)}")
            time.sleep(_PAUSE)

    def check(self, keys: list[str]) -> bool:
        """Return whether keys are there; raises `Gone`."""
        is_there = self._store.check(keys)
        if not is_there:
            self._look()
        return is_there

    # What the store behind it does.

    def set(self, key: str, value: Any) -> None:
        """Put a value there."""
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Put a value in an expected one's place; returns what is there then."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Take a value away; returns whether there was one."""
        return self._store.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values once all are there."""
        self.wait(keys)
        return self._store.multi_get(keys)

    def clone(self) -> _Watched:
        """Return itself, which threads may share."""
        return self
