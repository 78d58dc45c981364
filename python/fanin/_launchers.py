"""The rank of this process and the number of ranks, as its launcher says them in the environment.

Each launcher has variables of its own. A process may find those of several: `mpirun` starts its
daemons by `srun`, whose variables they pass on. The launcher that started the process itself comes
first here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fanin.errors import LaunchIncomplete

MEETING: Final = ("MASTER_ADDR", "MASTER_PORT")
"""The place where ranks meet: a host of rank 0, and a port that is free there."""
# A step that a user starts by srun has a lower number. The shell of an allocation has one from here
# on, and so has a batch script (SLURM_MAX_NORMAL_STEP_ID in slurm.h).
_SLURM_STEPS: Final = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets, and how it passes others on."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    """The first that is set counts; none for a launcher that says ranks alone."""
    meet: str
    """How its user says where ranks meet."""


@dataclass(frozen=True)
class Launched:
    """The words of a launcher."""

    rank: int
    size: int


_HOST: Final = " (HOST is the machine of rank 0, and 29500 a port that is free there)"
_BY_HAND: Final = Launcher(
    "hand",
    "RANK",
    ("WORLD_SIZE",),
    f"set MASTER_ADDR=HOST and MASTER_PORT=29500 on all ranks{_HOST}",
)
_SLURM: Final = Launcher(
    "Slurm's srun",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "before srun, `export MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames "
    '"$SLURM_JOB_NODELIST" | head -n 1)`',
)
# PMIx says how many processes there are by its library, and not in the environment.
_PMIX: Final = Launcher("a launcher with PMIx", "PMIX_RANK", (), _BY_HAND.meet)
_LAUNCHERS: Final = (
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        ("HOROVOD_SIZE",),
        "start with `fanin run -np N` in place of `horovodrun -np N`",
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        ("JSM_NAMESPACE_SIZE",),
        f"start with `jsrun -E MASTER_ADDR=HOST -E MASTER_PORT=29500 ...`{_HOST}",
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        f"start with `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...`{_HOST}",
    ),
    Launcher(
        "mpiexec of MPICH or Intel MPI, or srun with PMI",
        "PMI_RANK",
        ("PMI_SIZE",),
        "start with `mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...`, or export both "
        f"before srun{_HOST}",
    ),
    _SLURM,
    _PMIX,
)


def launched(environment: Mapping[str, str], *, meets: bool = True) -> Launched | None:
    """Return what the launcher says of this process; None if nobody launched it.

    RANK and WORLD_SIZE together come before what any launcher says. Raises `LaunchIncomplete` if
    the rank or the size is not known, if they are no numbers, or if there are several ranks, they
    are to meet, and nothing says where.
    """
    launcher = next((each for each in (_BY_HAND, *_LAUNCHERS) if _is_by(each, environment)), None)
    rank = _first(environment, *([launcher.rank] if launcher else []), "RANK")
    size = _first(environment, *(launcher.sizes if launcher else []), "WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        said, missing = (size, "RANK") if rank is None else (rank, "WORLD_SIZE")
        raise LaunchIncomplete(
            f"{said} is set, and {missing} is not: set {missing}, {' and '.join(MEETING)}, too, "
            f"or unset {said} for a job of one rank"
        )
    found = Launched(_number(environment, rank), _number(environment, size))
    if not 0 <= found.rank < found.size:
        raise LaunchIncomplete(
            f"{rank} is {found.rank} and {size} is {found.size}: ranks are numbered from 0"
        )
    absent = " and ".join(name for name in MEETING if not environment.get(name))
    if meets and found.size > 1 and absent:
        by = launcher or _BY_HAND
        raise LaunchIncomplete(
            f"{size} says that there are {found.size} ranks, and nothing says where they meet "
            f"({absent} not set). Started by {by.name}: {by.meet}"
        )
    return found


def _is_by(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    if launcher is _BY_HAND:
        return bool(environment.get("RANK") and environment.get("WORLD_SIZE"))
    if launcher in (_SLURM, _PMIX):
        # The shell of an allocation has the variables of its tasks, too, and is none of them.
        step = environment.get("SLURM_STEP_ID", "" if launcher is _SLURM else "0")
        if not step.isdecimal() or int(step) >= _SLURM_STEPS:
            return False
    return bool(environment.get(launcher.rank))


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise LaunchIncomplete(f"{name} is {environment[name]!r}, and no number") from None
