"""Training that goes on with the ranks that are left when others are gone (docs/tensorflow.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from fanin.horovod.elastic import running
from fanin.horovod.elastic.state import HostUpdateResult, ObjectState, State
from fanin.horovod.tensorflow.bridge import GRAPHS
from fanin.horovod.tensorflow.variables import broadcast_variables

if TYPE_CHECKING:
    from fanin.horovod.keras.elastic import KerasState as TensorFlowKerasState

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a `State`.

    See `fanin.horovod.elastic.run`. Errors of collectives inside of `tf.function` are recovered
    from, too.
    """
    return running.run(GRAPHS.as_horovods()(func))


class TensorFlowState(ObjectState):
    """A state of variables, and of other objects, each of which is an attribute.

    Raises `ValueError` without variables: TensorFlow 2 has no list of all.
    """

    def __init__(self, variables: Iterable[Any] | None = None, **kwargs: Any) -> None:
        if variables is None:
            raise ValueError("TensorFlow 2 keeps no list of all variables: give variables")
        self.variables = list(variables)
        self._values: list[Any] = []
        self._keep()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep the variables and the other objects."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Set the variables and the other objects to what was kept."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's variables and objects, and keep them."""
        broadcast_variables(self.variables, 0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._values = [tf.identity(variable) for variable in self.variables]


def __getattr__(name: str) -> object:
    if name != "TensorFlowKerasState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A program without Keras need not have it: its backend may be another framework.
    from fanin.horovod.keras.elastic import KerasState

    return KerasState
