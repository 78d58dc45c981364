"""Tensors in, works out: what the backend and the communication hook share."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
from torch._C._distributed_c10d import Work

from fanin import _fanin
from fanin.errors import Closed, FaninError, RankLeft
from fanin.torch.device.copies import Copies
from fanin.torch.device.cuda import CudaCopies
from fanin.torch.device.staged_work import StagedWork
from fanin.torch.device.staging import Staging
from fanin.torch.patches import backward, callbacks
from fanin.torch.works import collectives
from fanin.torch.works.collectives import DTYPES
from fanin.torch.works.completions import Completions
from fanin.torch.works.turns import Turns
from fanin.torch.works.under_way import Limited, UnderWay
from fanin.torch.works.work import CollectiveWork, FaninWork, Part

DEVICES: Final = ("cpu", "cuda")

# If some machine has a single rank, one rank speaks for each machine. The services then gather
# faster than Gloo only up to this size of all ranks' slices together. Beyond it, the processor's
# work for each chunk decides. If all machines have several ranks, fewer ranks have chunks, and Gloo
# has as many connections (docs/performance.md, "Other collectives").
ALL_GATHER_BYTES_MAX = 1_000_000

# How long closing waits for callbacks that are running, and a destroyed group for what is under
# way, in seconds.
CLOSE_TIMEOUT = 5.0
# How long the services may take to notice that a rank is gone, and how often they are asked, in
# seconds.
LOSS_TIMEOUT = 6.0
LOSS_PAUSE = 0.01
# Zero is torch's word for "no timeout".
LEAST_WAIT = 1e-3


class Channel:
    """One client with its completion threads.

    `leaving` is called before it is closed, and `closed` once it is. The works of a channel that is
    `beside` another one are among the other's, and both end together.

    Without a client (a group of one rank) every sum is what it was, and completes at once.
    """

    def __init__(
        self,
        client: _fanin.Client | None,
        closed: Callable[[], None] | None = None,
        leaving: Callable[[], None] | None = None,
        beside: Channel | None = None,
    ) -> None:
        backward.install()
        callbacks.install()
        self._client = client
        self._summed = frozenset(DTYPES.values() if client is None else client.dtypes)
        self._has_roots = client is not None and client.has_roots
        self._columns = 1 if client is None else client.columns
        self._copies: Copies = CudaCopies()
        if client is None:
            self._under_way = UnderWay(math.inf, _nothing, _nothing)
        elif beside is None:
            self._under_way = UnderWay(client.timeout, client.set_timeout, client.close)
        else:
            self._under_way = beside._under_way
            self._under_way.include(client.set_timeout, client.close)
        self._completions = None if client is None else Completions(client)
        self._staging = None if client is None else Staging(client, self._copies, self._under_way)
        # Why the job is over, once it was asked for.
        self._lost: FaninError | None = None
        self._left: dict[int, None] = {}
        # It runs at exit, too. A thread that comes back from Rust to a finalised interpreter dies
        # hard. And the other ranks shall hear that this one left, in place of losing it.
        self._close = (
            weakref.finalize(
                self, _close, os.getpid(), client, self._staging, self._completions, closed, leaving
            )
            if client is not None and self._staging is not None and self._completions is not None
            else None
        )

    @property
    def turns(self) -> Turns:
        """The order in which the futures of its works are completed."""
        return self._under_way.turns

    @property
    def plan(self) -> _fanin.JobPlan | None:
        """How the job is shared among its services."""
        return None if self._client is None else self._client.plan

    def lost(self) -> tuple[int, int]:
        """Contributions that are not in the sums so far, and those that would be."""
        if self._client is None:
            return 0, 0
        counted = self._client.statistics()
        return counted["lost"], counted["contributions"]

    def has(self, tensors: Sequence[torch.Tensor], *, adds: bool) -> bool:
        """Whether the services have other collectives for such tensors: alike on every rank."""
        if not self._has_roots or not tensors:
            return False
        return are_alike(tensors) and (not adds or self._has_dtypes(tensors))

    def gathers(self, tensors: Sequence[torch.Tensor], size_bytes: int) -> bool:
        """Whether the services are to gather such tensors: as `has`, and no slower than Gloo."""
        small = self._columns > 1 or size_bytes <= ALL_GATHER_BYTES_MAX
        return small and self.has(tensors, adds=False)

    def sums(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the services have all-reduces of such tensors: alike on every rank."""
        return are_alike(tensors) and self._has_dtypes(tensors)

    def _has_dtypes(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(DTYPES.get(tensor.dtype) in self._summed for tensor in tensors)

    @property
    def has_participants(self) -> bool:
        """Whether a part of the ranks can sum alone: the same answer on every rank."""
        return self._client is not None and self._client.has_participants

    @property
    def machines(self) -> list[int]:
        """The number of each rank's machine, if its ranks sum first: alike on every rank."""
        return [] if self._client is None else self._client.machines

    @property
    def encrypts(self) -> bool:
        """Whether the job's packets are encrypted: the same answer on every rank."""
        return self._client is not None and self._client.encrypts

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        average: bool,
        notify: bool,
        limit: float | None = None,
    ) -> CollectiveWork:
        """Start summing each tensor in place; all must be ones that `serves` accepts.

        All are on the CPU, or all on CUDA devices. CUDA tensors are not waited for; tensors on the
        CPU are submitted once all CUDA tensors before them are, as the ranks must agree about the
        order.

        With `notify` the future of the work is completed by the completion threads; without it,
        asking for the future costs a thread. Empty tensors are submitted as well: they count in the
        order that the ranks must agree about.

        After `limit` seconds, if it is given, the all-reduce fails, and with it the group.
        """
        if self._client is None:
            if self._are_staged(tensors):
                return StagedWork.alone(tensors, self._copies, self._under_way)
            return FaninWork(tensors, [], self._under_way, notified=notify)
        parts = [collectives.all_reduce(tensor, average) for tensor in tensors]
        return self.start(tensors, parts, notify=notify, limit=limit)

    def start(
        self,
        tensors: Sequence[torch.Tensor],
        parts: list[Part],
        *,
        notify: bool,
        limit: float | None = None,
    ) -> CollectiveWork:
        """Start the parts, whose results are in `tensors`: as `all_reduce`; there is a client."""
        assert self._client is not None
        assert self._completions is not None
        assert self._staging is not None
        if self._are_staged(tensors):
            self._completions.ensure_running()
            return self._staging.start(tensors, parts, limit)
        self._staging.flush()
        if notify:
            self._completions.ensure_running()
        work = FaninWork(tensors, parts, self._under_way, notified=notify)
        if parts:
            self._under_way.begin(work, limit)
            if notify:
                work.take_turn()
        for part in list(parts):
            request = part.request
            assert request is not None  # nothing is settled before it was submitted
            try:
                pending = request.submit(self._client, part, notify)
            except Exception as error:
                work.failed_to_start(error)
                if not isinstance(error, Closed):
                    # It is missing in this rank's order: nobody must sum what follows.
                    self._under_way.end(error)
                break
            work.started(part, pending)
        return work

    def _are_staged(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(tensors) and self._copies.takes(tensors[0])

    def set_timeout(self, seconds: float) -> None:
        """Bound each all-reduce, in place of the timeout that the client was made with."""
        self._under_way.set_timeout(seconds)

    def under_way(self) -> list[Limited]:
        """Return the all-reduces that are not over, in the order of their start."""
        return self._under_way.works()

    def failure(self) -> FaninError | None:
        """Return why the job is over, if it is, and was not closed here."""
        return None if self._client is None else self._client.failure()

    def ended_by(self) -> object:
        """Return why the job is over for this rank, if it is, and was not just closed."""
        return self.failure() or self._under_way.ended_by

    def look(self) -> None:
        """Raise why the job is over for this rank, if it is, and was not just closed."""
        failure = self.failure()
        if failure is not None:
            raise failure
        if self._under_way.ended_by is not None:
            raise self._under_way.explain(Closed())

    def end(self, reason: object) -> None:
        """End the job for this rank; what fails by that says that it is because of `reason`."""
        self._under_way.end(reason)

    def left(self) -> list[int]:
        """Return the ranks that have left, in the order in which this one was told."""
        left = [] if self._client is None else self._client.left()
        self._left.update(dict.fromkeys(left))
        return [rank for rank in self._left.copy() if rank in left]

    def gone(self, peer: int | None) -> FaninError | None:
        """Return why this rank may wait in vain for `peer`, or for some rank (None)."""
        if self._client is None:
            return None
        self._lost = self._lost or self._client.failure()
        if self._lost is not None:
            return self._lost
        left = next((rank for rank in self.left() if peer in (None, rank)), None)
        if left is None:
            return None
        # No collective of the services waits for it: they know of nothing that fails.
        return RankLeft(
            f"rank {left} left the job while this rank still waits for it; every rank must take "
            "part in every collective, and wait until what it sends is received",
            rank=left,
        )

    def loss(self, error: Exception, peer: int | None, way: str = "Gloo") -> FaninError | None:
        """Return why `peer`, or some rank (None), cannot be reached any more, as `gone` does.

        For a rank whose other `way` to that rank has failed with `error`. The services tell who is
        gone, and are waited for. Where they know of nobody the group ends here all the same: some
        of its collectives cannot be served any more.
        """
        leaving = self._close
        if leaving is None:
            return None
        deadline = time.monotonic() + LOSS_TIMEOUT
        while leaving.alive and self._under_way.ended_by is None:
            cause = self.gone(peer)
            if cause is not None:
                return cause
            if time.monotonic() >= deadline:
                self._under_way.end(
                    f"{way} lost another rank, of which no service knew {LOSS_TIMEOUT:g} s later: "
                    f"{error}"
                )
                break
            time.sleep(LOSS_PAUSE)
        return self._lost

    def finish(self, works: Sequence[Work]) -> None:
        """Wait for what is under way as long as closing may take: it completes if it can."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for work in works:
            left = max(deadline - time.monotonic(), LEAST_WAIT)
            with contextlib.suppress(Exception):  # for whoever waits for the work
                work.wait(timedelta(seconds=left))

    def close(self) -> None:
        """Leaves the job; what is outstanding fails with `fanin.errors.Closed`. Idempotent."""
        if self._close is not None:
            self._close()


def are_summable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether services could sum such tensors, if their protocol has them all."""
    return bool(tensors) and are_alike(tensors) and all(t.dtype in DTYPES for t in tensors)


def are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one collective of the services can have all these tensors, but for their dtypes."""
    kinds = {tensor.device.type for tensor in tensors}
    strided = all(tensor.layout == torch.strided for tensor in tensors)
    return len(kinds) <= 1 and kinds <= set(DEVICES) and strided


def _nothing(*_: float) -> None:
    """Stand in for the network of a group of one rank."""


def _close(
    owner: int,
    client: _fanin.Client,
    staging: Staging,
    completions: Completions,
    closed: Callable[[], None] | None,
    leaving: Callable[[], None] | None,
) -> None:
    if os.getpid() != owner:
        # A forked child: the membership is its parent's, and the threads and what they had locked
        # at the fork are not here.
        return
    try:
        if leaving is not None:
            leaving()
        client.close()
        staging.close(CLOSE_TIMEOUT)
        completions.join(CLOSE_TIMEOUT)
    finally:
        if closed is not None:
            closed()
