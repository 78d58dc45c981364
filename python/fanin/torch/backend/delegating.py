"""Every collective that a backend can have, handed to an inner Gloo group.

A program that ran on Gloo must run on fanin, so whatever `backend.FaninBackend` does not take
itself falls through to here.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102, N802

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo, ReduceOp, Store, Work
from torch._compile import _disable_dynamo

from fanin._planes import GLOO_VARIABLE
from fanin.errors import AllReduceTimeout, Closed, FaninError, RankLeft, RankLost, SwitchLost
from fanin.torch.backend.delegated_work import DelegatedWork
from fanin.torch.backend.forked import never_destroy_in_child
from fanin.torch.backend.gloo_tensors import Handed
from fanin.torch.backend.gloo_watch import TAG, Watch
from fanin.torch.works.work import WorkGroup

TensorLists = Sequence[Sequence[Tensor]]

# How many works a coalescing region holds before it looks which of them are done, and how many are
# kept that have something left to do.
REGION_MAX = 256

# After these the ranks are no longer in step, and a barrier of theirs might only run out of time.
GROUP_OVER = (AllReduceTimeout, Closed, RankLeft, RankLost, SwitchLost)

# In place of a peer, where any rank may be it.
ANYONE = -1

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Keep TorchDynamo out of a method that C++ calls in the midst of a compiled program.

    It would make graphs of what is done with tensors here. Where nobody has loaded it, there is
    nothing to keep out, and it takes a second to load.
    """
    disabled = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else method)(*args)

    return cast(_Method, call)


# Gloo's devices, by process and place, as long as some group has them. Each has a thread and four
# descriptors, and a program may have hundreds of groups.
_shared: weakref.WeakValueDictionary[tuple[int, str | None, str | None], Any] = (
    weakref.WeakValueDictionary()
)


# With this Gloo connects to a rank when something is first sent to it or received from it.
LAZY = "TORCH_GLOO_LAZY_INIT"

# With these Gloo tells a device's connections apart by rank alone, and ends a lazy device with its
# first group.
UNSHARED = (LAZY, "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")


def _devices(address: str | None, interfaces: Sequence[str]) -> list[Any]:
    """Return Gloo's devices at an address or interfaces; without them, those Gloo would make."""
    shares = not any(map(os.environ.get, UNSHARED))
    gloo: Any = ProcessGroupGloo
    named = os.environ.get(GLOO_VARIABLE) if address is None else None
    chosen: Sequence[str | None] = interfaces or (named.split(",") if named else [None])
    devices = []
    for interface in chosen:
        key = os.getpid(), address, interface
        device = _shared.get(key) if shares else None
        if device is None:
            if address is not None:
                device = gloo.create_device(hostname=address)
            elif interface is not None:
                device = gloo.create_device(interface=interface)
            else:
                device = gloo.create_default_device()
            if shares:
                _shared[key] = device
        devices.append(device)
    return devices


class NoCommunicator:
    """Stands among TorchComms' communicators, which torch ends before the groups."""

    def finalize(self) -> None:
        """Nothing to end: torch shuts the group down."""


class DelegatingBackend(c10d.Backend):
    """A backend that is a Gloo group under another name.

    Gloo listens on `address`, or at `interfaces`; without them, where it likes.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        address: str | None = None,
        interfaces: Sequence[str] = (),
    ) -> None:
        super().__init__(rank, size)
        # Any: torch's stubs declare next to nothing of it.
        gloo: Any = ProcessGroupGloo
        self._devices = _devices(address, interfaces)
        options = gloo._Options()
        options._timeout = timeout
        options._devices = self._devices
        self._gloo = gloo(store, rank, size, options)
        never_destroy_in_child(self._gloo)
        # The works of the coalescing region that is open, if one is.
        self._coalescing: list[Work] | None = None
        self._region_max = REGION_MAX
        # Works that have something left to do when Gloo is done.
        self._unfinished: set[DelegatedWork] = set()
        self._watch = Watch(self) if size > 1 else None

    def getBackendName(self) -> str:
        return "fanin"

    def start_coalescing(self) -> None:
        """Torch calls it before a batch of collectives that is to have one work.

        Without it, torch's coalescing manager leaves its state behind, and later all-reduces
        silently do nothing.
        """
        self._coalescing = []

    def end_coalescing(self) -> Work:
        """Return the work that covers all that was issued since `start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        self._region_max = REGION_MAX
        return WorkGroup(works)

    @property
    def supports_coalescing(self) -> bool:
        """False: nothing is gained by it, and the works of batched sends stay apart."""
        return False

    def _issued(self, work: Work) -> Work:
        region = self._coalescing
        if region is not None:
            region.append(work)
            if len(region) >= self._region_max:
                # A region that an exception ends is never closed: it must not keep what is done.
                region[:] = [known for known in region if not _succeeded(known)]
                self._region_max = max(REGION_MAX, 2 * len(region))
        return work

    def _hand(
        self, name: str, *args: Any, handed: Handed | None = None, peer: int | None = None
    ) -> Work:
        """Call a method of the Gloo group, on what was `handed`.

        A call that needs one rank alone names it: `peer`.
        """
        handed = handed or Handed()
        try:
            with self._connecting(peer):
                inner: Work = getattr(self._gloo, name)(*args)
        except RuntimeError as error:
            explained = self.explain(error, peer)
            if explained is error:
                raise
            raise explained from error
        work = DelegatedWork(inner, self, handed, peer)
        if peer is None and self._watch is not None:
            self._watch.add(work)
        # Nobody may wait for them: what is done is finished here.
        for known in list(self._unfinished):
            known.is_completed()
        # A barrier is for collectives alone.
        if handed.is_unfinished and peer is None:
            self._unfinished.add(work)
        return self._issued(work)

    def _reduce(self, name: str, handed: Handed, like: Sequence[Tensor], *args: Any) -> Work:
        """Call one that reduces tensors `like` these; the last argument has the operation.

        Gloo adds truths as the bytes that they are: 1 + 1 is 2. Their sum is a logical or, as with
        NCCL. Gloo's average of integers fails: their sums are divided here, as NCCL divides them.
        """
        opts = args[-1]
        dtype, op = (like[0].dtype if like else torch.float32), opts.reduceOp
        if dtype == torch.bool and op == ReduceOp.AVG:
            raise RuntimeError(
                "ReduceOp.AVG of bool tensors: its result type Float can't be cast to the desired "
                "output type Bool; use ReduceOp.SUM, a logical or"
            )
        if dtype == torch.bool and op == ReduceOp.SUM:
            opts.reduceOp = ReduceOp.MAX
        elif op == ReduceOp.AVG and _is_integral(dtype):
            opts.reduceOp = ReduceOp.SUM
            handed.divide(self.size())
        try:
            return self._hand(name, *args, handed=handed)
        finally:
            opts.reduceOp = op

    def explain(self, error: Exception, peer: int | None) -> Exception:  # noqa: ARG002
        """Say more about an error of Gloo than Gloo does; or return it."""
        if "Invalid scalar type" in str(error):
            return RuntimeError(f"neither the switch nor Gloo takes tensors of this dtype: {error}")
        return error

    def _connecting(self, peer: int | None) -> AbstractContextManager[None]:
        if peer is None or peer == ANYONE or self._watch is None:
            return contextlib.nullcontext()
        return self._watch.connecting(peer)

    def wait(self, inner: Work, timeout: timedelta, peer: int | None) -> bool:
        """Wait for a work on Gloo, for which `peer` is needed."""
        if peer is None or self._watch is None:
            return inner.wait(timeout)
        if peer == ANYONE:
            return self._watch.wait_for_anyone(inner, timeout)
        with self._watch.awaiting(peer):
            return inner.wait(timeout)

    def over(self, work: DelegatedWork) -> None:
        """Hear that nothing is left to do for a work."""
        self._unfinished.discard(work)

    def failure(self) -> FaninError | None:
        """Return why the group's job is over, if it is."""
        return None

    def left(self) -> dict[int, int]:
        """Return what `Watch` asks for."""
        return {}

    def is_alone(self) -> bool:
        """Return what `Watch` asks for."""
        return False

    def _is_cut_off(self, rank: int) -> bool:
        """Whether Gloo's connection to a rank has ended."""
        try:
            with self._connecting(rank):
                self._gloo.recv([torch.zeros(1, device="cpu")], rank, TAG)
        except RuntimeError:
            return True
        return False

    def receive(self) -> Work:
        """Begin a receive on Gloo that nobody answers."""
        received: Work = self._gloo.recv_anysource([torch.zeros(1, device="cpu")], TAG)
        return received

    def _under_way(self) -> list[Work]:
        """Return what a barrier must wait for besides what is Gloo's own."""
        return list(self._unfinished)

    # Each method hands over to the one of that name, by which torch's C++ side looks it up.

    @untraced
    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        handed = Handed()
        return self._reduce("allreduce", handed, tensors, handed.writes(tensors), opts)

    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        return self._hand("allreduce_sparse", list(tensors), opts)

    @untraced
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> Work:
        handed = Handed()
        return self._reduce("allreduce_coalesced", handed, tensors, handed.writes(tensors), opts)

    @untraced
    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> Work:
        handed = Handed()
        # Gloo uses the memory of the others, too.
        hand = handed.writes if opts.rootRank == self.rank() else handed.spoils
        return self._reduce("reduce", handed, tensors, hand(tensors), opts)

    @untraced
    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> Work:
        handed = Handed(tensors)
        hand = handed.reads if opts.rootRank == self.rank() else handed.writes
        return self._hand("broadcast", hand(tensors), opts, handed=handed)

    @untraced
    def allgather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._move("allgather", outputs, inputs, opts)

    @untraced
    def allgather_coalesced(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._move("allgather_coalesced", outputs, inputs, opts)

    @untraced
    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: c10d.AllgatherOptions
    ) -> Work:
        return self._move("all_gather_single", output, source, opts)

    @untraced
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._move("all_gather_single_coalesced", outputs, inputs, opts)

    @untraced
    def gather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.GatherOptions
    ) -> Work:
        # With TorchComms switched on, torch has an empty list of tensors for ranks that get none.
        kept = outputs if opts.rootRank == self.rank() else []
        return self._move("gather", kept, inputs, opts)

    @untraced
    def scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ScatterOptions
    ) -> Work:
        return self._move("scatter", outputs, inputs, opts)

    @untraced
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduce_from("reduce_scatter", outputs, inputs, opts)

    @untraced
    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduce_from("reduce_scatter_single", output, source, opts)

    @untraced
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduce_from("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _move(self, name: str, outputs: Any, inputs: Any, opts: Any) -> Work:
        handed = Handed(outputs, inputs)
        return self._hand(name, handed.fills(outputs), handed.reads(inputs), opts, handed=handed)

    def _reduce_from(self, name: str, outputs: Any, inputs: Any, opts: Any) -> Work:
        handed = Handed()
        like = [outputs] if isinstance(outputs, Tensor) else outputs
        args = handed.fills(outputs), handed.reads(inputs), opts
        return self._reduce(name, handed, like, *args)

    # Torch refuses some layouts in these calls, and they stay refused.

    @untraced
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions,
    ) -> Work:
        handed = Handed()
        return self._hand(
            "all_to_all_single",
            handed.fills(output),
            handed.reads(source, as_laid=True),
            list(output_split_sizes),
            list(input_split_sizes),
            opts,
            handed=handed,
        )

    @untraced
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllToAllOptions
    ) -> Work:
        handed = Handed()
        args = handed.writes(outputs, as_laid=True), handed.reads(inputs, as_laid=True), opts
        return self._hand("alltoall", *args, handed=handed)

    @untraced
    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        handed = Handed()
        sent = handed.reads(tensors, as_laid=True)
        return self._hand("send", sent, rank, tag, handed=handed, peer=rank)

    @untraced
    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        handed = Handed()
        received = handed.writes(tensors, as_laid=True)
        return self._hand("recv", received, rank, tag, handed=handed, peer=rank)

    @untraced
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        handed = Handed()  # this one is not refused
        return self._hand("recv_anysource", handed.writes(tensors), tag, handed=handed, peer=ANYONE)

    def barrier(self, opts: c10d.BarrierOptions) -> Work:
        """Return a work that is done when all ranks are here, and the all-reduces of this one done.

        On Gloo a barrier comes after all that the rank has under way; and all ranks' all-reduces
        are over when a blocking call returns on one of them.
        """
        before = self._under_way()
        if not opts.asyncOp:
            for work in before:
                try:
                    work.wait(opts.timeout)
                except GROUP_OVER:
                    raise
                except RuntimeError:
                    continue  # raised by the barrier's own work
        reached = self._hand("barrier", opts)
        return self._issued(WorkGroup([*before, reached], GROUP_OVER)) if before else reached

    def monitored_barrier(self, opts: c10d.BarrierOptions, wait_all_ranks: bool = False) -> None:
        before = self._under_way()
        # First: it says who is missing, and without them nothing that is under way would end.
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)
        for work in before:
            work.wait(opts.timeout)

    # The names that torch used before: C++ forwards them to the ones above, Python callers may not.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._gloo._get_sequence_number_for_group()
        return number

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: numbers begin at zero on every rank."""

    def get_comm(self) -> NoCommunicator:
        """Answer `split_group`, which asks any backend if TorchComms is switched on."""
        return NoCommunicator()

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def abort(self) -> None:
        self._gloo.abort()


def _succeeded(work: Work) -> bool:
    if not work.is_completed():
        return False
    try:
        return work.wait()
    except RuntimeError:
        return False


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
