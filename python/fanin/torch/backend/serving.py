"""What the services serve of a backend's collectives; all else goes to Gloo (`delegating`).

The services are those of the group's protocol. A sum that ATP or GOAT does not have goes to the
ranks' own services, which are joined when the first of these sums begins (`beside`). From then on
they also gather and spread what the protocol does not.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ReduceOp, Store, Work

from fanin._settings import Settings
from fanin.torch.backend.beside import Beside
from fanin.torch.backend.channel import Channel, are_summable
from fanin.torch.backend.delegating import DelegatingBackend, TensorLists, untraced
from fanin.torch.works import collectives
from fanin.torch.works.work import Part, seconds


class _Options(Protocol):
    """What the options of all collectives have."""

    asyncOp: bool  # noqa: N815 - torch's name
    timeout: timedelta


class ServingBackend(DelegatingBackend):
    """A backend that has services, and a Gloo group for what they do not serve."""

    settings: Settings
    _channel: Channel
    """The services of the group's protocol."""
    _own: Beside[Channel]
    """Own services beside them."""
    _make_own: Callable[[Store], Channel | None]
    """Joins own services; None on all ranks where some rank cannot."""
    # How many collectives were given to services.
    _on_switch = 0

    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        work = self._sum(tensors, opts)
        return super().allreduce(tensors, opts) if work is None else self._issued(work)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> Work:
        work = self._sum(tensors, opts)
        return super().allreduce_coalesced(tensors, opts) if work is None else self._issued(work)

    @untraced
    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> Work:
        average = _average(opts.reduceOp)
        by = None if average is None else self._summing(tensors)
        if average is None or by is None:
            return super().reduce(tensors, opts)
        root, rank = opts.rootRank, self.rank()
        parts = [collectives.reduce(tensor, average, root, rank) for tensor in tensors]
        return self._start(by, tensors, parts, opts)

    @untraced
    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> Work:
        by = self._first(lambda channel: channel.has(tensors, adds=False))
        if by is None:
            return super().broadcast(tensors, opts)
        root, rank = opts.rootRank, self.rank()
        parts = [collectives.broadcast(tensor, root, rank) for tensor in tensors]
        return self._start(by, tensors, parts, opts)

    @untraced
    def allgather(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        work = self._gather_lists(outputs, inputs, opts)
        return super().allgather(outputs, inputs, opts) if work is None else work

    @untraced
    def allgather_coalesced(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        # A list a rank, which is the other way round.
        work = self._gather_lists(list(zip(*outputs, strict=False)), inputs, opts)
        return super().allgather_coalesced(outputs, inputs, opts) if work is None else work

    @untraced
    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: c10d.AllgatherOptions
    ) -> Work:
        work = self._gather([output], [source], opts)
        return super().all_gather_single(output, source, opts) if work is None else work

    @untraced
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work:
        work = self._gather(outputs, inputs, opts)
        return super().all_gather_single_coalesced(outputs, inputs, opts) if work is None else work

    @untraced
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ReduceScatterOptions
    ) -> Work:
        work = self._scatter(outputs, inputs, opts)
        return super().reduce_scatter(outputs, inputs, opts) if work is None else work

    @untraced
    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: c10d.ReduceScatterOptions
    ) -> Work:
        work = self._scatter([output], [self._slices(source)], opts)
        return super().reduce_scatter_single(output, source, opts) if work is None else work

    @untraced
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.ReduceScatterOptions
    ) -> Work:
        work = self._scatter(outputs, [self._slices(source) for source in inputs], opts)
        return (
            super().reduce_scatter_single_coalesced(outputs, inputs, opts) if work is None else work
        )

    # As in `delegating`: what Python callers know them by.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _slices(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return one slice a rank, in one piece each; none if the tensor cannot be cut so."""
        if tensor.layout != torch.strided or tensor.numel() % self.size() != 0:
            return []
        return tensor.detach().contiguous().view(-1).chunk(self.size()) if tensor.numel() else []

    def _gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work | None:
        """Start all-gathers by the services; None if they are not ones that these serve."""
        n, rank = self.size(), self.rank()
        fit = len(outputs) == len(inputs) and all(
            output.numel() == n * source.numel() > 0 and output.dtype == source.dtype
            for output, source in zip(outputs, inputs, strict=True)
        )
        by = self._gathering(outputs, inputs) if fit else None
        if by is None:
            return None
        pairs = zip(outputs, inputs, strict=True)
        parts = [collectives.all_gather_single(one, source, rank, n) for one, source in pairs]
        return self._start(by, outputs, parts, opts)

    def _gather_lists(
        self, outputs: TensorLists, inputs: Sequence[Tensor], opts: c10d.AllgatherOptions
    ) -> Work | None:
        flat = [tensor for each in outputs for tensor in each]
        by = self._gathering(flat, inputs) if self._matches(outputs, inputs) else None
        if by is None:
            return None
        pairs = zip(outputs, inputs, strict=True)
        parts = [collectives.all_gather(each, source, self.rank()) for each, source in pairs]
        return self._start(by, flat, parts, opts)

    def _gathering(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Channel | None:
        """Return the services that are to gather these; they could, but not in large."""
        size_bytes = sum(tensor.nbytes for tensor in outputs)
        return self._first(lambda channel: channel.gathers([*outputs, *inputs], size_bytes))

    def _scatter(
        self, outputs: Sequence[Tensor], inputs: TensorLists, opts: c10d.ReduceScatterOptions
    ) -> Work | None:
        """Start reduce-scatters by the services; None if they are not ones that these serve."""
        average = _average(opts.reduceOp)
        if average is None or not self._matches(inputs, outputs):
            return None
        by = self._summing([*outputs, *(tensor for each in inputs for tensor in each)])
        if by is None:
            return None
        pairs = zip(outputs, inputs, strict=True)
        parts = [
            collectives.reduce_scatter(output, each, average, self.rank()) for output, each in pairs
        ]
        return self._start(by, outputs, parts, opts)

    def _matches(self, lists: TensorLists, ones: Sequence[Tensor]) -> bool:
        """Whether each of the lists has one a rank, like the one tensor that belongs to it."""
        if len(lists) != len(ones):
            return False
        return all(
            len(each) == self.size()
            and all(t.dtype == one.dtype and t.numel() == one.numel() for t in each)
            for each, one in zip(lists, ones, strict=True)
        )

    def _first(
        self, has: Callable[[Channel], bool], summed: Sequence[Tensor] = ()
    ) -> Channel | None:
        """Return the services that have a collective; None if it is Gloo's: alike on all ranks.

        Those of the group's protocol are asked first, and own services second. For tensors that are
        `summed` these are joined. What is only moved is not worth it.
        """
        if has(self._channel):
            return self._channel
        own = self._own.made
        lacks = self.size() > 1 and self.settings.protocol != "switchml"
        if own is None and lacks and are_summable(summed):
            own = self._own.get(self._make_own)
        return own if own is not None and has(own) else None

    def _summing(self, tensors: Sequence[Tensor]) -> Channel | None:
        """Return the services that sum these for one rank each."""
        return self._first(lambda channel: channel.has(tensors, adds=True), tensors)

    def _start(
        self, by: Channel, tensors: Sequence[Tensor], parts: list[Part], opts: _Options
    ) -> Work:
        self._on_switch += 1
        work = by.start(tensors, parts, notify=opts.asyncOp, limit=seconds(opts.timeout))
        return self._issued(work)

    def _sum(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work | None:
        """Start the all-reduce by the services; None if it is not one that these serve."""
        average = _average(opts.reduceOp)
        if average is None:
            return None
        by = self._first(lambda channel: channel.sums(tensors), tensors)
        if by is None:
            return None
        self._on_switch += 1
        # A synchronous call keeps its work to itself: nobody can ask for a future.
        return by.all_reduce(
            tensors, average=average, notify=opts.asyncOp, limit=seconds(opts.timeout)
        )

    def _get_sequence_number_for_group(self) -> int:
        return self._on_switch + super()._get_sequence_number_for_group()


def _average(op: ReduceOp | ReduceOp.RedOpType) -> bool | None:
    """Whether an operation is the average; None if it is neither that nor the sum."""
    average = op == ReduceOp.AVG
    return average if average or op == ReduceOp.SUM else None
