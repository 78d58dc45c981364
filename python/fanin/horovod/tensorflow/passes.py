"""Gradients of several passes, added up in variables: also inside of `tf.function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fanin.horovod.tensorflow.bridge import as_written


class Sums:
    """A variable for each gradient; the first pass says which there are."""

    def __init__(self, passes: int, averages: bool) -> None:
        self._passes = passes
        self._divisor = passes if averages else 1
        self._added: list[Any] | None = None
        self._count: Any = None

    def forget(self) -> None:
        """Begin anew, without the passes that no step has had."""
        if self._added is None:
            return
        self._count.assign(0)
        for total in self._added:
            if total is not None:
                total.assign(tf.zeros_like(total))

    @as_written
    def add(
        self, gradients: list[Any], step: Callable[[list[Any]], None], wait: Callable[[], None]
    ) -> None:
        """Add a pass; after the last one `step` gets the sums, else `wait` is called.

        `tf.IndexedSlices` are added up as dense tensors. None stays None in all passes.
        """
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        if self._added is None:
            # Outside of the function that is traced: the next one uses them, too.
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False)
                self._added = [
                    None if each is None else tf.Variable(tf.zeros(each.shape, each.dtype))
                    for each in dense
                ]
        kept = self._added
        for total, gradient in zip(kept, dense, strict=True):
            if total is not None:
                total.assign_add(gradient)
        self._count.assign_add(1)

        def last() -> tf.Tensor:
            step([None if each is None else each / self._divisor for each in kept])
            for total in kept:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)
            return tf.constant(True)

        def another() -> tf.Tensor:
            wait()
            return tf.constant(False)

        tf.cond(tf.equal(self._count, self._passes), last, another)
