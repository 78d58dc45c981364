"""The functions of MPI that XLA calls, done by groups of fanin (`mpi.c` has their names).

A communicator is a group of the processes that have a device in it. XLA calls on threads of its
own, one collective after the other. It ignores the results of `MPI_Init_thread` and
`MPI_Comm_split`. If these fail, their communicator keeps the error, and its collectives return it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
from jax._src.distributed import global_state

import fanin
from fanin.arrays.group import Group, Handle
from fanin.arrays.operators import Array, Op
from fanin.errors import FaninError
from fanin.jax.foreign import _failure, _uninterrupted
from fanin.jax.meeting import _Store
from fanin.jax.mpi import CALLED

TIMEOUT: Final = 1800.0
"""How long a process waits for the others in a collective, in seconds."""
ERROR_BYTES_MAX: Final = 1024
"""How long a text of `MPI_Error_string` may be: MPIABI_MAX_ERROR_STRING."""

_DTYPES: Final[dict[str, Any]] = {
    "BYTE": np.uint8,
    "C_COMPLEX": np.complex64,
    "C_DOUBLE_COMPLEX": np.complex128,
    "DOUBLE": np.float64,
    "FLOAT": np.float32,
    "INT16_T": np.int16,
    "INT32_T": np.int32,
    "INT64_T": np.int64,
    "INT8_T": np.int8,
    "UINT16_T": np.uint16,
    "UINT32_T": np.uint32,
    "UINT64_T": np.uint64,
    "UINT8_T": np.uint8,
}
_OPS: Final[dict[str, Op]] = {"SUM": "sum", "PROD": "product", "MIN": "min", "MAX": "max"}
# Below are the constants of `mpi.c`, which are handles, too.
_FIRST_HANDLE: Final = 1 << 16

_int = ctypes.c_int
_pointer = ctypes.c_void_p
_handle = ctypes.c_size_t
_int_out = ctypes.POINTER(_int)
_handle_out = ctypes.POINTER(_handle)
# Memory, a count, a datatype, a rank and a tag.
_message = (_pointer, _int, _handle, _int, _int)

_PARAMETERS: Final[dict[str, tuple[Any, ...]]] = {
    "Allgather": (_pointer, _int, _handle, _pointer, _int, _handle, _handle),
    "Allreduce": (_pointer, _pointer, _int, _handle, _handle, _handle),
    "Comm_rank": (_handle, _int_out),
    "Comm_size": (_handle, _int_out),
    "Comm_split": (_handle, _int, _int, _handle_out),
    "Error_string": (_int, _pointer, _int_out),
    "Finalize": (),
    "Irecv": (*_message, _handle, _handle_out),
    "Isend": (*_message, _handle, _handle_out),
    "Reduce_scatter": (_pointer, _pointer, _int_out, _handle, _handle, _handle),
    "Sendrecv": (*_message, *_message, _handle, _pointer),
    "Wait": (_handle_out, _pointer),
}
# The callbacks live as long as XLA may call them.
_callbacks: list[Any] = []


def begin() -> None:
    """Join the processes of `jax.distributed`, and set the pointers of `mpi.c`."""
    library = ctypes.CDLL(os.environ["MPITRAMPOLINE_LIB"])
    calls = _Calls(lambda name: _handle.in_dll(library, f"MPIABI_{name}").value)
    for name in CALLED:
        work = calls.answering(getattr(calls, name.lower()))
        callback = ctypes.CFUNCTYPE(_int, *_PARAMETERS[name])(work)
        _callbacks.append(callback)
        _pointer.in_dll(library, f"fanin_{name}").value = ctypes.cast(callback, _pointer).value


class _Calls:
    """The functions, the communicators of this process, and the messages that are under way."""

    def __init__(self, constant: Callable[[str], int]) -> None:
        self._dtypes = {constant(name): np.dtype(dtype) for name, dtype in _DTYPES.items()}
        self._ops = {constant(name): op for name, op in _OPS.items()}
        self._handles = itertools.count(_FIRST_HANDLE)
        self._numbers = itertools.count(1)
        self._messages: dict[int, Handle] = {}
        self._errors: dict[int, str] = {}
        self._groups: dict[int, Group | Exception] = {}
        # The processes by rank, if a communicator has them in another order than the world.
        self._processes: dict[int, list[int]] = {}
        self._world = constant("COMM_WORLD")
        # The communicator of the collective that is under way.
        self._latest = self._world
        try:
            self._groups[self._world] = _world()
        except Exception as error:
            self._groups[self._world] = error

    def answering(self, work: Callable[..., None]) -> Callable[..., int]:
        """Return a function with the results of MPI: 0, or the number of an error."""

        def call(*arguments: Any) -> int:
            try:
                with _uninterrupted():
                    work(*arguments)
            except BaseException as error:
                # XLA frees its memory after an error, and waits for no other message.
                while self._messages:
                    _failure(self._messages.popitem()[1])
                number = next(self._numbers)
                self._errors[number] = f"{type(error).__name__}: {error}{self._names()}"
                return number
            return 0

        return call

    def comm_rank(self, comm: int, rank: Any) -> None:
        group = self._groups[comm]
        rank[0] = group.rank if isinstance(group, Group) else 0

    def comm_size(self, comm: int, size: Any) -> None:
        group = self._groups[comm]
        size[0] = group.world_size if isinstance(group, Group) else 1

    def comm_split(self, comm: int, color: int, key: int, made: Any) -> None:
        made[0] = next(self._handles)
        try:
            self._groups[made[0]], processes = _split(self._group(comm), color, key)
            if processes != [*range(len(processes))]:
                self._processes[made[0]] = processes
        except Exception as error:
            self._groups[made[0]] = error
            raise

    def allreduce(
        self, source: int, target: int, count: int, datatype: int, op: int, comm: int
    ) -> None:
        result = self._array(target, count, datatype)
        if source != target:
            result[...] = self._array(source, count, datatype)
        self._group(comm).all_reduce(result, self._ops[op])

    def reduce_scatter(
        self, source: int, target: int, counts: Any, datatype: int, op: int, comm: int
    ) -> None:
        group, count = self._group(comm), counts[0]  # XLA cuts into equal parts
        given = self._array(source, count * group.world_size, datatype)
        group.reduce_scatter(given, self._ops[op], out=self._array(target, count, datatype))

    def allgather(
        self, source: int, count: int, datatype: int, target: int, _: int, __: int, comm: int
    ) -> None:
        group = self._group(comm)
        result = self._array(target, count * group.world_size, datatype)
        group.all_gather(self._array(source, count, datatype), out=result)

    # All messages have tag 0. The k-th to a rank meets the k-th that this rank receives.

    def isend(
        self, source: int, count: int, datatype: int, to: int, _: int, comm: int, request: Any
    ) -> None:
        given = self._array(source, count, datatype)
        request[0] = self._under_way(self._group(comm).send_async(given, to))

    def irecv(
        self, target: int, count: int, datatype: int, source: int, _: int, comm: int, request: Any
    ) -> None:
        result = self._array(target, count, datatype)
        request[0] = self._under_way(self._group(comm).receive_async(source, out=result))

    def wait(self, request: Any, _: int) -> None:
        self._messages.pop(request[0]).wait()

    def sendrecv(self, *said: Any) -> None:
        source, count, datatype, to, _ = said[:5]
        target, counts, datatypes, sender, _ = said[5:10]
        group = self._group(said[10])
        result = self._array(target, counts, datatypes)
        received = self._under_way(group.receive_async(sender, out=result))
        given = self._array(source, count, datatype)
        sent = self._under_way(group.send_async(given, to))
        self._messages.pop(sent).wait()
        self._messages.pop(received).wait()

    def error_string(self, error: int, text: int, length: Any) -> None:
        said = self._errors.pop(error, "unknown").encode()[: ERROR_BYTES_MAX - 1]
        ctypes.memmove(text, said + b"\0", len(said) + 1)
        length[0] = len(said)

    def finalize(self) -> None:
        groups = [group for group in self._groups.values() if isinstance(group, Group)]
        for group in reversed(groups):
            group.close()

    def _under_way(self, message: Handle) -> int:
        handle = next(self._handles)
        self._messages[handle] = message
        return handle

    def _names(self) -> str:
        """Say which processes an error means by its ranks."""
        processes = self._processes.get(self._latest)
        if processes is None:
            return ""
        listed = (f"rank {rank} is process {number}" for rank, number in enumerate(processes))
        return f" (in this communicator {', '.join(listed)})"

    def _group(self, comm: int) -> Group:
        self._latest = comm
        group = self._groups[comm]
        if isinstance(group, Exception):
            raise group
        return group

    def _array(self, address: int | None, count: int, datatype: int) -> Array:
        dtype = self._dtypes[datatype]
        if count == 0 or address is None:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype)


def _world() -> Group:
    """Return the group of all processes. JAX has no backend yet, so its store says who they are."""
    return fanin.connect(
        rank=global_state.process_id,
        world_size=global_state.num_processes,
        rendezvous=_Store(global_state.client),
        timeout=TIMEOUT,
    )


def _split(world: Group, color: int, key: int) -> tuple[Group, list[int]]:
    """Make the group of a clique of XLA, and return it with the processes that are its ranks.

    `color` is the clique's first device, and `key` is this process's rank. XLA has a thread for
    each device of a process, and runs their collectives in any order. Two devices would share a
    group, and their sums would be mixed. So only one is allowed.
    """
    if (count := jax.local_device_count(backend="cpu")) > 1:
        raise FaninError(
            f"this process has {count} CPU devices, and fanin's MPI is for one: start a process "
            "for each device"
        )
    said = world.all_gather(np.array([[color, key]], np.int64))
    keys = {int(said[process, 1]): int(process) for process in np.flatnonzero(said[:, 0] == color)}
    processes = [keys[rank] for rank in sorted(keys)]
    if sorted(keys) != [*range(np.count_nonzero(said[:, 0] == color))]:
        raise FaninError(
            "the processes run programs of different devices: their first devices and ranks are "
            f"{said.tolist()}"
        )
    if processes == [*range(world.world_size)]:
        return world, processes
    group = world.split(color, key)
    assert group is not None  # it has a color
    return group, processes
