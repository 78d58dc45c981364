"""How `init` begins a job, for each framework."""

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


def start(
    framework: world.Framework,
    comm: Sequence[int] | None,
    process_sets: Iterable[sets.ProcessSet] | str | None,
) -> None:
    """Join the job of all ranks; nothing if this process is in it. See `torch_job.init`.

    Raises `ValueError` also if another framework has a job in this process.
    """
    listed = list(process_sets) if not isinstance(process_sets, str | None) else []
    if isinstance(process_sets, str) and process_sets.lower() != sets.DYNAMIC:
        raise ValueError(f'process_sets is {process_sets!r}: a list of them, or "{sets.DYNAMIC}"')
    if comm is not None and not isinstance(comm, Sequence):
        raise ValueError(f"comm is {comm!r}: a list of ranks, as there is no MPI")
    if world.begin(framework, comm or []):
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
            stacklevel=4,
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
