"""The backend "fanin": all-reduces go to the switch, everything else to Gloo."""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor, device, distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ReduceOp, Store, Work

from fanin import _fanin
from fanin._settings import Settings
from fanin.torch import handles, splitting
from fanin.torch.channel import Channel
from fanin.torch.delegating import DelegatingBackend
from fanin.torch.interface import gloo_address
from fanin.torch.membership import agree
from fanin.torch.options import Options, settings_of
from fanin.torch.work import seconds

# How Gloo says that another rank's end of a connection is gone.
LOST_PEER = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|Connection refused")

_debugged: list[FaninBackend] = []


def create(
    options: c10d._DistributedBackendOptions, backend_options: object | None
) -> FaninBackend:
    """Make one rank's backend, for `init_process_group("fanin")` and `new_group`."""
    # Those of others are for the other backends of a group of several.
    if not isinstance(backend_options, Options):
        backend_options = Options()
    backend = FaninBackend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        backend_options.settings,
    )
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        # Torch then wraps the backend in a C++ one that keeps only its C++ half alive.
        _debugged.append(backend)
    return backend


def plan(group: ProcessGroup | None = None) -> _fanin.JobPlan | None:
    """Return how a group's all-reduces are shared among services, and how they fare.

    A dict, on every rank: `services`, of each a dict of its address (`service`), its `share` of all
    tensors, and the rank in whose process it is (`host`, None for a `fanin switch`); `predicted`
    and `measured`, seconds that a byte takes as it travels, and `bound`, what the prediction waits
    for: docs/operations.md has more. None for ranks of one machine, and for a destroyed group.

    Without `group` it is the default group's. Raises `ValueError` for a group that is not fanin's.
    """
    chosen: ProcessGroup | None = group or distributed.group.WORLD
    if chosen is None:
        raise ValueError("there is no group: call init_process_group first")
    backend = chosen._get_backend(device("cpu"))
    if not isinstance(backend, FaninBackend):
        raise ValueError(f"the group's backend is {chosen.name()}, and not fanin")
    return backend.plan


class FaninBackend(DelegatingBackend):
    """One rank of one group. The constructor blocks until all ranks have joined the job.

    A group of one rank needs no switch. Raises the errors of `fanin.errors`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group: str,
        settings: Settings,
    ) -> None:
        membership = agree(store, rank, size, group, timeout, settings)
        connected = (
            membership.connect(settings, rank, size, timeout.total_seconds()) if size > 1 else None
        )
        try:
            address = None if connected is None else gloo_address(connected.client.switch)
            super().__init__(PrefixStore("gloo/", membership.store), rank, size, timeout, address)
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        if connected is None:
            self._channel = Channel(None)
        else:
            hosted = connected.hosted
            self._channel = Channel(connected.client, hosted.release if hosted else None)
        self._timeout = timeout
        self._group = group
        self.settings = settings
        self._all_reduces = 0
        handles.install()
        splitting.install(FaninBackend)

    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work:
        work = self._sum(tensors, opts)
        return super().allreduce(tensors, opts) if work is None else self._issued(work)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> Work:
        work = self._sum(tensors, opts)
        return super().allreduce_coalesced(tensors, opts) if work is None else self._issued(work)

    def _sum(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Work | None:
        """Start the all-reduce on the switch; None if it is not one that the switch serves."""
        average = opts.reduceOp == ReduceOp.AVG
        if not (average or opts.reduceOp == ReduceOp.SUM):
            return None
        if not all(map(self._channel.serves, tensors)):
            return None
        if len({tensor.device.type for tensor in tensors}) > 1:
            return None
        self._all_reduces += 1
        # A synchronous call keeps its work to itself: nobody can ask for a future.
        return self._channel.all_reduce(
            tensors, average=average, notify=opts.asyncOp, limit=seconds(opts.timeout)
        )

    @property
    def plan(self) -> _fanin.JobPlan | None:
        """See `fanin.torch.plan`."""
        return self._channel.plan

    def _under_way(self) -> list[Work]:
        return [*self._channel.under_way(), *super()._under_way()]

    def _explain(self, error: Exception) -> Exception:
        if not LOST_PEER.search(str(error)):
            return super()._explain(error)
        cause = self._channel.loss(error)
        if cause is None:
            return error
        fields = {name: value for name, value in vars(cause).items() if name != "message"}
        return type(cause)(f"{cause.message}; on Gloo: {error}", **fields)

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: Store, ranks: Sequence[int], opts: c10d.Backend.Options) -> FaninBackend:
        """Make a backend for some of this one's ranks: a job of its own on the switch."""
        if self.rank() not in ranks:
            # Not None, as C++ would crash. Torch does not come here (`splitting`).
            raise ValueError(f"rank {self.rank()} is not in the split of ranks {list(ranks)}")
        return FaninBackend(
            store,
            list(ranks).index(self.rank()),
            len(ranks),
            opts._timeout,
            opts.group_name,
            settings_of(opts) or self.settings,
        )

    def merge(self, store: Store, opts: c10d.Backend.Options, rank: int, size: int) -> FaninBackend:
        """Make a backend for ranks that had different groups: a job of its own on the switch."""
        return FaninBackend(
            store, rank, size, opts._timeout, opts.group_name, settings_of(opts) or self.settings
        )

    @property
    def options(self) -> c10d.Backend.Options:
        return c10d.Backend.Options("fanin", self._timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._all_reduces + super()._get_sequence_number_for_group()

    def set_timeout(self, timeout: timedelta) -> None:
        """Replace the timeout of every all-reduce, on the switch and on Gloo."""
        super().set_timeout(timeout)
        self._channel.set_timeout(timeout.total_seconds())
        self._timeout = timeout

    def _set_group_uid(self, uid: str) -> None:
        """Name the group, for flight recorders, in which Gloo writes too."""
        super()._set_group_uid(uid)  # type: ignore[misc]  # torch's stubs lack it
        self._gloo._set_group_uid(uid)

    def shutdown(self) -> None:
        """Leave, once what is under way is done, if that is soon; what is not fails."""
        with contextlib.ExitStack() as last:
            last.callback(super().shutdown)
            last.callback(self._channel.close)
            self._channel.finish(self._under_way())

    def abort(self) -> None:
        self._channel.close()
        super().abort()
