"""The backend "fanin": what sums, gathers or spreads goes to the services, all else to Gloo.

Ranks match collectives by their order. What a callback begins, on a thread of its own, has no place
in the order of what the program begins meanwhile: DDP begins the next bucket's all-reduce before or
after PowerSGD's callback begins one for the bucket before, each rank as its threads run. (Gloo ends
the process then, or sums what does not belong together.) So what callbacks begin goes to a backend
beside, of the same ranks, with an order of its own: `FaninBackend` makes it when a callback first
begins a collective. In there the order is that of the callbacks (`turns`). A callback's `send` and
`recv` stay: they are matched by rank and tag.

A collective that one rank begins in a callback, all ranks begin in a callback. What callbacks of
*these* begin goes there as well, and the program must see to its order.
"""

# The methods are torch's, and documented there.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor, distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.distributed import DistError

from fanin import _fanin
from fanin._failures import Failures
from fanin._membership import Connected
from fanin._settings import Settings
from fanin.errors import Closed, FaninError, RankLeft, RankLost
from fanin.torch.backend.beside import Beside, own_services, said_by_all
from fanin.torch.backend.channel import Channel
from fanin.torch.backend.delegated_work import DelegatedWork
from fanin.torch.backend.delegating import ANYONE, LAZY, untraced
from fanin.torch.backend.gloo_watch import Watch
from fanin.torch.backend.options import Options, settings_of
from fanin.torch.backend.serving import ServingBackend
from fanin.torch.patches import callbacks, shrinking, splitting, work_methods
from fanin.torch.rendezvous.interface import gloo_address
from fanin.torch.rendezvous.membership import Patience, agree
from fanin.torch.rendezvous.rank_list import Listed
from fanin.torch.rendezvous.survivors import agree_on_survivors, announce
from fanin.torch.works.turns import Turn
from fanin.torch.works.under_way import with_message

# How Gloo says that another rank's end of a connection is gone.
LOST_PEER = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|Connection refused")
# How Gloo says that nothing came of something, which may be for the same reason.
OUT_OF_TIME = re.compile(r"[Tt]imed out|Connect timeout|timeout caused pair closure")

# Held until they are destroyed: see `create`.
_debugged: set[FaninBackend] = set()


def create(
    options: c10d._DistributedBackendOptions, backend_options: object | None
) -> FaninBackend:
    """Make one rank's backend, for `init_process_group("fanin")` and `new_group`."""
    # Other options are for the other backends of a group of several.
    if not isinstance(backend_options, Options):
        backend_options = Options()
    backend = FaninBackend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        backend_options.settings,
        options.global_ranks_in_group,
    )
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        # Torch then wraps the backend in a C++ one that keeps only its C++ half alive.
        _debugged.add(backend)
    return backend


class FaninBackend(ServingBackend):
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
        ranks: Sequence[int] = (),
        outer: FaninBackend | None = None,
        listed_under: str | None = None,
    ) -> None:
        """Join. `ranks` are the default group's, where `new_group` was given them.

        `outer` is the backend whose collectives' callbacks this one is for. `ranks` are those of
        the group with the attempt `listed_under`, where that is said.
        """
        waits = timeout.total_seconds()
        look = None if outer is None else outer._look
        under = listed_under or _attempt()
        listed = Listed(store, ranks, rank, group, under) if ranks else None
        membership = agree(store, rank, size, group, settings, Patience.of(waits, look), listed)
        connected: Connected | None = None
        if size > 1:
            failures = Failures(membership.store, rank, size, DistError)

            def looks() -> None:
                failures.look()
                if look is not None:
                    look()

            patience = Patience.of(waits, looks, failures.tell)
            with failures.shared():
                connected = membership.connect(settings, rank, size, waits, patience)
        try:
            address = None if connected is None else gloo_address(connected.client.switch)
            interfaces = [] if connected is None else connected.interfaces
            at = PrefixStore("gloo/", membership.store)
            super().__init__(at, rank, size, timeout, address, interfaces)
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        self._store = membership.store
        self._is_lazy = bool(os.environ.get(LAZY))
        self._channel = Channel(None) if connected is None else self._joins(connected)
        self.attempt = membership.attempt
        self._replanned = self._shrunk = self._asked = 0
        self._survivors = list(range(size))
        self._timeout = timeout
        self._group = group
        self.settings = settings
        self._address = "" if connected is None else connected.address
        self._lost_before = (0, 0)
        self._outer = None if outer is None else weakref.ref(outer)
        self._of_callbacks: Beside[FaninBackend] = Beside("callbacks", self._store)
        self._own: Beside[Channel] = Beside("own-services", self._store)
        self._left = False
        work_methods.install()
        splitting.install(FaninBackend)
        shrinking.install(FaninBackend)

    def serves(self, tensor: Tensor) -> bool:
        """Return whether the group's protocol has all-reduces of such a tensor."""
        return self._channel.sums([tensor])

    @property
    def has_participants(self) -> bool:
        """Whether a part of the ranks can sum alone (`fanin._participants`)."""
        return self._channel.has_participants

    @property
    def machines(self) -> list[int]:
        """The number of each rank's machine, if its ranks sum first."""
        return self._channel.machines

    @property
    def encrypts(self) -> bool:
        """Whether packets are encrypted."""
        return self._channel.encrypts

    @property
    def plan(self) -> _fanin.JobPlan | None:
        """See `fanin.torch.plan`."""
        return self._channel.plan

    def lost(self) -> tuple[int, int]:
        """See `fanin.torch.lost`."""
        of_callbacks = self._of_callbacks.made
        counted = [self._lost_before, self._channel.lost()]
        counted += [] if of_callbacks is None else [of_callbacks.lost()]
        return sum(each[0] for each in counted), sum(each[1] for each in counted)

    def replan(self, switch: str | None) -> None:
        """See `fanin.torch.replan`."""
        # After all that is under way, on every rank.
        self.barrier(c10d.BarrierOptions()).wait()
        if self.size() == 1:
            return
        self._replanned += 1
        store = PrefixStore(f"replan-{self._replanned}/", self._store)
        failures = Failures(store, self.rank(), self.size(), DistError)

        def look() -> None:
            # A rank that dies is missing in the old plan, too, which hears of it at once.
            failure = self._channel.failure()
            if failure is not None:
                raise failure
            failures.look("; the group goes on as it was")

        patience = Patience.of(self._timeout.total_seconds(), look)
        try:
            settings, connected = self._joined(store, switch, patience)
        except Exception as error:
            # The others may wait for this rank; nobody joins without it.
            if self._channel.failure() is None:
                failures.tell(error)
            raise
        before = self._channel
        self._lost_before = self.lost()
        self._channel = self._joins(connected)
        self.settings = settings
        self._address = connected.address
        # The new plan's are made when they are next needed.
        self._of_callbacks.end(FaninBackend.shutdown)
        self._own.end(Channel.close)
        before.close()

    def _joins(self, connected: Connected) -> Channel:
        watch = self._watch
        leaving = None
        if self._is_lazy and watch is not None:
            leaving = partial(_say_begun, self._store, self.rank(), watch)
        return Channel(connected.client, connected.release if connected.hosted else None, leaving)

    def _joined(
        self, store: Store, switch: str | None, patience: Patience
    ) -> tuple[Settings, Connected]:
        """Join the job of a new plan, once all ranks have; rank 0 says by which switches."""
        rank, size = self.rank(), self.size()
        named = self.settings.at(switch if rank == 0 else None)
        membership = agree(store, rank, size, self._group, named, patience)
        settings = self.settings.at(membership.switch)
        timeout = self._timeout.total_seconds()
        connected = membership.connect(settings, rank, size, timeout, patience, measures_anew=True)
        try:
            said_by_all(store, rank, size, self._group, "joined", "", patience)
        except BaseException:
            connected.close()
            raise
        return settings, connected

    def _lane(self) -> FaninBackend:
        """Return the backend for what is begun here and now: this one, or that of callbacks."""
        own = self._own.made
        if own is not None and (reason := own.failure() or self._channel.failure()) is not None:
            # Some ranks may only know the other job's failure, and these two jobs end as one.
            self._channel.end(reason)
        if not callbacks.inside() or self._outer is not None or self.size() == 1:
            return self
        before = self._of_callbacks.made
        lane = self._of_callbacks.get(self._make_of_callbacks)
        assert lane is not None  # it is made, or that raises
        if before is not None and (ended_by := lane._channel.ended_by()) is not None:
            # Not all ranks know it yet: in a new one they could sum what does not belong together.
            self._channel.end(ended_by)
        turn = callbacks.here.turn
        if isinstance(turn, Turn):
            turn.of.add_inner(lane._channel.turns)
        return lane._lane()

    def _make_of_callbacks(self, store: Store) -> FaninBackend:
        self._look()
        made = FaninBackend(
            store,
            self.rank(),
            self.size(),
            self._timeout,
            f"{self._group}/callbacks",
            self.settings,
            outer=self,
        )
        try:
            self._look()
        except BaseException:
            made.abort()
            raise
        self._channel.turns.add_inner(made._channel.turns)
        return made

    @untraced
    def _make_own(self, store: Store) -> Channel | None:
        patience = Patience.of(self._timeout.total_seconds(), self._look_for_all)
        group = f"{self._group}/own services"
        try:
            self._look_for_all()
            connected = own_services(
                store, self.rank(), self.size(), group, self.settings, patience, self._address
            )
        except BaseException as error:
            cause = None
            if isinstance(error, RankLost | RankLeft):
                # The group's own services may hear of it later.
                cause = self._channel.loss(error, None, "own services")
            if cause is None:
                # This rank does not begin what the others begin.
                self._channel.end(error)
                raise
            raise cause from error
        if connected is None:
            return None
        release = connected.release if connected.hosted else None
        return Channel(connected.client, release, beside=self._channel)

    def _look(self) -> None:
        """Raise what keeps this group from making another one of its ranks."""
        outer = None if self._outer is None else self._outer()
        if outer is not None:
            outer._look()
        self._channel.look()
        if self._left:
            raise Closed("the process group was destroyed while a collective began")

    def _look_for_all(self) -> None:
        """Raise also that a rank has left, without which nothing can be agreed on."""
        self._look()
        gone = self._channel.gone(None)
        if gone is not None:
            raise gone

    def _issued(self, work: Work) -> Work:
        if self._outer is not None and isinstance(work, DelegatedWork):
            with contextlib.suppress(RuntimeError):  # no thread is left that could wait
                work.will_tell()
            self._channel.turns.beside(work)
        return super()._issued(work)

    def _under_way(self) -> list[Work]:
        of_callbacks = self._of_callbacks.made
        inner = [] if of_callbacks is None else of_callbacks._under_way()
        return [*self._channel.under_way(), *super()._under_way(), *inner]

    def failure(self) -> FaninError | None:
        return self._channel.failure()

    def left(self) -> dict[int, int]:
        if not self._is_lazy:
            return {}  # Gloo notices by itself
        return {rank: _begun(self._store, rank) for rank in self._channel.left()}

    def is_alone(self) -> bool:
        others = {*range(self.size())} - {self.rank()}
        failure, gone = self._channel.failure(), set(self._channel.left())
        if isinstance(failure, RankLost | RankLeft):
            gone.add(failure.rank)
        # After a failure no more is heard of the others. A Gloo that connects lazily might wait for
        # one that lives.
        unheard = failure is not None and not self._is_lazy
        return bool(gone) and (unheard or others <= gone) and all(map(self._is_cut_off, others))

    def explain(self, error: Exception, peer: int | None) -> Exception:
        if LOST_PEER.search(str(error)):
            cause = self._channel.loss(error, None if peer == ANYONE else peer)
        elif OUT_OF_TIME.search(str(error)):
            cause = self._channel.gone(None if peer == ANYONE else peer)
        else:
            return super().explain(error, peer)
        if cause is None:
            return error
        return with_message(cause, f"{cause.message}; on Gloo: {error}")

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: Store, ranks: Sequence[int], opts: c10d.Backend.Options) -> FaninBackend:
        """Make a backend for some of this one's ranks: a job of its own at the services."""
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
        """Make a backend for ranks that had different groups: a job of its own at the services."""
        return FaninBackend(
            store, rank, size, opts._timeout, opts.group_name, settings_of(opts) or self.settings
        )

    @property
    def supports_shrinking(self) -> bool:
        return True

    def shrink(
        self,
        ranks_to_exclude: Sequence[int],
        shrink_flags: int = 0,
        opts_override: c10d.Backend.Options | None = None,
    ) -> FaninBackend:
        """Make a backend for the other ranks, all of which call it: a job of its own.

        This one is over then. It is left at once with `SHRINK_ABORT`, and else once what is under
        way is done. Raises `GroupMismatch` where a rank was given another list.
        """
        left = [rank for rank in range(self.size()) if rank not in ranks_to_exclude]
        if shrink_flags:
            self.abort()
        else:
            self.shutdown()
        own = None if opts_override is None else settings_of(opts_override)
        self._shrunk += 1
        return FaninBackend(
            PrefixStore(f"shrunk-{self._shrunk}/", self._store),
            left.index(self.rank()),
            len(left),
            self._timeout,
            self._group,
            own or self.settings,
            # Whoever was given another list is told of it.
            left,
            listed_under=f"{self.attempt}/{self._shrunk}",
        )

    def survivors(self, seconds: float) -> list[int]:
        """Return the ranks that call this within some seconds of each other: see `shrink`.

        A rank that came too late once is not in the list, however often it asks.
        """
        if self.rank() not in self._survivors:
            return self._survivors
        ended_by, lost = self._channel.ended_by(), set(self._channel.left())
        if isinstance(ended_by, RankLost | RankLeft):
            lost.add(ended_by.rank)
        self._asked += 1
        store = PrefixStore(f"survivors-{self._asked}/", self._store)
        announce(store, self.rank(), lost)
        self._survivors = agree_on_survivors(store, range(self.size()), seconds)
        return self._survivors

    @property
    def options(self) -> c10d.Backend.Options:
        return c10d.Backend.Options("fanin", self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Replace the timeout of every collective, by the services and on Gloo."""
        super().set_timeout(timeout)
        self._channel.set_timeout(timeout.total_seconds())
        self._timeout = timeout
        of_callbacks = self._of_callbacks.made
        if of_callbacks is not None:
            of_callbacks.set_timeout(timeout)

    def _set_group_uid(self, uid: str) -> None:
        """Name the group, for flight recorders, in which Gloo writes too."""
        super()._set_group_uid(uid)  # type: ignore[misc]  # torch's stubs lack it
        self._gloo._set_group_uid(uid)

    def shutdown(self) -> None:
        """Leave, once what is under way is done, if that is soon; what is not fails."""
        with contextlib.ExitStack() as last:
            last.callback(_debugged.discard, self)
            last.callback(super().shutdown)
            last.callback(self._channel.close)
            last.callback(self._leave_with, FaninBackend.shutdown)
            self._channel.finish(self._under_way())

    def abort(self) -> None:
        self._leave_with(FaninBackend.abort)
        self._channel.close()
        super().abort()

    def _leave_with(self, end: Callable[[FaninBackend], None]) -> None:
        """Leave first the backend of what callbacks begin, for which some callback may wait."""
        self._left = True
        self._of_callbacks.end(end)
        self._own.end(Channel.close)


def _in_its_lane(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a collective that a callback begins begun by the backend that is for these."""

    @functools.wraps(method)
    def call(self: FaninBackend, *args: Any) -> Any:
        return method(self._lane(), *args)

    return call


# All that the ranks match by its order.
for _name in (
    "allreduce",
    "allreduce_sparse",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "barrier",
    "monitored_barrier",
    "start_coalescing",
    "end_coalescing",
):
    setattr(FaninBackend, _name, _in_its_lane(getattr(FaninBackend, _name)))


def _attempt() -> str | None:
    """Return what tells this default group from all others of its store; None if it is not ours."""
    world = distributed.group.WORLD
    if world is None:
        return None
    for device in world._device_types:
        backend = splitting.unwrapped(world, device)
        if isinstance(backend, FaninBackend):
            return backend.attempt
    return None


def _say_begun(store: Store, rank: int, watch: Watch) -> None:
    with contextlib.suppress(DistError):  # the store is gone
        store.set(f"begun/{rank}", str(watch.begun))


def _begun(store: Store, rank: int) -> int:
    """Return how many collectives on Gloo a rank had begun when it left."""
    key = f"begun/{rank}"
    with contextlib.suppress(DistError):
        if store.check([key]):
            return int(store.get(key))
    # Its store went with it, or before it.
    return -1
