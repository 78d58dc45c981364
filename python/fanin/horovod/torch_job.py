"""PyTorch's jobs: ranks meet in torch's stores, and engines have groups of fanin's backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import cast

from torch import distributed
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store

import fanin.torch  # noqa: F401 - makes its backend known to torch
from fanin._elastic_members import ELASTIC
from fanin.horovod.elastic_rendezvous import Gone
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.errors import Apart
from fanin.horovod.execution import TorchExecutor
from fanin.horovod.process_sets import ProcessSet
from fanin.horovod.rendezvous import Rendezvous, Stored, of_launcher
from fanin.horovod.starting import start
from fanin.horovod.world import LOST, Joined, Meeting, chosen
from fanin.torch.rendezvous.interface import own_address

# The meeting of the launcher's processes. It counts how often they met, so it is kept.
_launched: Stored | None = None
# The store of the program's own group, and where its ranks meet; of the last such group alone.
_grouped: tuple[Store, Rendezvous] | None = None


class Torch:
    """PyTorch, as `world.Framework`."""

    name = "fanin.horovod"
    lost = (*LOST, DistError, Gone)

    def meeting(self) -> Stored:
        """Return the launcher's, or that of the program's own group."""
        global _launched, _grouped
        if not distributed.is_initialized():
            _launched = _launched or of_launcher()
            return _launched
        store = _get_default_store()
        if _grouped is None or _grouped[0] is not store:
            _grouped = store, Rendezvous()
        return _grouped[1]

    def join(
        self, meeting: Meeting, ranks: Sequence[int], settings: EngineSettings, *, again: bool
    ) -> Joined:
        """Join the others; the default group is made unless the program has one."""
        stored = cast(Stored, meeting)
        if ranks and distributed.is_initialized():
            raise ValueError("init(comm) names ranks, and there is a group already: leave it out")
        if meeting.failed and distributed.is_initialized():
            raise Apart(
                "a rank of the program's own group is gone: to go on without it, leave "
                "init_process_group to hvd.init(), or call destroy_process_group() first"
            )
        if distributed.is_initialized():
            store, _ = stored.meet()
            rank, size = distributed.get_rank(), distributed.get_world_size()
            return _joined(store, rank, size, settings, None)
        if os.environ.get(ELASTIC):
            # The first optimizer loads it, for seconds in which others would wait for this process.
            import_module("torch._dynamo")
        store, rank, size = _seat(stored, ranks, again=again)
        leave = partial(distributed.destroy_process_group, None)
        # Torch names groups by their number, and an `init` that failed has counted its own.
        distributed.distributed_c10d._world.group_count = 0
        distributed.init_process_group(
            "fanin", store=PrefixStore("world", store), rank=rank, world_size=size
        )
        try:
            return _joined(store, rank, size, settings, leave)
        except BaseException:
            leave()
            raise


def _joined(
    store: Store, rank: int, size: int, settings: EngineSettings, leave: Callable[[], None] | None
) -> Joined:
    # Not the default one: what the program calls there comes in no order with the engine's.
    group = distributed.new_group(backend="fanin")
    assert isinstance(group, ProcessGroup)

    def left() -> None:
        # Left already, if the engine had failed.
        with contextlib.suppress(ValueError, AssertionError):
            (leave or partial(distributed.destroy_process_group, group))()

    return Joined(
        TorchExecutor(group, rank, size, settings.fused_bytes_max),
        rank,
        size,
        lambda name: PrefixStore(name, store),
        partial(own_address, store),
        left,
    )


def _seat(meeting: Stored, ranks: Sequence[int], *, again: bool) -> tuple[Store, int, int]:
    """Return where this process and others meet, its rank there, and how many they are."""
    store, places = meeting.meet()
    job = chosen(meeting, places, ranks, again=again)
    if job is not places:
        store = PrefixStore(f"of/{','.join(map(str, job))}", store)
    return store, job.index(meeting.place), len(job)


TORCH = Torch()


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet] | str | None = None,
) -> None:
    """Join the job of all ranks, and return once all have; nothing if this process is in it.

    Ranks are what the launcher says: RANK and WORLD_SIZE (`fanin run`, torchrun), or the variables
    of `mpirun`, `mpiexec`, `srun` and `jsrun` (`launchers.py`). Several ranks meet at MASTER_ADDR
    and MASTER_PORT. A process that nobody launched is a job of one. Where the program has called
    `torch.distributed.init_process_group`, the ranks are that group's.

    Raises `LaunchIncomplete`, a `ValueError`, if the launcher says that there are several ranks and
    nothing says where they meet; the message says how to tell them under that launcher.

    Raises `HorovodInternalError` if a rank is gone or does not come
    (`__cause__` says which). What was made until then is undone, and `init` may be called again.

    `comm` are ranks of the launcher's: those alone make the job, counted anew in that order.
    `process_sets` are added; "dynamic" is accepted, and says nothing, as sets can always be added.
    """
    start(TORCH, comm, process_sets)
