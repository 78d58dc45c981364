"""Tensors in, works out: what the backend and the communication hook share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from fanin import _fanin
from fanin.torch.completions import Completions
from fanin.torch.copies import Copies
from fanin.torch.cuda import CudaCopies
from fanin.torch.staged_work import StagedWork
from fanin.torch.staging import Staging
from fanin.torch.work import AllReduceWork, FaninWork, Kept, Part, each_once

DTYPES: Final[dict[torch.dtype, _fanin.DType]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
}

DEVICES: Final = ("cpu", "cuda")

# How long closing waits for callbacks that are running, in seconds.
CLOSE_TIMEOUT = 5.0


def serves(tensor: torch.Tensor) -> bool:
    """Whether the switch can sum such a tensor: the same answer on every rank."""
    device = tensor.device.type
    return tensor.dtype in DTYPES and device in DEVICES and tensor.layout == torch.strided


class Channel:
    """One client with its completion threads.

    Without a client (a group of one rank) every sum is what it was, and completes at once.
    """

    def __init__(self, client: _fanin.Client | None) -> None:
        self._client = client
        self._completions = Completions(client) if client is not None else None
        self._copies: Copies = CudaCopies()
        self._staging = (
            Staging(self._copies, partial(_submit_notified, client), client.close)
            if client is not None
            else None
        )
        # Also at exit: a thread that comes back from Rust to a finalised interpreter dies hard, and
        # the other ranks are to hear that this one left, in place of losing it.
        self._close = (
            weakref.finalize(self, _close, client, self._staging, self._completions)
            if client is not None and self._staging is not None and self._completions is not None
            else None
        )

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, average: bool, notify: bool
    ) -> AllReduceWork:
        """Start summing each tensor in place; all must be ones that `serves` accepts.

        All are on the CPU, or all on CUDA devices. CUDA tensors are not waited for; tensors on the
        CPU are submitted once all CUDA tensors before them are, as the ranks must agree about the
        order.

        With `notify` the future of the work is completed by the completion threads; without it,
        asking for the future costs a thread. Empty tensors are submitted as well: they count in the
        order that the ranks must agree about.
        """
        staged = bool(tensors) and self._copies.takes(tensors[0])
        if self._client is None or self._completions is None or self._staging is None:
            if staged:
                return StagedWork.alone(tensors, self._copies)
            return FaninWork(tensors, [], notified=notify)
        if staged:
            self._completions.ensure_running()
            return self._staging.all_reduce(tensors, average=average)
        self._staging.flush()
        parts = [_part(tensor) for tensor in tensors]
        if notify:
            self._completions.ensure_running()
        work = FaninWork(tensors, parts, notified=notify)
        for part in list(parts):
            memory = part.memory
            assert memory is not None  # nothing is settled before it was submitted
            try:
                pending = _submit(self._client, memory, average, part, notify)
            except Exception as error:
                work.failed_to_start(error)
                break
            work.started(part, pending)
        return work

    def set_timeout(self, seconds: float) -> None:
        """Bound each all-reduce, in place of the timeout that the client was made with."""
        if self._client is not None:
            self._client.set_timeout(seconds)

    def close(self) -> None:
        """Leaves the job; what is outstanding fails with `fanin.errors.Closed`. Idempotent."""
        if self._close is not None:
            self._close()


def _part(tensor: torch.Tensor) -> Part:
    # Detached: writing into a leaf that requires grad is no business of autograd here.
    target = tensor.detach()
    if target.is_contiguous() and not target.is_neg():
        return Part(target, None)
    staged = torch.empty(target.shape, dtype=target.dtype).copy_(target)
    return Part(staged, partial(_copy_back, target, staged))


def _copy_back(target: torch.Tensor, staged: torch.Tensor) -> None:
    target, staged = each_once(target, staged)
    target.copy_(staged)


def _submit(
    client: _fanin.Client, memory: torch.Tensor, average: bool, kept: Kept, notify: bool
) -> _fanin.Pending:
    dtype = DTYPES[memory.dtype]
    return client.submit(memory.data_ptr(), memory.numel(), dtype, average, kept, notify)


def _submit_notified(
    client: _fanin.Client, memory: torch.Tensor, average: bool, kept: Kept
) -> _fanin.Pending:
    return _submit(client, memory, average, kept, True)


def _close(client: _fanin.Client, staging: Staging, completions: Completions) -> None:
    client.close()
    staging.close(CLOSE_TIMEOUT)
    completions.join(CLOSE_TIMEOUT)
