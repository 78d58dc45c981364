"""The gradients of a step, reduced over all ranks: for tapes, and for Keras's optimizers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from fanin._elastic_members import ELASTIC
from fanin.horovod import array_operations as arrays
from fanin.horovod.gradient_groups import Groups, grouped
from fanin.horovod.process_sets import ProcessSet, set_ranks
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average, reducible
from fanin.horovod.tensorflow import bridge
from fanin.horovod.tensorflow.collectives import slices_can_be_reduced, slices_of
from fanin.horovod.tensorflow.compression import Compressor


class Reduction:
    """Reduces lists of gradients that belong to the same variables each time."""

    def __init__(
        self,
        name: str,
        compression: Compressor,
        sparse_as_dense: bool,
        op: ReduceOp,
        predivide: float,
        groups: Groups | None,
        process_set: ProcessSet,
    ) -> None:
        self._name = name
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self._scales = (1.0 / predivide, predivide) if op is Average else (1.0, 1.0)
        self._groups = groups
        self.process_set = process_set

    def size(self) -> tf.Tensor:
        """Return the number of ranks that reduce, as float32; a graph asks for it when it runs."""
        return tf.cast(bridge.number(lambda: len(self.process_set.all_ranks()), None), tf.float32)

    def divided(self, gradient: Any, size: tf.Tensor) -> Any:
        """Return a gradient that ranks keep for themselves in the place of an average."""
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)

    @bridge.as_written
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None.

        A rank that is not in the process set gets its own. Raises `NotImplementedError` for slices
        that cannot be reduced.
        """
        results = [self._dense(gradient) for gradient in gradients]
        if not self.process_set.included() or self._is_alone():
            return results
        reducible(self._op, self.process_set)
        there = [i for i, gradient in enumerate(results) if gradient is not None]
        # Backward makes the last gradients first.
        step = bridge.Step()
        begun = [
            self._begin(step, places, results)
            for places in reversed(grouped(there, variables, self._groups))
        ]
        for ends in begun:
            ends()
        return results

    def _is_alone(self) -> bool:
        """Whether there are no other ranks to reduce with, now and when a graph runs later.

        Ranks may join an elastic job, and its graphs stay.
        """
        if not tf.executing_eagerly() and os.environ.get(ELASTIC):
            return False
        return len(set_ranks(self.process_set)) == 1

    def _dense(self, gradient: Any) -> Any:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if is_sparse and self._sparse_as_dense else gradient

    def _begin(self, step: bridge.Step, places: list[int], results: list[Any]) -> Any:
        """Submit what is reduced together; return what waits for it, and puts it into results."""
        sparse = [i for i in places if isinstance(results[i], tf.IndexedSlices)]
        begun = [self._begin_slices(step, i, results) for i in sparse]
        dense = [i for i in places if i not in sparse]
        if dense:
            begun.append(self._begin_sum(step, dense, results))

        def ends() -> None:
            for each in begun:
                each()

        return ends

    def _begin_sum(self, step: bridge.Step, places: list[int], results: list[Any]) -> Any:
        sent = [self._compression.compress(tf.convert_to_tensor(results[i])) for i in places]
        given = [tensor for tensor, _ in sent]
        name = f"{self._name}.{places[0]}"
        begun = step.begin(
            lambda *each: arrays.allreduce(each, name, self._op, self._scales, self.process_set),
            given,
        )

        def ends() -> None:
            dtypes, shapes = [each.dtype for each in given], [each.shape for each in given]
            summed = step.end(begun, dtypes, shapes)
            for i, result, (_, context) in zip(places, summed, sent, strict=True):
                results[i] = self._compression.decompress(result, context)

        return ends

    def _begin_slices(self, step: bridge.Step, place: int, results: list[Any]) -> Any:
        slices = results[place]
        slices_can_be_reduced(self._op, self._scales)
        name = f"{self._name}.{place}"
        begun = step.begin(
            lambda *each: arrays.allgather(each, name, self.process_set, sparse=True),
            [slices.indices, slices.values],
        )

        def ends() -> None:
            shapes = [[None], tf.TensorShape([None]).concatenate(slices.values.shape[1:])]
            dtypes = [slices.indices.dtype, slices.values.dtype]
            indices, values = step.end(begun, dtypes, shapes)
            results[place] = slices_of(slices, indices, values, self._op, self.process_set)

        return ends
