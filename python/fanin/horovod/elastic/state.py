"""What all ranks have alike, and go back to when some of them are gone."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from enum import IntFlag
from typing import TYPE_CHECKING, Any

import torch

from fanin.horovod.elastic.sampler import ElasticSampler
from fanin.horovod.errors import HostsUpdatedInterrupt
from fanin.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fanin.horovod.world import rank


class HostUpdateResult(IntFlag):
    """How the machines of a job changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What a training function is given by `run`; subclasses say what it consists of."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._updates: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._updated = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what the program has put into the state."""

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Call these after the ranks have met anew: to scale a learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Take note that the ranks have met anew."""
        self._updates = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Let the next `commit` of all ranks interrupt the training, if rank 0 is told."""
        self._updates.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, to be restored after a failure; see `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if rank 0 was told that machines changed."""
        before, latest, changes = self._updated, self._updated, HostUpdateResult.no_update
        while not self._updates.empty():
            timestamp, change = self._updates.get()
            if timestamp > latest:
                latest = timestamp
                changes |= change
        before, self._updated, changes = self._bcast_object((before, latest, changes))
        if self._updated > before:
            # Who is left has what all have, and needs nothing of rank 0.
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other ranks; nothing unless a subclass says what."""


class ObjectState(State):
    """A state of objects that `pickle` takes; each keyword is an attribute."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        """Keep the attributes: the objects that they are, not copies."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was kept."""
        self._set_attributes()

    def sync(self) -> None:
        """Take rank 0's objects, as it saved them."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A state of a model, an optimizer and other objects; each is an attribute.

    Modules, optimizers and `ElasticSampler`s, also among the keywords, are saved as copies of their
    `state_dict`; what else there is, as in `ObjectState`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._kept = {
            name: copy.deepcopy(value.state_dict())
            for name, value in given.items()
            if isinstance(value, _WITH_STATE)
        }
        for name in self._kept:
            super().__setattr__(name, given.pop(name))
        super().__init__(broadcast_object, rank, **given)

    def save(self) -> None:
        """Copy the states of models, optimizers and samplers, and keep the rest."""
        for name in self._kept:
            self._keep(name)
        super().save()

    def restore(self) -> None:
        """Load what was saved last."""
        for name, state in self._kept.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Take rank 0's."""
        for name in self._kept:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, 0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict()))
            self._keep(name)
        super().sync()

    def reset(self) -> None:
        """Share what is left of each sampler's epoch among the ranks."""
        for name in self._kept:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_kept", ()):
            self._keep(name)

    def _keep(self, name: str) -> None:
        self._kept[name] = copy.deepcopy(getattr(self, name).state_dict())


_WITH_STATE = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
