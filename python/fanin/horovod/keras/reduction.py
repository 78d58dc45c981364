"""The gradients of a step, reduced over all ranks, on Keras's backends other than TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from fanin.horovod import array_operations as arrays
from fanin.horovod.engine import Handle
from fanin.horovod.gradient_groups import Groups, grouped
from fanin.horovod.keras.compression import Compressor
from fanin.horovod.keras.tensors import NotInJit, is_traced, of_array, to_array
from fanin.horovod.process_sets import ProcessSet, set_ranks
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Average, synchronize


class Reduction:
    """Reduces lists of gradients that belong to the same variables each time."""

    def __init__(
        self,
        name: str,
        compression: Compressor,
        op: ReduceOp,
        predivide: float,
        groups: Groups | None,
        process_set: ProcessSet,
    ) -> None:
        self._name = name
        self._compression = compression
        self._op = op
        self._scales = (1.0 / predivide, predivide) if op is Average else (1.0, 1.0)
        self._groups = groups
        self.process_set = process_set
        self._compiled: dict[tuple[int, ...], Any] = {}

    def size(self) -> Any:
        """Return the number of ranks that reduce."""
        return len(self.process_set.all_ranks())

    def divided(self, gradient: Any, size: Any) -> Any:
        """Return a gradient that ranks keep for themselves in the place of an average."""
        if is_traced(gradient):
            raise NotInJit(
                "the gradients of local layers are divided by the number of ranks, and a program "
                "that jax.jit compiles may run with others: compile the model with "
                "run_eagerly=True, or give scale_local_gradients=False"
            )
        return gradient / size

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None.

        A rank that is not in the process set gets its own. Gradients that JAX traces are reduced
        as often as the program runs.
        """
        results = list(gradients)
        there = [i for i, gradient in enumerate(results) if gradient is not None]
        if any(is_traced(results[i]) for i in there):
            sent = [self._compression.compress(results[i]) for i in there]
            summed = self._in_program(tuple(there))([tensor for tensor, _ in sent])
            for i, (_, context), result in zip(there, sent, summed, strict=True):
                results[i] = self._compression.decompress(result, context)
            return results
        if not self.process_set.included() or len(set_ranks(self.process_set)) == 1:
            return results
        begun = []
        for places in grouped(there, variables, self._groups):
            sent = [self._compression.compress(results[i]) for i in places]
            handle = self._submitted(places[0], [to_array(tensor) for tensor, _ in sent])
            begun.append((places, sent, handle))
        for places, sent, handle in begun:
            summed = synchronize(handle)
            for i, (tensor, context), result in zip(places, sent, summed, strict=True):
                results[i] = self._compression.decompress(of_array(result, tensor), context)
        return results

    def _in_program(self, places: tuple[int, ...]) -> Callable[[list[Any]], list[Any]]:
        from fanin.horovod.keras.compiled import Call

        def submit(index: int, gradient: Any) -> Handle | None:
            if not self.process_set.included() or len(set_ranks(self.process_set)) == 1:
                return None
            return self._submitted(places[index], [gradient])

        if places not in self._compiled:
            self._compiled[places] = Call(submit)
        call: Callable[[list[Any]], list[Any]] = self._compiled[places]
        return call

    def _submitted(self, place: int, gradients: list[Any]) -> Handle:
        name = f"{self._name}.{place}"
        return arrays.allreduce(gradients, name, self._op, self._scales, self.process_set)


class Sums:
    """Gradients of several passes, added up in memory."""

    def __init__(self, passes: int, averages: bool) -> None:
        self._passes = passes
        self._divisor = passes if averages else 1
        self._added: list[Any] = []
        self._count = 0

    def forget(self) -> None:
        """Begin anew, without the passes that no step has had."""
        self._added, self._count = [], 0

    def add(
        self, gradients: list[Any], step: Callable[[list[Any]], None], wait: Callable[[], None]
    ) -> None:
        """Add a pass; after the last one `step` gets the sums, else `wait` is called."""
        if any(map(is_traced, gradients)):
            raise NotInJit(
                "backward_passes_per_step counts passes in Python, and jax.jit compiles this step: "
                "compile the model with run_eagerly=True, or let Keras count "
                "(gradient_accumulation_steps of the optimizer)"
            )
        pairs = zip(self._added or gradients, gradients, strict=True)
        first = not self._added
        self._added = [
            one if first or one is None or other is None else one + other for one, other in pairs
        ]
        self._count += 1
        if self._count < self._passes:
            wait()
            return
        added, self._added, self._count = self._added, [], 0
        step([None if each is None else each / self._divisor for each in added])


def sums(passes: int, averages: bool) -> Any:
    """Return how gradients of Keras's backend are added up: `Sums`, or TensorFlow's."""
    if keras.backend.backend() == "tensorflow":
        from fanin.horovod.tensorflow.passes import Sums as OfTensorFlow

        return OfTensorFlow(passes, averages)
    return Sums(passes, averages)


def reduction(
    name: str,
    compression: Compressor,
    sparse_as_dense: bool,
    op: ReduceOp,
    predivide: float,
    groups: Groups | None,
    process_set: ProcessSet,
) -> Any:
    """Return how gradients of Keras's backend are reduced: a `Reduction`, or TensorFlow's."""
    if keras.backend.backend() == "tensorflow":
        from fanin.horovod.tensorflow import reduction as tensorflow

        return tensorflow.Reduction(
            name, compression, sparse_as_dense, op, predivide, groups, process_set
        )
    return Reduction(name, compression, op, predivide, groups, process_set)
