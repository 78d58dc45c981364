"""State that all ranks have alike, and go back to when some of them are gone."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from fanin.horovod.errors import HostsUpdatedInterrupt
from fanin.horovod.objects import broadcast_object
from fanin.horovod.world import is_initialized, rank, world


class HostUpdateResult(IntFlag):
    """How the machines of a job changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State(ABC):
    """The state that `run` gives a training function; subclasses say what it consists of."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        del get_rank  # `bcast_object` knows whose object counts
        self._of_rank_0 = bcast_object
        self._changes: dict[float, HostUpdateResult] = {}
        self._heeded_until = 0.0
        self._after_reset: list[Callable[[], Any]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what the program has put into the state."""

        def __setattr__(self, name: str, value: Any) -> None:
            """Take what the program puts there."""

    @abstractmethod
    def save(self) -> None:
        """Keep the state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Take rank 0's state."""

    def reset(self) -> None:  # noqa: B027 - a subclass may leave it out
        """Adapt to other ranks; nothing unless a subclass says what."""

    def commit(self) -> None:
        """Save the state, to be restored after a failure; see `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Let the next `commit` of all ranks interrupt the training, if rank 0 is told."""
        known = self._changes.get(timestamp, HostUpdateResult.no_update)
        self._changes[timestamp] = known | update_res

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if rank 0 was told that machines changed.

        Rank 0 asks the launcher, too, if that is one that lets ranks come and go.
        """
        if is_initialized() and rank() == 0:
            removed, added = world().meeting.change()
            if removed or added:
                result = HostUpdateResult.removed * removed | HostUpdateResult.added * added
                self.on_hosts_updated(time.time(), HostUpdateResult(result))
        known = self._changes.copy()  # another thread may add to them
        fresh: dict[float, HostUpdateResult] = self._of_rank_0(
            {at: change for at, change in known.items() if at > self._heeded_until}
        )
        if fresh:
            self._heeded_until = max(fresh)
            # Each rank that is left has what all have, and needs nothing of rank 0.
            raise HostsUpdatedInterrupt(set(fresh.values()) == {HostUpdateResult.removed})

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Call these after the ranks have met anew: to scale a learning rate, for example."""
        self._after_reset += callbacks

    def on_reset(self) -> None:
        """Adapt to the ranks that have met anew; what was said of machines before is past."""
        self._changes.clear()
        self._heeded_until = 0.0
        for call in (self.reset, *self._after_reset):
            call()


class ObjectState(State):
    """A state of objects that `pickle` takes; each keyword is an attribute.

    `sync` raises `HorovodInternalError` on all ranks if it does not take one of rank 0's.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        # For each attribute, the object that it is, and what was in it if that is to be undone.
        self._snapshot: dict[str, tuple[Any, Any]] = dict.fromkeys(kwargs, (None, None))
        self._take_snapshot()

    def save(self) -> None:
        """Keep the attributes: the objects that they are, not copies."""
        self._take_snapshot()

    def restore(self) -> None:
        """Set the attributes to what was kept."""
        for name, (value, contents) in self._snapshot.items():
            if contents is not None:
                value.load_state_dict(copy.deepcopy(contents))
            setattr(self, name, value)

    def sync(self) -> None:
        """Take rank 0's objects, and keep them."""
        whole = {name: value for name, value in self._now().items() if not self._loads(value)}
        if whole:
            for name, value in self._of_rank_0(whole).items():
                setattr(self, name, value)
        self._take_snapshot()

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._snapshot}

    def _loads(self, value: Any) -> bool:
        """Whether an object stays, and a state is loaded into it."""
        del value
        return False

    def _take_snapshot(self) -> None:
        self._snapshot = {
            name: (value, copy.deepcopy(value.state_dict()) if self._loads(value) else None)
            for name, value in self._now().items()
        }
