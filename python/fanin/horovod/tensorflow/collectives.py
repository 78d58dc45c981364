"""Collectives of tensors, through which gradients pass.

All of them work outside and inside of `tf.function`. Tensors are those of CPUs. Operations of all
ranks with one `name` belong together; those without a name belong together by their number. A
tensor must have the same shape and dtype on all ranks, unless it is said otherwise: else all ranks
get a `HorovodInternalError`, which is a `tf.errors.FailedPreconditionError`, too. Inside of
`tf.function` TensorFlow makes a `tf.errors.UnknownError` of it.

A graph outlives the ranks of an elastic job. Ranks and their number are therefore asked for when
an operation runs, and never when it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from fanin.horovod import array_operations as arrays
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average, Sum, reduce_op
from fanin.horovod.tensorflow import bridge
from fanin.horovod.tensorflow.compression import Compression, Compressor
from fanin.horovod.world import rank


@bridge.as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return a tensor reduced over the ranks of a process set; the average unless `op` is given.

    `tf.IndexedSlices` are summed or averaged as the indices and values of all ranks, one behind the
    other. Raises `NotImplementedError` for other operations of them, and for factors.
    """
    del device_dense, device_sparse, ignore_name_scope
    chosen = reduce_op(op, average)
    scales = prescale_factor, postscale_factor
    return _reduced([tensor], name, chosen, scales, process_set, compression)[0]


@bridge.as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return several tensors reduced, all at once, under one name. See `allreduce`."""
    del device_dense, device_sparse, ignore_name_scope
    chosen = reduce_op(op, average)
    scales = prescale_factor, postscale_factor
    return _reduced(tensors, name, chosen, scales, process_set, compression)


@bridge.as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, joined at the first dimension, in which they may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@bridge.as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return several tensors joined with those of all ranks. See `allgather`."""
    del ignore_name_scope
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]

    name = bridge.site(name, "allgather")

    def gathered(*given: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        shapes = [_of_some_rows(each.shape) for each in given]
        results = bridge.call(
            lambda *each: arrays.allgather(each, name, process_set),
            given,
            [each.dtype for each in given],
            shapes,
        )

        def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            # All ranks' losses are of all rows: each gets the mean of what they say of its own.
            reduced = _allreduce(cotangents, None, Average, (1.0, 1.0), process_set)
            ours = tf.stack([tf.shape(each, tf.int64)[0] for each in given])
            lengths = allgather(ours[tf.newaxis], process_set=process_set)
            place = bridge.number(lambda: set_ranks(process_set).index(rank()), None)
            begins = tf.reduce_sum(lengths[:place], 0)
            return [each[begins[i] : begins[i] + ours[i]] for i, each in enumerate(reduced)]

        return results, gradient

    return list(tf.custom_gradient(gathered)(*given))


@bridge.as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank, which is counted among all, also in a process set."""
    del ignore_name_scope

    name = bridge.site(name, "broadcast")

    def sent(given: tf.Tensor) -> tuple[tf.Tensor, Any]:
        (result,) = bridge.call(
            lambda each: arrays.broadcast([each], root_rank, name, process_set),
            [given],
            [given.dtype],
            [given.shape],
        )

        def gradient(cotangent: tf.Tensor) -> tf.Tensor:
            (reduced,) = _allreduce([cotangent], None, Average, (1.0, 1.0), process_set)
            is_root = bridge.number(lambda: int(rank() == root_rank), None)
            return tf.where(is_root == 1, reduced, tf.zeros_like(reduced))

        return result, gradient

    return tf.custom_gradient(sent)(tf.convert_to_tensor(tensor))


@bridge.as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give each rank its rows of a tensor, and return what all ranks gave to this one.

    `splits` says how many rows each rank gets: one integer for each. The result is a pair then, of
    the rows that came and of how many came from each rank, in the splits' dtype. Without it all
    get as many. Raises `ValueError`, which is a `tf.errors.InvalidArgumentError`, too, if the
    splits ask for rows that are not there.
    """
    del ignore_name_scope
    cut = None if splits is None else tf.convert_to_tensor(splits)
    if cut is not None and cut.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"splits are {cut.dtype.name}, and must be int32 or int64")
    output, received = _exchanged(tf.convert_to_tensor(tensor), cut, name, process_set)
    return output if cut is None else (output, received)


@bridge.as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of a tensor summed, or averaged, over all ranks.

    If rows cannot be divided evenly, the first ranks get one more.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        name,
        process_set,
        ignore_name_scope,
        prescale_factor,
        postscale_factor,
    )[0]


@bridge.as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of several tensors, all at once. See `reducescatter`."""
    del device_dense, ignore_name_scope
    scales = prescale_factor, postscale_factor
    sent = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    name = bridge.site(name, "reducescatter")

    def scattered(*given: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        results = bridge.call(
            lambda *each: arrays.reducescatter(each, name, op, scales, process_set),
            given,
            [each.dtype for each in given],
            [_of_some_rows(each.shape) for each in given],
        )

        def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            factor = tf.constant(prescale_factor * postscale_factor, tf.float64)
            if op is Sum:
                # As Horovod has it: in a sum, each rank's gradient counts once for each rank.
                size = bridge.number(lambda: len(set_ranks(process_set)), None)
                factor *= tf.cast(size, tf.float64)
            scaled = [each * tf.cast(factor, each.dtype) for each in cotangents]
            return grouped_allgather(scaled, process_set=process_set)

        return results, gradient

    results = tf.custom_gradient(scattered)(*(tensor for tensor, _ in sent))
    pairs = zip(results, sent, strict=True)
    return [compression.decompress(result, context) for result, (_, context) in pairs]


def _reduced(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    compression: Compressor,
) -> list[Any]:
    results: list[Any] = list(tensors)
    sparse = [i for i, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)]
    if sparse:
        slices_can_be_reduced(op, scales)
        parts = [part for i in sparse for part in (tensors[i].indices, tensors[i].values)]
        joined = iter(grouped_allgather(parts, name and f"{name}.sparse", process_set=process_set))
        for i in sparse:
            indices = next(joined)
            results[i] = slices_of(tensors[i], indices, next(joined), op, process_set)
    dense = [i for i, each in enumerate(tensors) if i not in sparse]
    if dense:
        sent = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        summed = _allreduce([each for each, _ in sent], name, op, scales, process_set)
        for i, result, (_, context) in zip(dense, summed, sent, strict=True):
            results[i] = compression.decompress(result, context)
    return results


def slices_can_be_reduced(op: ReduceOp, scales: tuple[float, float]) -> None:
    """Raise `NotImplementedError` unless slices of all ranks are summed or averaged as they are."""
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"tf.IndexedSlices are summed or averaged, and op is {op.name}: "
            "sparse_as_dense=True makes gradients dense"
        )
    if scales != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices have no factors before and after the sum: sparse_as_dense=True makes "
            "gradients dense"
        )


def slices_of(
    like: tf.IndexedSlices,
    indices: tf.Tensor,
    values: tf.Tensor,
    op: ReduceOp,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """Return what all ranks have gathered as slices of a tensor like this rank's."""
    if op is Average:
        size = bridge.number(lambda: len(set_ranks(process_set)), None)
        values = values / tf.cast(size, values.dtype)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def _allreduce(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    name = bridge.site(name, "allreduce")

    def summed(*given: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        results = bridge.call(
            lambda *each: arrays.allreduce(each, name, op, scales, process_set),
            given,
            [each.dtype for each in given],
            [each.shape for each in given],
        )

        def gradient(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            return _allreduce(cotangents, None, op, scales, process_set)

        return results, gradient

    return list(tf.custom_gradient(summed)(*tensors))


def _exchanged(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    dtype = tf.int32 if splits is None else splits.dtype
    name = bridge.site(name, "alltoall")

    def exchanged(given: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        cut = [] if splits is None else [splits]
        output, received = bridge.call(
            partial(_alltoall, name, process_set),
            [given, *cut],
            [given.dtype, dtype],
            [_of_some_rows(given.shape), [None]],
        )

        def gradient(cotangent: tf.Tensor, _: Any) -> tf.Tensor:
            back, _ = _exchanged(cotangent, received, None, process_set)
            # Rows that went nowhere have no gradient.
            missing = tf.shape(given)[0] - tf.shape(back)[0]
            zeros = tf.zeros(tf.concat([[missing], tf.shape(back)[1:]], 0), back.dtype)
            return tf.concat([back, zeros], 0)

        return (output, received), gradient

    result: tuple[tf.Tensor, tf.Tensor] = tf.custom_gradient(exchanged)(tensor)
    return result


def _alltoall(name: str | None, process_set: ProcessSet, array: Any, splits: Any = None) -> Any:
    return arrays.alltoall(array, splits, name, process_set)


def _of_some_rows(shape: tf.TensorShape) -> tf.TensorShape:
    """Return a shape whose first dimension is not known."""
    if not shape.rank:
        return tf.TensorShape(None)
    return tf.TensorShape([None]).concatenate(shape[1:])
