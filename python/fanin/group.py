"""All-reduce of NumPy arrays: one membership of this process in a job on a switch."""

from __future__ import annotations

import threading
import time
import weakref
from types import TracebackType
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np

from fanin import _fanin
from fanin._join import check_rank, check_timeline, join, no_switch, trusted
from fanin._layers import of_priority
from fanin._membership import Connected, Ranks
from fanin._settings import Said, Settings, variable
from fanin.errors import BeganAnew, SwitchUnreachable

# Before ranks meet once more, in seconds: whatever made one begin anew may do so again at once.
AGAIN = 0.1

Op: TypeAlias = Literal["sum", "avg"]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Handle:
    """An all-reduce under way. The array must not be touched before `wait` returns."""

    def __init__(
        self, group: Group, array: Array, pending: _fanin.Pending, staged: Array | None
    ) -> None:
        self._group = group  # a group that nobody holds is closed, and what is under way fails
        self._array = array
        self._pending = pending
        self._staged = staged
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> Array:
        """Blocks until the result is in the array, and returns the array.

        `timeout` is in seconds; without it the group's timeout applies. Raises the typed error of
        `fanin.errors` if the all-reduce failed.
        """
        self._pending.wait(timeout)
        with self._lock:  # two threads may wait; the copy back is done once
            if self._staged is not None:
                self._array[...] = self._staged.reshape(self._array.shape)
                self._staged = None
        return self._array

    def loss(self) -> float:
        """Which part of the ranks' contributions is not in the sum: 0.0 without `loss_bound`.

        The same on every rank. Raises `RuntimeError` where there is no sum (yet).
        """
        told = self._pending.loss()
        if told is None:
            raise RuntimeError("the all-reduce is under way, or failed: call wait() first")
        contributions, lost, _, _ = told
        return lost / contributions if contributions else 0.0

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._pending.done()


class Group:
    """A job's ranks, as seen by one of them. Made by `connect`; a context manager."""

    def __init__(self, connected: Connected) -> None:
        self._client = connected.client
        # Also at exit: who hosts a service leaves before that waits for the others to leave.
        self._close = weakref.finalize(self, connected.close) if connected.hosted else None

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._client.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._client.world_size

    @property
    def client(self) -> _fanin.Client:
        """The membership itself, for what this class does not offer."""
        return self._client

    def all_reduce(
        self,
        array: Array,
        op: Op = "sum",
        *,
        priority: int = 0,
        loss_bound: float | None = None,
    ) -> Array:
        """Sum (or average) the array over all ranks, in place, and returns it.

        All ranks call with the same length, dtype and op, in the same order. float64, float32,
        float16 (and bfloat16 of ml_dtypes), int64, int32, int8, uint8 (by ATP and GOAT float32,
        float16, bfloat16 and int32); any shape; writable. The bits are the same on all ranks.
        Integers wrap as NumPy's do, and "avg" of them rounds towards zero; how far a sum of floats
        may be off, `connect` says.

        `priority`, from 0 to 6 and the same on all ranks, is for jobs with a `loss_bound`: what has
        0 goes first, on ranks and switches and at routers that look at it (docs/operations.md).
        `loss_bound` is how much of this array may be lost there, in place of what `connect` said.

        Raises `TypeError` (dtype), `ValueError` (op, priority, loss_bound, read-only array), or
        `fanin.errors`. After a `KeyboardInterrupt` the sum is still under way and writes into the
        array: leave the array alone until the group is closed.
        """
        return self.all_reduce_async(array, op, priority=priority, loss_bound=loss_bound).wait()

    def all_reduce_async(
        self,
        array: Array,
        op: Op = "sum",
        *,
        priority: int = 0,
        loss_bound: float | None = None,
    ) -> Handle:
        """As `all_reduce`, but returns at once; several may be outstanding."""
        if op not in ("sum", "avg"):
            raise ValueError(f'op is {op!r}; supported: "sum", "avg"')
        layer = of_priority(priority)
        # NumPy has no bfloat16 of its own; that of the package ml_dtypes has the name, too.
        dtype = next((name for name in self._client.dtypes if name == array.dtype.name), None)
        if dtype is None or not array.dtype.isnative:
            raise TypeError(
                f"cannot all-reduce dtype {array.dtype}; supported: "
                f"{', '.join(self._client.dtypes)} (native byte order)"
            )
        if not array.flags.writeable:
            raise ValueError(
                "the array is read-only, and the result is written into it: pass a copy"
            )
        contiguous = array.flags.c_contiguous and array.flags.aligned
        staged = array if contiguous else array.copy(order="C")
        parts = [(staged.ctypes.data, staged.size)]
        average = op == "avg"
        pending = self._client.submit(
            parts, dtype, "all_reduce", 0, average, staged, False, layer, loss_bound
        )
        return Handle(self, array, pending, None if contiguous else staged)

    @property
    def plan(self) -> _fanin.JobPlan | None:
        """How the job is shared among its services, and how they fare; None once it is closed.

        A dict: `services`, of each a dict of `service` ("HOST:PORT") and `share` of all arrays;
        `measured`, the seconds that a byte of large arrays took of late as it travels, None before
        the first; `imbalance`, by how much a service misses its share of the packets, at most.
        """
        return self._client.plan

    def statistics(self) -> dict[str, int]:
        """Counters of this membership: packets, retransmissions, ..."""
        return self._client.statistics()

    def close(self) -> None:
        """Leaves the job; what is outstanding fails with `fanin.errors.Closed`. Idempotent."""
        self._client.close()
        if self._close is not None:
            self._close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    switch: str | None = None,
    *,
    rank: int,
    world_size: int,
    timeout: float = 300.0,
    **settings: Unpack[Said],
) -> Group:
    """Join a job as `rank` of `world_size`; blocks until all ranks have joined.

    `timeout` (seconds) bounds the joining and, later, every all-reduce (see
    `fanin.errors.AllReduceTimeout`). The others are settings: `switch` ("HOST:PORT"), `job`,
    `wire_dtype`, `protocol`, `plan` and the others that docs/settings.md lists. What is not given,
    the environment says (FANIN_SWITCH, FANIN_JOB, ...). A switch and a job must be said. All ranks
    say the same, but for the switch's address.

    `job` names the job on the switch: ranks that give the same name find each other, at the first
    switch that rank 0 names. Where they are on several machines, the ranks of each sum among
    themselves first (docs/local.md), and sum beside the switches as `plan` says.

    Arrays travel as they are: each element is right to its own magnitude, within half a unit in the
    last place and n 2^-53 of the sum of its own n contributions' absolute values; NaN and
    infinities are its own, too. Ranks that share a machine sum there first, in float32
    (docs/local.md). Arrays of more than 4,096 floats travel otherwise where `wire_dtype` says so:

    `wire_dtype`: as "shared_exponent" floats travel as integers of four bytes, and a sum is off by
    at most n^2 2^m / 2^31 (n ranks; 2^m: the largest absolute value in a packet, of 352 elements on
    Ethernet and up to 2,048 with longer frames and on loopback, rounded up to a power of two); what
    is not finite spoils the packet. With "bfloat16" two bytes, half the time on the network: each
    contribution and the sum are rounded to eight significant bits, so that a sum is off by at most
    2^-8 (the sum of the contributions' absolute values) + 2^-8 |sum|, and what is small beside that
    (docs/protocols/switchml.md); 2^128 and more becomes an infinity, also of an average. With
    "int8" one byte, a quarter of the time: each contribution and the sum are rounded, up or down by
    chance so that the expectation is right, to multiples of a power of two that 32 neighbouring
    elements share. With S the sum of the contributions' largest absolute values among these 32, a
    sum is off by less than S / 31; all ranks get the same bits, in every run. What is not finite,
    or above 127 2^121, leaves no element finite among the 32. What rounding takes is not kept for
    the next array: `fanin.torch.HookState` does that for DDP.

    `protocol`: by "switchml" gradients are summed in the slots of one switch. With "atp" on the way
    to a server: `switch` is the rack's (``fanin switch --protocol atp --upstream ...``) or the
    root itself, floats travel as integers, and a sum is rounded once, to
    float32, from integers that are each off by half of 10^-8, or, in packets of large or tiny
    values, of what keeps the largest sum in 31 bits (docs/operations.md). Of `wire_dtype` there is
    "bfloat16": contributions and sums are rounded to it, and travel in two bytes.
    With "goat" it is the same, by switches that a root (``fanin switch --protocol goat``) gives a
    plan; `sub_models` are the elements of the parts of the model that it plans by themselves, if
    the equal ones that it cuts are not to be (docs/protocols/goat.md).

    `loss_bound`: the fraction of each rank's part of a float array that may be lost on the way to
    the switch, at least 0 and below 1 (docs/protocols/dlcp.md). Above 0 a network's losses are not
    waited for as far as the bound forgives them; a sum is then the mean of what came times the
    ranks, all ranks get the same bits, and `Handle.loss` says what is missing. Floats travel as
    they are. Integers lose nothing. With `paths` above 1 the packets of a rank come from so many
    ports in turn, so that routers spread them over all paths that they have (docs/operations.md).

    Raises `ValueError` for what is no such setting, and the errors of `fanin.errors`.
    """
    taken = Settings.of(switch, **settings)
    if taken.job is None:
        raise ValueError(
            f'no job was named: say job="NAME", or set {variable("job")}, the same on all ranks'
        )
    check_rank(rank, world_size)
    return joined(taken, taken.job, rank, world_size, timeout)


def joined(settings: Settings, job: str, rank: int, world_size: int, timeout: float) -> Group:
    """Join `job` with the other ranks, who are found at the first switch that rank 0 names."""
    if world_size == 1 or settings.protocol != "switchml":
        # There is nothing to agree on: sums are where the switches are.
        return Group(Connected(join(settings, job, rank, world_size, timeout)))
    if settings.switch is None:
        raise SwitchUnreachable(no_switch())
    if settings.trace is not None:
        # As where nobody is to be met: told before anything is waited for.
        check_timeline(settings.trace, rank)
    deadline = time.monotonic() + timeout
    switches = settings.switch.split(",")
    while True:
        try:
            return _met(settings, switches, job, rank, world_size, timeout, deadline)
        except BeganAnew:
            # All that this rank made for the others is gone again.
            if time.monotonic() >= deadline:
                raise
            time.sleep(AGAIN)


def _met(
    settings: Settings,
    switches: list[str],
    job: str,
    rank: int,
    world_size: int,
    timeout: float,
    deadline: float,
) -> Group:
    left = max(deadline - time.monotonic(), 0.0)
    trust = trusted(settings)
    meeting = _fanin.Meeting(
        switches, settings.protocol, job, rank, world_size, timeout=left, trust=trust
    )

    def gather(name: str, text: str, left: float) -> list[str]:
        return meeting.gather(name, text, timeout=max(left, 0.0))

    try:
        route = _fanin.route_to(switches[0])
        ranks = Ranks(
            job=job,
            name=f"{job}-{meeting.attempt:016x}",
            who=f"job {job!r}",
            rank=rank,
            world_size=world_size,
            address=route[0] if route else "127.0.0.1",
            cure="Name the switch by an address that the other machines know, too",
            gather=gather,
            trust=trust,
            meeting=meeting,
        )
        return Group(ranks.connect(settings, timeout, deadline))
    finally:
        meeting.close()
