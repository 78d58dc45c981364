"""Every collective that a backend can have, handed to an inner Gloo group.

The switch sums; it does not broadcast, gather or scatter. A program that ran on Gloo must run on
fanin, so whatever `backend.FaninBackend` does not take itself falls through to here.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102, N802

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from fanin.torch.handles import DelegatedWork, FindableWork
from fanin.torch.work import WorkGroup

TensorLists = Sequence[Sequence[Tensor]]


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
        if address is None:
            self._gloo = gloo(store, rank, size, timeout)
        else:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=address)]
            self._gloo = gloo(store, rank, size, options)
        # The works of the coalescing region that is open, if one is.
        self._coalescing: list[Work] | None = None

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
        return WorkGroup(works)

    @property
    def supports_coalescing(self) -> bool:
        """False: nothing is gained by it, and the works of batched sends stay apart."""
        return False

    def _issued(self, work: Work) -> Work:
        if not isinstance(work, FindableWork):
            work = DelegatedWork(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # Each method is one line of hand-over, under the name by which torch's C++ side looks it up.

    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        return self._issued(self._gloo.allreduce(list(tensors), opts))

    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        return self._issued(self._gloo.allreduce_sparse(list(tensors), opts))

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> Work:
        return self._issued(self._gloo.allreduce_coalesced(list(tensors), opts))

    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> Work:
        return self._issued(self._gloo.reduce(list(tensors), opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> Work:
        return self._issued(self._gloo.broadcast(list(tensors), opts))

    def allgather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._issued(self._gloo.allgather(outputs, inputs, opts))

    def allgather_coalesced(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._issued(self._gloo.allgather_coalesced(outputs, inputs, opts))

    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: c10d.AllgatherOptions
    ) -> Work:
        return self._issued(self._gloo.all_gather_single(output, source, opts))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        return self._issued(self._gloo.all_gather_single_coalesced(outputs, inputs, opts))

    def gather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.GatherOptions
    ) -> Work:
        return self._issued(self._gloo.gather(outputs, inputs, opts))

    def scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ScatterOptions
    ) -> Work:
        return self._issued(self._gloo.scatter(outputs, inputs, opts))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._issued(self._gloo.reduce_scatter(outputs, inputs, opts))

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._issued(self._gloo.reduce_scatter_single(output, source, opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.ReduceScatterOptions
    ) -> Work:
        return self._issued(self._gloo.reduce_scatter_single_coalesced(outputs, inputs, opts))

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions,
    ) -> Work:
        return self._issued(
            self._gloo.all_to_all_single(
                output, source, list(output_split_sizes), list(input_split_sizes), opts
            )
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllToAllOptions
    ) -> Work:
        return self._issued(self._gloo.alltoall(outputs, inputs, opts))

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._issued(self._gloo.send(list(tensors), rank, tag))

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Work:
        return self._issued(self._gloo.recv(list(tensors), rank, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        return self._issued(self._gloo.recv_anysource(list(tensors), tag))

    def barrier(self, opts: c10d.BarrierOptions) -> Work:
        return self._issued(self._gloo.barrier(opts))

    def monitored_barrier(self, opts: c10d.BarrierOptions, wait_all_ranks: bool = False) -> None:
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

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
