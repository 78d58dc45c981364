"""What collectives do to arrays here, in NumPy: read them, lay them out, combine them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

Op: TypeAlias = Literal["sum", "avg", "min", "max", "product", "band", "bor", "bxor"]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

OPS: Final[tuple[str, ...]] = get_args(Op)
SUMS: Final = ("sum", "avg")
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def checked(op: str, dtype: np.dtype[Any]) -> Op:
    """Return the operator. Raises `ValueError` for none, `TypeError` for what it cannot combine."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; supported: {', '.join(OPS)}")
    if not dtype.isnative:
        raise TypeError(f"dtype {dtype} has another byte order than this machine: swap its bytes")
    whole = dtype.kind in "biu"
    if op in ("band", "bor", "bxor") and not whole:
        raise TypeError(f'cannot combine dtype {dtype} by "{op}": it is for integers and booleans')
    if dtype.kind in "SUmM" or (dtype.kind == "c" and op in ("min", "max")):
        raise TypeError(f'cannot combine dtype {dtype} by "{op}"')
    if dtype.kind == "b" and op == "avg":
        raise TypeError('cannot combine booleans by "avg": convert them to numbers')
    return op  # type: ignore[return-value]


def combined(op: Op, parts: Sequence[Array]) -> Array:
    """Combine a part of each rank in the order of the ranks; integers wrap.

    The first part is overwritten, and returned. An average of integers rounds towards zero, as the
    services' does.
    """
    function, into = _FUNCTIONS[op], parts[0]
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            function(into, part, out=into)
        if op == "avg":
            if into.dtype.kind in "iu":
                # Wider: there may be more ranks than a small integer can say.
                wide = into.astype(np.int64 if into.dtype.kind == "i" else np.uint64)
                quotient = wide // len(parts)
                into[...] = quotient + (((wide % len(parts)) != 0) & (wide < 0))
            else:
                into /= len(parts)
    return into


def read(value: Any) -> Array:
    """Return what the caller gave as an array, without a copy where it hands over its memory.

    Raises `TypeError` where that is no array of numbers, is masked, or lies in a device's memory.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("cannot take a masked array: fill what is masked first")
    array = None
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        # An array of a dtype that DLPack does not have comes by the buffer below.
        with contextlib.suppress(BufferError, RuntimeError, TypeError, ValueError):
            array = np.from_dlpack(value)
    if array is None:
        try:
            array = np.asarray(value)
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"cannot take a {type(value).__name__}: {error}") from error
    if array.dtype.hasobject or array.dtype.names is not None:
        name = array.dtype if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise TypeError(f"cannot take {name}: give an array of numbers")
    return array


def result_for(value: Any, array: Array, out: Array | None) -> Array:
    """Return where the result goes that has the shape and dtype of what was given.

    That is `out`, or a NumPy array that was given and can be written to, or a new one. It holds
    what was given.
    """
    if out is None and isinstance(value, np.ndarray) and value.flags.writeable:
        return array
    target = np.empty(array.shape, array.dtype) if out is None else fitting(out, array)
    target[...] = array
    return target


def fitting(out: Array, like: Array, rows: int | None = None) -> Array:
    """Return `out`. Raises `ValueError` or `TypeError` where the result does not fit into it.

    The result is like an array; with `rows` its first axis has so many.
    """
    shape = like.shape if rows is None else (rows, *like.shape[1:])
    if writable(out).shape != shape or out.dtype != like.dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}; the result has {shape} and "
            f"{like.dtype}"
        )
    return out


def writable(out: Array) -> Array:
    """Return `out`. Raises `TypeError` if it is no array, and `ValueError` if it is read-only."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__}: give a NumPy array")
    if not out.flags.writeable:
        raise ValueError("out is read-only, and the result is written into it")
    return out


def in_one_piece(array: Array) -> bool:
    """Whether the elements lie in their order, without gaps, where a number may lie."""
    return array.flags.c_contiguous and array.flags.aligned


def rows_of(shape: Sequence[int], world_size: int, name: str) -> int:
    """Return the rows of the first axis for each rank. Raises `ValueError` if they are uneven."""
    if not shape or shape[0] % world_size:
        raise ValueError(
            f"{name} cuts the first axis into {world_size} equal parts, one a rank, and the array "
            f"has shape {tuple(shape)}"
        )
    return shape[0] // world_size
