"""From settings to a membership: what `fanin.connect` and the torch backend share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fanin import _fanin
from fanin._services import PLACES_MAX, Service, Split, lane_bps
from fanin._settings import Settings, variable
from fanin.errors import FaninError, RankOutOfRange, SwitchUnreachable

# torchrun's: unlike the rank in a job, it is another one in every process of a run.
RANK_VARIABLE = "RANK"

WORLD_SIZE_MAX = PLACES_MAX**2


def check_rank(rank: int, world_size: int) -> None:
    """Refuse what no switch would serve. Raises `fanin.errors.RankOutOfRange`."""
    if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
        raise RankOutOfRange(
            f"rank {rank} of world size {world_size}: ranks count from 0 to the world size less 1, "
            f"and a job has at most {WORLD_SIZE_MAX}"
        )


def join(
    settings: Settings,
    job: str,
    rank: int,
    world_size: int,
    timeout: float,
    services: Sequence[Service] | None = None,
    planned: Split | None = None,
    local: _fanin.LocalRanks | None = None,
    hosted: _fanin.Switch | None = None,
    meeting: _fanin.Meeting | None = None,
    link: tuple[int | None, int] = (None, 1),
    look: Callable[[], None] | None = None,
    trust: _fanin.Trust | None = None,
) -> _fanin.Client:
    """Join `job`; blocks until all ranks have, `timeout` seconds at most.

    Without `services` the switches of the settings sum, each as much as any other. `planned` is
    where the shares are from. With `local` the ranks of this machine sum among themselves
    first. `hosted` is this process's service, if it is one of them. The ranks met at `meeting`, and
    `BeganAnew` is raised when one of them is started again. Of this machine's `link`, whose bits a
    second may be known, so many ranks send at once. What `look` raises, which is called now and
    then, ends the waiting. The services are known as `trust` says, or else the settings. Raises the
    errors of `fanin.errors`.
    """
    if services is None:
        if settings.switch is None:
            raise SwitchUnreachable(no_switch())
        switches = settings.switch.split(",")
        several = len(switches) > 1
        lane = lane_bps([settings.rate_bps or link[0]], len(switches)) if several else None
        services = [(switch, 1.0, lane, None) for switch in switches]
    if settings.loss_bound:
        # It sends as fast as the link is, and not as fast as answers come: what a virtual link is
        # said to carry has to be known.
        rate, crowd = link
        known = [bps or settings.rate_bps or rate for _, _, bps, _ in services]
        services = [
            (at, share, None if bps is None else max(bps // crowd, 1), host)
            for (at, share, _, host), bps in zip(services, known, strict=True)
        ]
    return _fanin.Client(
        services,
        job,
        rank,
        world_size,
        settings,
        timeout=timeout,
        trace=None if settings.trace is None else timeline(settings.trace, rank),
        prediction=None if planned is None else planned.prediction,
        links=None if planned is None else planned.links,
        local=local,
        hosted=hosted,
        meeting=meeting,
        look=look,
        trust=trust or trusted(settings),
    )


def trusted(settings: Settings) -> _fanin.Trust:
    """Return by what the services are known: nothing of it, until they are seen or told of.

    Raises `fanin.errors.FaninError` for files that are of no use.
    """
    return _fanin.Trust(settings.tls_ca, settings.secret_file)


def timeline(trace: str, rank: int) -> tuple[str, int]:
    """Return the file of this process's timeline, and the rank that it has there.

    Of DIR/NAME.json it is DIR/NAME.0.json and so on. The rank is torchrun's (RANK), so that the
    processes of a run never share a file; without it, `rank`, that of the job.
    """
    launched = os.environ.get(RANK_VARIABLE, "")
    number = int(launched) if launched.isdecimal() else rank
    path = Path(trace).absolute()
    return str(path.with_name(f"{path.stem}.{number}{path.suffix}")), number


def check_timeline(trace: str, rank: int) -> None:
    """Raise `fanin.errors.FaninError` where the process's timeline cannot be written."""
    file, _ = timeline(trace, rank)
    try:
        with Path(file).open("ab"):
            pass
    except OSError as cause:
        raise FaninError(
            f"opening the trace file (FANIN_TRACE) failed on this machine: {file}: {cause.strerror}"
        ) from None


def no_switch() -> str:
    """Say that there is nobody who sums, and what to do."""
    name = variable("switch")
    ray = f'runtime_env={{"env_vars": {{"{name}": "HOST:PORT"}}}}'
    return (
        "no switch was named: start the program with `fanin run --plan switch ...` (which has one "
        f"inside), or start one with `fanin switch` and set {name}=HOST:PORT on every rank, or "
        'say switch="HOST:PORT" (fanin.connect, fanin.torch.Options, HookState). A launcher that '
        "does not hand the environment on to its workers must be told to: "
        + (f"Ray by {ray}" if "ray" in sys.modules else f"mpirun by -x {name}, Ray by {ray}")
    )
