"""`DistributedGradientTape`: a tape whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from fanin.horovod.gradient_groups import Groups, checked
from fanin.horovod.process_sets import ProcessSet, global_process_set
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average
from fanin.horovod.tensorflow.bridge import as_written
from fanin.horovod.tensorflow.compression import Compression, Compressor
from fanin.horovod.tensorflow.reduction import Reduction


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with what another one has recorded; `gradient` reduces over all ranks.

    Inside of `tf.function` each gradient is submitted as soon as it is there, while backward goes
    on. `gradient_predivide_factor` divides gradients before the sum, and the rest of the average
    comes after it. `groups` are lists of variables, or a number of lists to make, that are reduced
    together. `sparse_as_dense` sums `tf.IndexedSlices` as dense tensors. A rank that is not in
    `process_set` gets its own gradients. Gradients of local sources (`register_local_source`) are
    not reduced; they are divided by the number of ranks, unless `scale_local_gradients` is False.
    """
    del device_dense, device_sparse
    groups = checked(groups, num_groups, op, gradient_predivide_factor)
    reduction = Reduction(
        "DistributedGradientTape",
        compression,
        sparse_as_dense,
        ReduceOp(op),
        gradient_predivide_factor,
        groups,
        process_set,
    )
    return _Tape(gradtape, reduction, scale_local_gradients)


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that leaves the weights of some layers to each rank.

    `local_layers` are one layer of Keras or several.
    """
    made = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers or []]
    for layer in layers:
        for variable in getattr(layer, "trainable_weights", ()):
            made.register_local_source(variable)
    return made


class _Tape(tf.GradientTape):  # type: ignore[misc]
    """A tape that goes on where another one was."""

    def __init__(self, tape: tf.GradientTape, reduction: Reduction, scales_local: bool) -> None:
        self.__dict__.update(vars(tape))
        self._reduction = reduction
        self._scales_local = scales_local
        self._local: set[int] = set()
        # The variables stay: another one could have a number of one that is gone.
        self._local_sources: list[Any] = []

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._local_sources.append(source)
        self._local.add(id(source))

    @as_written
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, **keywords: Any
    ) -> Any:
        """Return the gradients of all ranks, in the structure of the sources.

        The arguments are those of `tf.GradientTape.gradient`. `use_generic_names` says nothing:
        gradients are named by their places.
        """
        keywords.pop("use_generic_names", None)
        gradients = super().gradient(target, sources, output_gradients, **keywords)
        flat, of = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        shared = [i for i, source in enumerate(of) if id(source) not in self._local]
        reduced = self._reduction([flat[i] for i in shared], [of[i] for i in shared])
        if self._scales_local and self._local:
            size = self._reduction.size()
            for i, source in enumerate(of):
                if id(source) in self._local and flat[i] is not None:
                    flat[i] = self._reduction.divided(flat[i], size)
        for i, each in zip(shared, reduced, strict=True):
            flat[i] = each
        return tf.nest.pack_sequence_as(sources, flat)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, **keywords: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of source and gradient: those of local sources, and all others."""
        gradients = self.gradient(target, sources, output_gradients, **keywords)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if id(pair[0]) in self._local]
        return local, [pair for pair in pairs if id(pair[0]) not in self._local]
