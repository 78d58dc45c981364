"""Tensors of Keras's backend as NumPy arrays, and back."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops


class NotInJit(TypeError):  # noqa: N818 - what is wrong
    """A value is traced by `jax.jit`, and no Python can see it: the message says what to do."""


def reattach(model: Any) -> None:
    """Give the variables of a model their values.

    Keras's trainer on JAX takes the values away within an epoch. It reads the variables again
    before the next step, so a value that is assigned now counts.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def is_traced(tensor: Any) -> bool:
    """Return whether JAX traces a tensor, whose values are there once the program runs."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return isinstance(tensor, jax.core.Tracer)


def to_array(tensor: Any) -> Any:
    """Return a tensor of the backend, a variable of Keras or a number as an array.

    Raises `NotInJit` for a tensor that JAX traces.
    """
    value = tensor.value if isinstance(tensor, keras.Variable) else tensor
    if is_traced(value):
        raise NotInJit(
            "jax.jit traces this value, and Python needs it: call this outside of the compiled "
            "program, compile the model with run_eagerly=True, or take fanin.jax's collectives "
            "(docs/jax.md)"
        )
    return np.asarray(ops.convert_to_numpy(value))


def of_array(array: Any, like: Any) -> Any:
    """Return an array as a tensor of the backend, on the device of another one."""
    tensor = ops.convert_to_tensor(array)
    if keras.backend.backend() == "torch":
        return tensor.to(like.device)
    return tensor
