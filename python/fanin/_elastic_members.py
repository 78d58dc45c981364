"""The members of an elastic job: the launcher says them in a store, and its ranks meet by that.

A *place* is a process that the launcher started; no other ever has its number. The launcher
publishes lists of places, each under a version. A process is in a list once it has come to where
ranks meet for the first time, so nobody waits for a program that is still loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from fanin import _handshake

ELASTIC: Final = "_FANIN_ELASTIC_LAUNCHER"
"""The variable by which the launcher says to its ranks that it publishes lists."""
_PREFIX: Final = "fanin/elastic"
# The fate of a list: all who are in it go on by it, or some go on to a newer one.
MET: Final = "met"
LEFT: Final = "left"


class Store(_handshake.Store, Protocol):
    """What is asked of the launcher's store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Put a value in an expected one's place; "" is none. Return what is there then."""


@dataclass(frozen=True)
class Listed:
    """A list of the launcher's."""

    version: int
    places: list[int]
    """Those that are in the job, the oldest first of those that have the state of the training."""


class Members:
    """What the launcher and its ranks tell each other. It raises what the store raises."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # The launcher.

    def publish(self, listed: Listed) -> None:
        """Let all meet anew by this list."""
        self._set("listed", json.dumps([listed.version, listed.places]))

    def say_gone(self, places: Iterable[int]) -> None:
        """Say which processes have ended so far."""
        self._set("gone", json.dumps(sorted(places)))

    def is_ready(self, place: int) -> bool:
        """Return whether a process has come to where ranks meet."""
        return self._has(f"ready/{place}")

    def is_asked_anew(self, version: int) -> bool:
        """Return whether some rank that met by this version cannot go on."""
        return self._has(f"anew/{version}")

    def has_state(self, place: int) -> bool:
        """Return whether a process has the state of the training."""
        return self._has(f"state/{place}")

    def has_arrived(self, version: int, place: int) -> bool:
        """Return whether a process of a list has come to meet the others of it."""
        return self._has(f"arrived/{version}/{place}")

    # The ranks.

    def say_ready(self, place: int) -> None:
        """Ask to be in the next list."""
        self._set(f"ready/{place}", "")

    def say_state(self, place: int) -> None:
        """Say that a process has the state of the training, and could give it to others."""
        self._set(f"state/{place}", "")

    def ask_anew(self, version: int) -> None:
        """Ask for a newer list than this one, as its job has failed."""
        self._set(f"anew/{version}", "")

    def newest(self) -> Listed | None:
        """Return the newest list; None before the first."""
        if not self._has("listed"):
            return None
        version, places = json.loads(self._store.get(f"{_PREFIX}/listed"))
        return Listed(version, places)

    def gone(self) -> set[int]:
        """Return the processes that have ended."""
        return set(json.loads(self._store.get(f"{_PREFIX}/gone"))) if self._has("gone") else set()

    def arrive(self, version: int, place: int) -> None:
        """Say that a process of a list has come to meet the others of it."""
        self._set(f"arrived/{version}/{place}", "")

    def have_arrived(self, listed: Listed) -> bool:
        """Return whether all of a list have come."""
        return all(self.has_arrived(listed.version, place) for place in listed.places)

    def decide(self, version: int, fate: str) -> str:
        """Return what becomes of a version, once and for all: the first word about it counts."""
        return self._store.compare_set(f"{_PREFIX}/fate/{version}", "", fate).decode()

    def _set(self, key: str, text: str) -> None:
        self._store.set(f"{_PREFIX}/{key}", text)

    def _has(self, key: str) -> bool:
        return self._store.check([f"{_PREFIX}/{key}"])


class TakenOut(Exception):  # noqa: N818 - what happened
    """The launcher has taken a process's slot out of the job."""


class Arrival:
    """A process on its way from the list by which it met last to the next one."""

    def __init__(self, members: Members, place: int, met: Listed) -> None:
        self._members = members
        self._place = place
        self._met = met
        self._arrived = met
        members.say_ready(place)

    def look(self) -> Listed | None:
        """Return the list of which all have come; None as long as there is none.

        Raises `TakenOut` where a process that was in a list is in no newer one.
        """
        listed = self._members.newest()
        if self._arrived not in (self._met, listed):
            # Others may have seen that all had come, before there was a newer one: they go on.
            if self._members.decide(self._arrived.version, LEFT) == MET:
                return self._arrived
            self._arrived = self._met
        if listed is None or self._place not in listed.places:
            if self._met.version:
                raise TakenOut
            return None  # the launcher will have it in the next one
        if listed.version == self._met.version:
            self._members.ask_anew(listed.version)
            return None
        if self._arrived != listed:
            self._arrived = listed
            self._members.arrive(listed.version, self._place)
        if not self._members.have_arrived(listed):
            return None
        return listed if self._members.decide(listed.version, MET) == MET else None
