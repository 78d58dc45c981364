"""Every collective that a backend can have, handed to an inner Gloo group.

A program that ran on Gloo must run on fanin, so whatever `backend.FaninBackend` does not take
itself falls through to here.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102, N802

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo, ReduceOp, Store, Work

from fanin.errors import AllReduceTimeout, Closed, RankLeft, RankLost, SwitchLost
from fanin.torch.delegated_work import AveragedWork, DelegatedWork
from fanin.torch.forked import never_destroy_in_child
from fanin.torch.interface import GLOO_VARIABLE
from fanin.torch.work import WorkGroup

TensorLists = Sequence[Sequence[Tensor]]

# How many works a coalescing region holds before it looks which of them are done.
REGION_MAX = 256

# After these the ranks are no longer in step, and a barrier of theirs might only run out of time.
GROUP_OVER = (AllReduceTimeout, Closed, RankLeft, RankLost, SwitchLost)


# What Gloo listens on, by process and place, as long as some group has it: a thread and four
# descriptors each, and a program may have hundreds of groups.
_shared: weakref.WeakValueDictionary[tuple[int, str | None, str | None], Any] = (
    weakref.WeakValueDictionary()
)


def _devices(address: str | None) -> list[Any]:
    """Return Gloo's devices at an address; without it, those that Gloo would make."""
    gloo: Any = ProcessGroupGloo
    named = os.environ.get(GLOO_VARIABLE) if address is None else None
    devices = []
    for interface in named.split(",") if named else [None]:
        key = os.getpid(), address, interface
        device = _shared.get(key)
        if device is None:
            if address is not None:
                device = gloo.create_device(hostname=address)
            elif interface is not None:
                device = gloo.create_device(interface=interface)
            else:
                device = gloo.create_default_device()
            _shared[key] = device
        devices.append(device)
    return devices


class DelegatingBackend(c10d.Backend):
    """A backend that is a Gloo group under another name.

    Gloo listens on `address`; without it, where it likes.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, address: str | None = None
    ) -> None:
        super().__init__(rank, size)
        # Any: torch's stubs declare next to nothing of it.
        gloo: Any = ProcessGroupGloo
        self._devices = _devices(address)
        options = gloo._Options()
        options._timeout = timeout
        options._devices = self._devices
        self._gloo = gloo(store, rank, size, options)
        never_destroy_in_child(self._gloo)
        # The works of the coalescing region that is open, if one is.
        self._coalescing: list[Work] | None = None
        self._region_max = REGION_MAX
        # Those that are to be divided yet.
        self._averaging: set[AveragedWork] = set()

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

    def _hand(self, name: str, *args: Any) -> Work:
        """Call a method of the Gloo group."""
        return self._issued(DelegatedWork(self._started(name, args), self._explain))

    def _reduced(self, name: str, results: Sequence[Tensor], *args: Any) -> Work:
        """Call one that reduces into `results`; the first argument has the dtype, the last the op.

        Gloo's average of integers fails: it sums them, and the sums are divided here.
        """
        opts = args[-1]
        like = [args[0]] if isinstance(args[0], Tensor) else args[0]
        dtype = next((tensor.dtype for tensor in like), None)
        if opts.reduceOp != ReduceOp.AVG or dtype is None or not _is_integral(dtype):
            return self._hand(name, *args)
        if dtype == torch.bool:
            raise TypeError("ReduceOp.AVG of bool tensors: an average of truths is none; use SUM")
        opts.reduceOp = ReduceOp.SUM
        try:
            inner = self._started(name, args)
        finally:
            opts.reduceOp = ReduceOp.AVG
        work = AveragedWork(inner, self._explain, results, self.size(), self._averaging.discard)
        self._averaging.add(work)
        return self._issued(work)

    def _started(self, name: str, args: Sequence[Any]) -> Work:
        try:
            work: Work = getattr(self._gloo, name)(*args)
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error
        return work

    def _explain(self, error: Exception) -> Exception:
        """Say more about an error of Gloo than Gloo does; or return it."""
        if "Invalid scalar type" in str(error):
            return RuntimeError(f"neither the switch nor Gloo takes tensors of this dtype: {error}")
        return error

    def _under_way(self) -> list[Work]:
        """Return what a barrier must wait for besides what is Gloo's own."""
        return list(self._averaging)

    # Each method is one line of hand-over, under the name by which torch's C++ side looks it up.

    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        return self._reduced("allreduce", tensors, list(tensors), opts)

    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        return self._hand("allreduce_sparse", list(tensors), opts)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> Work:
        return self._reduced("allreduce_coalesced", tensors, list(tensors), opts)

    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> Work:
        # Nobody but the root has a result.
        results = tensors if opts.rootRank == self.rank() else []
        return self._reduced("reduce", results, list(tensors), opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> Work:
        return self._hand("broadcast", list(tensors), opts)

    def allgather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._hand("allgather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._hand("allgather_coalesced", outputs, inputs, opts)

    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: c10d.AllgatherOptions
    ) -> Work:
        return self._hand("all_gather_single", output, source, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._hand("all_gather_single_coalesced", outputs, inputs, opts)

    def gather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.GatherOptions
    ) -> Work:
        return self._hand("gather", outputs, inputs, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ScatterOptions
    ) -> Work:
        return self._hand("scatter", outputs, inputs, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduced("reduce_scatter", outputs, outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduced("reduce_scatter_single", [output], output, source, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._reduced("reduce_scatter_single_coalesced", outputs, outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions,
    ) -> Work:
        return self._hand(
            "all_to_all_single",
            output,
            source,
            list(output_split_sizes),
            list(input_split_sizes),
            opts,
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllToAllOptions
    ) -> Work:
        return self._hand("alltoall", outputs, inputs, opts)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._hand("send", list(tensors), rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._hand("recv", list(tensors), rank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        return self._hand("recv_anysource", list(tensors), tag)

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
