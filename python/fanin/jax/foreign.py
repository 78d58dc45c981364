"""XLA's calls of a group's collectives, by its foreign function interface (xla/ffi/api/c_api.h).

XLA calls `_handle` with the memory of operands and results, on a thread of its own or on the one
that runs the program. NumPy arrays are made of that memory. XLA lets the result of an all-reduce or
a broadcast take its operand's place if nobody needs the operand any more; else it is copied.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, cast

import jax
import ml_dtypes
import numpy as np

from fanin import _fanin
from fanin.arrays.group import Group
from fanin.arrays.operators import Array

TARGET: Final = "fanin_collective"
# When an interruption comes that was held back, in seconds.
AFTERWARDS: Final = 0.05

_EXECUTE: Final = 3
_METADATA: Final = 1
_INTERNAL: Final = 13
_VERSION: Final = (0, 1)
"""The interface's; XLA understands older ones than its own."""
_TOKEN: Final = 17
_DTYPES: Final[dict[int, Any]] = {
    1: np.bool_,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint8,
    7: np.uint16,
    8: np.uint32,
    9: np.uint64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    15: np.complex64,
    16: ml_dtypes.bfloat16,
    18: np.complex128,
}
DTYPES: Final = frozenset(np.dtype(each).name for each in _DTYPES.values())
"""The names of those that can be handed over."""

_pointer = ctypes.c_void_p
_size = ctypes.c_size_t


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", _size), ("type", ctypes.c_int), ("next", _pointer))


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("dtype", ctypes.c_int),
        ("data", _pointer),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    """Operands, or results."""

    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("size", ctypes.c_int64),
        ("types", _pointer),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Text(ctypes.Structure):
    _fields_ = (("data", _pointer), ("length", _size))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("size", ctypes.c_int64),
        ("types", _pointer),
        ("names", ctypes.POINTER(ctypes.POINTER(_Text))),
        ("values", ctypes.POINTER(_pointer)),
    )


class _ErrorToMake(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class _Interface(ctypes.Structure):
    """The beginning of XLA_FFI_Api."""

    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("version", _Version),
        ("internal", _pointer),
        ("make_error", ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_ErrorToMake))),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", ctypes.POINTER(_Extension)),
        ("interface", ctypes.POINTER(_Interface)),
        ("context", _pointer),
        ("stage", ctypes.c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class Begun(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until it is over; raises its error."""
        ...


Begin = Callable[[Any, int, Array, Array], Begun]
"""Begins a group's collective of an operand, by its place, whose result goes into an array."""

_numbers = itertools.count()
_lock = threading.Lock()
# By their numbers: a program that was traced names its group and its collective so.
_groups: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_numbers_of: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_begins: dict[int, Begin] = {}
_begins_of: dict[Any, int] = {}


def group_number(group: object) -> int:
    """Return the number of a group, or of what stands for it, by which calls name it."""
    with _lock:
        if group not in _numbers_of:
            number = _numbers_of[group] = next(_numbers)
            _groups[number] = group
        return _numbers_of[group]


def call_number(key: Any, begin: Begin) -> int:
    """Return the number of a collective, the same for each `key`."""
    with _lock:
        if key not in _begins_of:
            number = _begins_of[key] = next(_numbers)
            _begins[number] = begin
        return _begins_of[key]


def _handle(frame: Any) -> int | None:
    """Be called by XLA; return an error of its own, or nothing."""
    call = frame.contents
    if call.extension and call.extension.contents.type == _METADATA:
        told = ctypes.cast(call.extension, ctypes.POINTER(_MetadataExtension)).contents
        metadata = told.metadata.contents
        metadata.version.major, metadata.version.minor = _VERSION
        metadata.traits = 0
        return None
    if call.stage != _EXECUTE:
        return None
    try:
        with _uninterrupted():
            _execute(call)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()
        made = _ErrorToMake(ctypes.sizeof(_ErrorToMake), None, text, _INTERNAL)
        error_of_xla = call.interface.contents.make_error(ctypes.byref(made))
        return None if error_of_xla is None else int(error_of_xla)
    return None


def _execute(call: Any) -> None:
    said = {
        ctypes.string_at(name.contents.data, name.contents.length): ctypes.cast(
            value, ctypes.POINTER(_Scalar)
        ).contents.value[0]
        for name, value in zip(
            call.attributes.names[: call.attributes.size],
            call.attributes.values[: call.attributes.size],
            strict=True,
        )
    }
    group = _groups.get(said[b"group"])
    if group is None:
        raise RuntimeError("the group of this program is gone: keep it as long as the program runs")
    begin = _begins[said[b"call"]]
    operands, results = _arrays(call.operands), _arrays(call.results)
    handles: list[Begun] = []
    residuals = said[b"residuals"]
    count = len(results) - residuals
    try:
        for index in range(count):
            operand, result = operands[index], results[index]
            if residuals:
                residual = results[count + index]
                copy(operands[count + index], residual)
                copy(operand, result)
                operand = result
                assert isinstance(group, Group)
                assert group.wire_dtype is not None
                _fanin.feed_back(
                    result.ctypes.data,
                    result.size,
                    _name(result),
                    residual.ctypes.data,
                    group.wire_dtype,
                )
            handles.append(begin(group, index, operand, result))
    finally:
        # Whatever happens: XLA's memory is in use until then.
        failures = [error for error in map(_failure, handles) if error is not None]
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let no Ctrl-C leave memory to XLA that is still written to: it comes afterwards.

    XLA runs short programs on the thread that calls them, which may be the main one.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # Python raises nothing here
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            # Once XLA has returned: it would make an error of its own of it.
            threading.Timer(AFTERWARDS, _thread.interrupt_main).start()


def _failure(handle: Begun) -> Exception | None:
    try:
        handle.wait()
    except Exception as error:
        return error
    return None


def copy(source: Array, target: Array) -> None:
    """Copy an array, unless it is the same memory."""
    if source.ctypes.data != target.ctypes.data:
        target[...] = source


def _arrays(buffers: Any) -> list[Array]:
    return [
        _array(pointer.contents)
        for pointer in buffers.buffers[: buffers.size]
        if pointer.contents.dtype != _TOKEN
    ]


def _array(buffer: Any) -> Array:
    dtype = np.dtype(_DTYPES[buffer.dtype])
    shape: Sequence[int] = buffer.dims[: buffer.rank]
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if count == 0:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * count).from_address(buffer.data)
    array: Array = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
    return array


def _name(array: Array) -> _fanin.DType:
    return cast("_fanin.DType", array.dtype.name)


# Kept as long as XLA may call it.
_called = ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_Frame))(_handle)
_ffi: Any = jax.ffi
_ffi.register_ffi_target(TARGET, _ffi.pycapsule(_called), platform="cpu")
