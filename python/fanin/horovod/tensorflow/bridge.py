"""The way of tensors to the engine and back, outside and inside of `tf.function`.

Outside, tensors are read where they are. Inside, an operation of the graph calls Python. It is a
stateful one, so TensorFlow makes such operations in the order of the program, on all ranks alike.

A sum may be one operation, which waits. Gradients have two. The first one submits, and ends at
once: so sums begin while backward goes on. The second one waits, after all have been submitted: so
no thread of TensorFlow waits for a sum that another rank submits later.

TensorFlow skips the second ones of a step that fails. The operation that fails therefore drops all
that its step has submitted, and a new engine drops all that an older one was given.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from fanin.horovod.engine import Engine, Handle
from fanin.horovod.errors import Disagreement
from fanin.horovod.programs import Programs
from fanin.horovod.world import world

Function = TypeVar("Function", bound=Callable[..., Any])
Submit = Callable[..., Handle]
"""Submits NumPy arrays; the handle has a list of arrays."""


@dataclass(frozen=True)
class _Submitted:
    """The operations that one run of a `Step` has submitted and not yet waited for."""

    engine: Engine
    handles: dict[int, Handle] = field(default_factory=dict)


_begun: Final[dict[int, _Submitted]] = {}
_numbers: Final = itertools.count(1)
# For each graph, the operations that it has so far.
_sites: Final[MutableMapping[Any, Iterator[int]]] = WeakKeyDictionary()
GRAPHS: Final = Programs(tf.errors.OpError, lambda: None)


class RanksDisagree(Disagreement, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks asked for something impossible, and all can go on; TensorFlow's name for it."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class WrongArgument(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc] # noqa: N818
    """A rank made a mistake that it alone hears of; TensorFlow's name for it."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def as_written(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function: that takes seconds, and ours need it not."""
    return cast("Function", tf.autograph.experimental.do_not_convert(function))


def site(name: str | None, kind: str) -> str | None:
    """Return the name of an operation; one without a name is called as its place in the graph.

    So it has the same name each time, and engines agree on it in few words. TensorFlow's own names
    may have numbers in them that ranks have counted differently.
    """
    if name or tf.executing_eagerly():
        return name
    numbers = _sites.setdefault(tf.compat.v1.get_default_graph(), itertools.count())
    return f"graph.{kind}.{next(numbers)}"


def call(
    submit: Submit, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], shapes: Sequence[Any]
) -> list[tf.Tensor]:
    """Submit tensors, wait, and return the results, whose dtypes and static shapes are given."""
    if tf.executing_eagerly():
        return _ended(_submitted(submit, tensors), dtypes)

    def waited(*arrays: Any) -> list[Any]:
        with GRAPHS.noting():
            return _results(submit(*arrays), dtypes)

    return _of_graph(waited, tensors, dtypes, shapes)


class Step:
    """Several operations that are all submitted before one is waited for."""

    def __init__(self) -> None:
        self._places = itertools.count()
        # Inside of a graph: the number of a run, which the first operation gives the others.
        self._run: Any = None

    def begin(self, submit: Submit, tensors: Sequence[tf.Tensor]) -> Any:
        """Submit tensors, and return what `end` takes."""
        if tf.executing_eagerly():
            return _submitted(submit, tensors)
        place = next(self._places)
        before = tf.constant(0, tf.int64) if self._run is None else self._run

        def noted(before: Any, *arrays: Any) -> Any:
            with GRAPHS.noting():
                run = int(before) or _new_run()
                with _dropping(run):
                    _begun[run].handles[place] = submit(*arrays)
            return np.int64(run)

        run = tf.numpy_function(noted, [before, *tensors], tf.int64, stateful=True)
        if self._run is None:
            run.set_shape([])
            self._run = run
        return place, run

    def end(self, begun: Any, dtypes: Sequence[tf.DType], shapes: Sequence[Any]) -> list[tf.Tensor]:
        """Wait, and return the results, whose dtypes and static shapes are given."""
        if isinstance(begun, Handle):
            return _ended(begun, dtypes)
        place, run = begun

        def waited(run: Any) -> list[Any]:
            submitted = _begun[int(run)]
            handle = submitted.handles.pop(place)
            with GRAPHS.noting(), _dropping(int(run)):
                results = _results(handle, dtypes)
            if not submitted.handles:
                _begun.pop(int(run), None)
            return results

        return _of_graph(waited, [run], dtypes, shapes)


def number(value: Callable[[], int], name: str | None) -> tf.Tensor:
    """Return a number as an int32 tensor; a graph asks for it each time that it runs."""
    if tf.executing_eagerly():
        return tf.constant(value(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def _of_graph(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
) -> list[tf.Tensor]:
    results = tf.numpy_function(function, tensors, list(dtypes), stateful=True)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _submitted(submit: Submit, tensors: Sequence[tf.Tensor]) -> Handle:
    with _told():
        return submit(*map(_array, tensors))


def _ended(handle: Handle, dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    with _told():
        results = _results(handle, dtypes)
    pairs = zip(results, dtypes, strict=True)
    return [tf.convert_to_tensor(result, dtype) for result, dtype in pairs]


def _new_run() -> int:
    """Return the number of a run that begins. Runs of an engine before this one have failed."""
    engine = world().engine
    for run, submitted in list(_begun.items()):
        if submitted.engine is not engine:
            _begun.pop(run, None)
    run = next(_numbers)
    _begun[run] = _Submitted(engine)
    return run


@contextlib.contextmanager
def _dropping(run: int) -> Iterator[None]:
    """Drop what a run has submitted if it fails: nobody will wait for it."""
    try:
        yield
    except BaseException:
        _begun.pop(run, None)
        raise


def _array(tensor: tf.Tensor) -> Any:
    """Return a tensor's memory; its `numpy()` would be a copy."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def _results(handle: Handle, dtypes: Sequence[tf.DType]) -> list[Any]:
    results = handle.wait()
    pairs = zip(results, dtypes, strict=True)
    return [np.asarray(result, dtype.as_numpy_dtype) for result, dtype in pairs]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise a mistake under TensorFlow's name, too."""
    try:
        yield
    except ValueError as error:
        raise WrongArgument(str(error)) from None
    except Disagreement as error:
        raise RanksDisagree(str(error)) from error.__cause__
