"""Training that goes on with the ranks that are left when others are gone (docs/tensorflow.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from fanin.horovod.elastic import running
from fanin.horovod.elastic.state import HostUpdateResult, ObjectState, State
from fanin.horovod.keras.collectives import broadcast_variables
from fanin.horovod.keras.tensors import reattach, to_array

__all__ = [
    "CommitStateCallback",
    "HostUpdateResult",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a `State`.

    See `fanin.horovod.elastic.run`. Errors of collectives in a graph of TensorFlow, and in a
    program that JAX has compiled, are recovered from, too.
    """
    if keras.backend.backend() == "jax":
        from fanin.horovod.keras.compiled import PROGRAMS

        return running.run(PROGRAMS.as_horovods()(func))
    if keras.backend.backend() != "tensorflow":
        return running.run(func)
    from fanin.horovod.tensorflow import elastic as of_tensorflow

    return of_tensorflow.run(func)


class KerasState(ObjectState):
    """A state of a model, its optimizer, and other objects, each of which is an attribute.

    The optimizer is the one that the model was compiled with, unless it is given. Raises
    `ValueError` for a model without variables: it is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape)")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._values: list[Any] = []
        self._keep()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep the variables and the other objects."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Set the variables and the other objects to what was kept."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's variables and objects, and keep them."""
        broadcast_variables(self._variables(), 0)
        self._keep()
        super().sync()

    def reset(self) -> None:
        """Drop the gradients of passes that no step has applied: ranks that join have none."""
        super().reset()
        if hasattr(self.optimizer, "forget_passes"):
            self.optimizer.forget_passes()

    def _variables(self) -> list[Any]:
        reattach(self.model)
        of_optimizer = [] if self.optimizer is None else self.optimizer.variables
        distinct = {id(variable): variable for variable in [*self.model.variables, *of_optimizer]}
        return list(distinct.values())

    def _keep(self) -> None:
        self._values = [np.array(to_array(variable)) for variable in self._variables()]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state after every so many batches, and at the end of an epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._each = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count, on all ranks alike."""
        del logs
        self._left = self._each

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        del batch, logs
        self._left -= 1
        if not self._left:
            self._state.commit()
            self._left = self._each

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        del epoch, logs
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.batch`: the batches of this epoch that are done.

    It stands before `CommitStateCallback`. Data begin at `state.batch` after a failure, if the
    program says so (`steps_per_epoch`).
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count on from the batches that were done before."""
        del epoch, logs
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        del logs
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        del epoch, logs
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.epoch`: the epochs that are done. It stands before `CommitStateCallback`."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count on from the epochs that were done before: `fit` counts from 0."""
        del logs
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch."""
        del logs
        self._state.epoch = self._before + epoch + 1
