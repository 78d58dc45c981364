"""Variables of all ranks, and numbers of ranks as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from fanin.horovod import array_operations as arrays
from fanin.horovod import world
from fanin.horovod.process_sets import ProcessSet, global_process_set
from fanin.horovod.requests import Kind
from fanin.horovod.submission import named
from fanin.horovod.tensorflow import bridge


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Make variables what the root's are. All ranks give as many, in one order.

    Variables of Keras are taken, too. `inplace` says nothing: each variable is assigned to.
    """
    del inplace
    broadcast_(variables, root_rank, None, process_set)


@bridge.as_written
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Make variables what the root's are, and return their values."""
    listed = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in listed]
    if not values:
        return []
    name = named(bridge.site(name, "broadcast"), Kind.BROADCAST, process_set)
    # All are under way together.
    step = bridge.Step()
    begun = [
        step.begin(partial(_broadcast, root_rank, f"{name}.{i}", process_set), [value])
        for i, value in enumerate(values)
    ]
    results = []
    for variable, value, pending in zip(listed, values, begun, strict=True):
        (result,) = step.end(pending, [value.dtype], [value.shape])
        variable.assign(result)
        results.append(result)
    return results


def broadcast_global_variables(root_rank: int) -> None:
    """Raise `RuntimeError`: TensorFlow 2 has no list of all variables."""
    raise RuntimeError(
        "TensorFlow 2 keeps no list of all variables: call "
        f"hvd.broadcast_variables(model.variables, root_rank={root_rank})"
    )


@bridge.as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks as an int32 tensor; of a process set, by its number."""
    return bridge.number(lambda: len(world.world().sets[process_set_id]), name)


@bridge.as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this process is in a process set, else 0, as an int32 tensor."""
    return bridge.number(lambda: int(world.rank() in world.world().sets[process_set_id]), name)


@bridge.as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank as an int32 tensor."""
    return bridge.number(world.rank, name)


@bridge.as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's place among the ranks of its machine as an int32 tensor."""
    return bridge.number(world.local_rank, name)


@bridge.as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this machine as an int32 tensor."""
    return bridge.number(world.local_size, name)


def join() -> tf.Tensor:
    """Say that this rank has no more data, and wait until all ranks have said so.

    It adds zeros to the others' sums and averages meanwhile, which count it. Returns the rank that
    joined last, as an int32 tensor. Inside of `tf.function` it cannot be called.
    """
    return tf.constant(arrays.join(), tf.int32)


def _broadcast(root: int, name: str | None, process_set: ProcessSet, array: Any) -> Any:
    return arrays.broadcast([array], root, name, process_set)
