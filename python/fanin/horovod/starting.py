"""`init`."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterable, Sequence

from fanin.horovod import process_sets as sets
from fanin.horovod import world
from fanin.horovod.engine_settings import VARIABLES

TIMELINE_VARIABLE = "HOROVOD_TIMELINE"
# Variables that fanin reads, that ask for what fanin does anyway, or that horovodrun sets.
_HEEDED = {
    TIMELINE_VARIABLE,
    *VARIABLES,
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
}


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[sets.ProcessSet] | str | None = None,
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
    listed = list(process_sets) if not isinstance(process_sets, str | None) else []
    if isinstance(process_sets, str) and process_sets.lower() != sets.DYNAMIC:
        raise ValueError(f'process_sets is {process_sets!r}: a list of them, or "{sets.DYNAMIC}"')
    if comm is not None and not isinstance(comm, Sequence):
        raise ValueError(f"comm is {comm!r}: a list of ranks, as there is no MPI")
    if world.begin(comm or []):
        _warn_of_ignored()
        _begun(listed)


def _warn_of_ignored() -> None:
    """Say on rank 0 which of Horovod's variables somebody has set for nothing."""
    ignored = sorted(
        name
        for name, value in os.environ.items()
        if name.startswith("HOROVOD_") and value and name not in _HEEDED
    )
    if ignored and world.rank() == 0:
        warnings.warn(
            f"fanin.horovod ignores {', '.join(ignored)}: unset them; docs/horovod.md says which "
            "variables of Horovod it reads, and what fanin has instead of the others",
            stacklevel=3,
        )


def init_again() -> None:
    """Join the job of those that are left of an `init`: with the same `comm`, but for the lost."""
    if world.begin_again():
        _begun([])


def _begun(listed: Iterable[sets.ProcessSet]) -> None:
    atexit.unregister(world.end)  # from an earlier one
    atexit.register(world.end)
    path = os.environ.get(TIMELINE_VARIABLE, "")
    if path and path.lower() != sets.DYNAMIC:
        world.start_timeline(path)
    for each in listed:
        sets.add_process_set(each)
