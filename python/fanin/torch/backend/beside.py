"""What stands beside a group's own services, for the same ranks: made when it is first needed.

A group may need two things that it does not begin with, and many groups never need them:

- a backend for what callbacks begin, which has an order of its own (`fanin_backend`);
- the ranks' own services, if the group's protocol is ATP or GOAT, for the sums that the protocol
  does not have. A switch that adds saves a reduce-scatter nothing, so the ranks' links carry as
  little as with any switch.

All ranks begin the same collectives in the same order. So all of them make it at the same place, or
fail at the same place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from fanin import _handshake as handshake
from fanin._failures import Failures
from fanin._membership import Connected, say_once
from fanin._settings import Settings
from fanin.errors import Closed, FaninError, JoinTimeout, RankLeft, RankLost
from fanin.torch.rendezvous.membership import Patience, agree, naming_absent

# These are no reason to sum elsewhere: the ranks are not in step, or some of them are gone.
NO_REASON: Final = (Closed, JoinTimeout, RankLeft, RankLost)

Made = TypeVar("Made")


class Beside(Generic[Made]):
    """One thing beside a group, which has parts of the group's store for itself."""

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._store = store
        self._making = threading.Lock()
        self._count = 0
        self._made: Made | None = None
        self._cannot_be = False

    @property
    def made(self) -> Made | None:
        """The thing, if it is there."""
        return self._made

    def get(self, make: Callable[[Store], Made | None]) -> Made | None:
        """Return the thing, which is made if it is not there; None if it cannot be, for good."""
        with self._making:
            if self._made is None and not self._cannot_be:
                self._count += 1
                self._made = make(PrefixStore(f"{self._name}-{self._count}/", self._store))
                self._cannot_be = self._made is None
            return self._made

    def end(self, end: Callable[[Made], None]) -> None:
        """End the thing, if it is there. It is made anew when it is next needed."""
        with self._making:
            ended, self._made = self._made, None
        if ended is not None:
            end(ended)


def own_services(
    store: Store,
    rank: int,
    size: int,
    group: str,
    settings: Settings,
    patience: Patience,
    address: str,
) -> Connected | None:
    """Join the own services of a group's ranks; None on all ranks where one of them cannot.

    `address` is this machine's, and `patience` looks for ranks that are gone. Rank 0 says why there
    are no such services, once a process. Raises what is no reason to do without them.
    """
    failures = Failures(store, rank, size, DistError)

    def look() -> None:
        failures.look()
        if patience.look is not None:
            patience.look()

    joins = replace(patience, look=look, tell=failures.tell)
    own = settings.of_own_services()
    connected: Connected | None = None
    wrong = ""
    try:
        with failures.shared():
            membership = agree(store, rank, size, group, own, joins)
            connected = membership.connect(
                own, rank, size, patience.seconds, joins, address=address
            )
    except NO_REASON:
        raise
    except Exception as error:
        wrong = str(error) if isinstance(error, FaninError) else f"{type(error).__name__}: {error}"
    with contextlib.ExitStack() as unless_all:
        if connected is not None:
            unless_all.callback(connected.close)
        # Also a rank that could not join waits for all: those that died are no reason either.
        told = said_by_all(store, rank, size, group, "own services", wrong, patience)
        if connected is not None and not any(told):
            unless_all.pop_all()
            return connected
    if rank == 0:
        say_once(
            f"what {settings.protocol} does not sum is summed by Gloo, as the ranks' own services "
            f"cannot do it: {next(filter(None, told))}"
        )
    return None


def said_by_all(
    store: Store, rank: int, size: int, group: str, name: str, text: str, patience: Patience
) -> list[str]:
    """Return what each rank says under a name, once all have. Raises as `naming_absent`."""
    with naming_absent(group, patience.seconds):
        return handshake.gather(store, rank, size, name, text, patience.left(), patience.pause)
