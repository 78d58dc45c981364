"""`DistributedOptimizer`: an optimizer of Keras that steps with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from fanin.horovod.gradient_groups import Groups, checked
from fanin.horovod.keras.compression import Compression, Compressor
from fanin.horovod.keras.reduction import reduction, sums
from fanin.horovod.process_sets import ProcessSet, global_process_set
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Adasum, Average


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, made one that reduces gradients over all ranks when it applies them.

    Its variables stay. A model that is saved with it can be loaded without fanin.

    `backward_passes_per_step` passes are added up before they are reduced; the model changes with
    the last of them alone. `average_aggregated_gradients` divides their sum by that number.
    `gradient_predivide_factor` divides gradients before the sum, and the rest of the average comes
    after it. `groups` are lists of variables, or a number of lists to make, that are reduced
    together; a step that JAX compiles reduces all gradients together in any case.
    `sparse_as_dense` sums `tf.IndexedSlices` as dense tensors. A rank that is not in `process_set`
    steps with its own gradients.

    Raises `ValueError` for `op=Adasum`, as Horovod does.
    """
    del device_dense, device_sparse
    if op is Adasum:
        raise ValueError("Adasum is not for Keras's optimizers: use op=Average or op=Sum")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step is {backward_passes_per_step}, and must be 1 or more"
        )
    groups = checked(groups, num_groups, op, gradient_predivide_factor)
    reduce = reduction(
        name or f"Distributed{type(optimizer).__name__}",
        compression,
        sparse_as_dense,
        ReduceOp(op),
        gradient_predivide_factor,
        groups,
        process_set,
    )
    base = type(optimizer)
    if issubclass(base, _Distributed):
        base = base.__bases__[1]
    # The class keeps its name and its module, so Keras writes it down as the one that it knows.
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_reduce": staticmethod(reduce),
        "_passes": backward_passes_per_step,
        "_averages": average_aggregated_gradients,
        "_scales_local": scale_local_gradients,
    }
    optimizer.__class__ = type(base.__name__, (_Distributed, base), attributes)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **keywords: Any
) -> Any:
    """Return a `DistributedOptimizer` that leaves the weights of some layers to each rank.

    `local_layers` are one layer or several. All other arguments are those of
    `DistributedOptimizer`.
    """
    made = DistributedOptimizer(optimizer, *args, **keywords)
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers or []]
    for layer in layers:
        for variable in getattr(layer, "trainable_variables", ()):
            made.register_local_var(variable)
    return made


class _Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Stands before an optimizer's class: gradients are reduced before they are applied."""

    _reduce: Any
    _passes: int
    _averages: bool
    _scales_local: bool
    _local_vars: tuple[Any, ...] = ()
    _sums: Any = None

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._local_vars = (*self._local_vars, variable)

    def forget_passes(self) -> None:
        """Drop the gradients of passes that were added up, and that no step has applied."""
        if self._sums is not None:
            self._sums.forget()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce gradients over all ranks, and apply them. See `keras.Optimizer.apply`."""
        gradients = list(grads)
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(known)
        apply = super().apply
        if not gradients or self._passes == 1:
            return apply(self._reduced(gradients, variables), trainable_variables)
        if self._sums is None:
            self._sums = sums(self._passes, self._averages)

        def step(added: list[Any]) -> None:
            apply(self._reduced(added, variables), variables)

        def wait() -> None:
            self._iterations.assign_add(1)

        if not self.built:
            self.build(variables)
        self._sums.add(gradients, step, wait)
        return None

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients of all ranks; those of local variables are this rank's."""
        if not self._local_vars:
            return list(self._reduce(gradients, variables))
        local = set(map(id, self._local_vars))
        shared = [i for i, variable in enumerate(variables) if id(variable) not in local]
        results = list(gradients)
        if self._scales_local:
            size = self._reduce.size()
            for i, variable in enumerate(variables):
                if id(variable) in local and results[i] is not None:
                    results[i] = self._reduce.divided(results[i], size)
        reduced = self._reduce([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results
