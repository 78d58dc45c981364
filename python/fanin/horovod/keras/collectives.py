"""Collectives of values outside of training, models that are loaded, and variables of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from fanin.horovod import array_operations as arrays
from fanin.horovod.keras.compression import Compression, Compressor
from fanin.horovod.keras.optimizer import DistributedOptimizer
from fanin.horovod.keras.tensors import of_array, to_array
from fanin.horovod.process_sets import global_process_set
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average, reduce_op, synchronize


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """Return a tensor of the backend, an array or a number reduced over all ranks, as an array."""
    tensor, context = compression.compress(keras.ops.convert_to_tensor(value))
    scales = prescale_factor, postscale_factor
    handle = arrays.allreduce(
        [to_array(tensor)], name, reduce_op(op, average), scales, global_process_set
    )
    (result,) = synchronize(handle)
    return to_array(compression.decompress(of_array(result, tensor), context))


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, joined at the first dimension, as an array."""
    (result,) = synchronize(arrays.allgather([to_array(value)], name, global_process_set))
    return result


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank as an array; the others give one of its shape and dtype."""
    handle = arrays.broadcast([to_array(value)], root_rank, name, global_process_set)
    (result,) = synchronize(handle)
    return result


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Return this rank's rows of a value summed, or averaged, over all ranks, as an array."""
    handle = arrays.reducescatter([to_array(value)], name, op, (1.0, 1.0), global_process_set)
    (result,) = synchronize(handle)
    return result


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Make variables of Keras what the root's are. All ranks give as many, in one order."""
    listed = list(variables)
    # A seed is no number that is trained; it is a variable as all others.
    begun = [
        arrays.broadcast([to_array(variable)], root_rank, f"variable.{i}", global_process_set)
        for i, variable in enumerate(listed)
    ]
    for variable, handle in zip(listed, begun, strict=True):
        (result,) = synchronize(handle)
        variable.assign(result)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise `RuntimeError`: Keras 3 has no list of all variables."""
    raise RuntimeError(
        "Keras 3 keeps no list of all variables: give model.fit() "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Callable[..., Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a model that was saved, with its optimizer made a `DistributedOptimizer`.

    `custom_optimizers` are classes of optimizers that are not Keras's. Raises `ValueError` for
    `legacy_opts`, as Keras 3 has no legacy optimizers, and Keras's errors for the file.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers: leave legacy_opts out")
    objects = {made.__name__: made for made in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
