"""Callbacks of `model.fit`: one state to begin with, metrics of all ranks, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from fanin.horovod.keras.collectives import allreduce, broadcast_variables
from fanin.horovod.keras.tensors import reattach
from fanin.horovod.submission import Average
from fanin.horovod.world import rank, size

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes the variables of the model and of its optimizer the root's, after the first batch.

    They are all there by then. `local_variables` stay each rank's own.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        del device
        super().__init__()
        self._root_rank = root_rank
        self._local = list(local_variables or ())
        self._done = False

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable to each rank."""
        self._local.append(variable)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast, after the first batch of the first training."""
        del batch, logs
        if self._done:
            return
        reattach(self.model)
        local = set(map(id, self._local))
        everything = [*self.model.variables, *self.model.optimizer.variables]
        distinct = {id(variable): variable for variable in everything if id(variable) not in local}
        broadcast_variables(distinct.values(), self._root_rank)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over all ranks, for callbacks that come after it."""

    def __init__(self, device: str = "") -> None:
        del device
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the metrics in place."""
        del epoch
        for name, value in sorted((logs or {}).items()):
            assert logs is not None
            logs[name] = float(allreduce(float(value), f"metric.{name}", op=Average))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the initial learning rate by a number that depends on the epoch.

    `multiplier` is a function of the epoch, or the base of a power that begins at `start_epoch`.
    Before `start_epoch`, and from `end_epoch` on, the rate is left alone. With `staircase` it
    changes with the first batch of an epoch, else with each batch of `steps_per_epoch`: the
    function gets parts of epochs then. `momentum_correction` says nothing: the momentum of Keras 3
    is a part of the compiled step, and cannot change.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        del momentum_correction
        super().__init__()
        self._initial = initial_lr
        self._multiplier = multiplier
        self._start = start_epoch
        self.end_epoch = end_epoch
        self._staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Take the number of steps of an epoch. Raises `ValueError` if nobody says it."""
        del logs
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError("Keras does not know the steps of an epoch: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        del logs
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of this batch."""
        del logs
        if self._epoch < self._start or (self.end_epoch and self._epoch >= self.end_epoch):
            return
        if not self._staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate as "lr"."""
        del epoch
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        multiplier = self._multiplier
        factor = multiplier(epoch) if callable(multiplier) else multiplier ** (epoch - self._start)
        reattach(self.model)
        self.model.optimizer.learning_rate = self._initial * factor


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / ranks to `initial_lr` during some epochs.

    `initial_lr` is the rate for all ranks together. `verbose` lets rank 0 say when it is there.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # The last batch of an epoch has the rate of its end.
            there = (epoch + 1.0 / self.steps_per_epoch) / warmup_epochs
            return (there * (size() - 1) + 1.0) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate, and say that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self.end_epoch and rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.")
