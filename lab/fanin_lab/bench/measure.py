"""The order of the rounds, and the verdict on their sums."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from fanin._settings import Settings

from fanin_lab import commands
from fanin_lab.bench import DTYPES, BenchError, openmpi
from fanin_lab.bench.message import ALONE, BOUNDED, OPENMPI, TCP, Round
from fanin_lab.bench.pattern import PATTERN_MAX
from fanin_lab.bench.progress import Advance
from fanin_lab.bench.report import title
from fanin_lab.bench.result import Run, Setting, error_allowed, figures
from fanin_lab.bench.stage import Links, Sample, Stage, stage
from fanin_lab.netlab import MTU_DEFAULT

# Below this size, waking the ranks would be most of the time of a single call.
SMALL_BYTES = 64_000
CALLS_SMALL = 32


def measure(
    args: argparse.Namespace, counts: Sequence[int], sizes: Sequence[int], advance: Advance
) -> list[Run]:
    """Measure each size with each number of workers.

    Raises `BenchError`, and `fanin_lab.netlab.NetlabError`.
    """
    links = links_of(args)
    settings: Settings = args.settings
    grouped: int = args.ranks_per_machine
    with_switch = has_switch(args)
    _check_cast(counts, grouped, links, settings, with_switch)
    if OPENMPI in args.baseline:
        _check_openmpi(args.collective, args.dtype, bool(args.layers))
    runs = []
    for workers in counts:
        with stage(
            workers, links, backends(args), args.timeout, settings, grouped, with_switch
        ) as ready:
            for size in sizes:
                setting = Setting(
                    workers=workers,
                    size_bytes=size,
                    dtype=args.dtype,
                    wire_dtype=settings.travels_as,
                    protocol=settings.protocol,
                    element_bytes=DTYPES[args.dtype][0],
                    buckets=args.buckets,
                    calls=args.calls or _calls(args, size),
                    links=links,
                    ranks_per_machine=grouped,
                    with_switch=with_switch,
                    own_services=settings.plan != "switch",
                    loss_bound=settings.loss_bound,
                    collective=args.collective,
                    step=args.layers,
                )
                plan = ready.plan(setting.payload_bytes, settings.plan)
                runs.append(_take_turns(ready, replace(setting, plan=plan), args, advance))
    return runs


def _calls(args: argparse.Namespace, size: int) -> int:
    return CALLS_SMALL if size < SMALL_BYTES and not args.layers else 1


def _check_cast(
    counts: Sequence[int],
    grouped: int,
    links: Links | None,
    settings: Settings,
    with_switch: bool,
) -> None:
    if grouped > 1 and links is None:
        raise BenchError(
            "on loopback all ranks are on one machine: --ranks-per-machine is of a laboratory's, "
            "which --rate or --mtu builds"
        )
    for workers in counts:
        if workers % grouped:
            raise BenchError(f"{workers} ranks do not fill machines of {grouped}")
    if (
        links is not None
        and links.nics > 1
        and (settings.protocol != "switchml" or settings.plan == "switch")
    ):
        raise BenchError(
            "--nics needs the ranks' own services: leave out --protocol and --plan switch"
        )
    if settings.protocol != "switchml" and not with_switch:
        raise BenchError(
            f"{settings.protocol} sums in its switches and its server: without --spares"
        )
    if links is not None and links.bulk and min(counts) // grouped < 2:
        raise BenchError("TCP goes from w0 to w1 and back: --background tcp needs two machines")
    if links is not None and links.untold and settings.protocol != "switchml":
        raise BenchError(f"--untold: {settings.protocol} has no plan that depends on rates")


def _check_openmpi(collective: str, dtype: str, step: bool) -> None:
    if collective != "all_reduce" or step:
        raise BenchError("Open MPI takes turns in all-reduces alone: --baseline gloo")
    if dtype not in openmpi.DTYPES:
        raise BenchError(
            f"MPI sums no {dtype}: --baseline gloo, or --dtype {' or '.join(openmpi.DTYPES)}"
        )
    commands.require(BenchError, "mpi4py")
    openmpi.mpirun()


def has_switch(args: argparse.Namespace) -> bool:
    """Whether there is a switch with a link for every worker: where nothing else is asked for."""
    return not (args.settings.plan == "own" or args.spares or args.nics > 1)


def links_of(args: argparse.Namespace) -> Links | None:
    """Return the laboratory's links; None where no option asks for one."""
    links = Links(
        rate_bps=args.rate,
        loss=args.loss,
        mtu=args.mtu or MTU_DEFAULT,
        racks=args.racks,
        nics=args.nics,
        spares=args.spares,
        spare_rate_bps=args.spare_rate,
        rates=dict(args.rate_of),
        queue_bytes=args.queue,
        background_bps=None if args.background == TCP else args.background,
        burst_bytes=args.burst,
        udp_offload=args.udp_offload,
        bulk=args.background == TCP,
        untold=args.untold,
        ecn_bytes=args.ecn,
        queues=args.queues,
        loss_burst=args.loss_burst,
    )
    return links if links != Links() or args.mtu is not None else None


def backends(args: argparse.Namespace) -> tuple[str, ...]:
    """Return who takes turns."""
    bounded = (BOUNDED,) if args.settings.loss_bound else ()
    alone = (ALONE,) if args.background == TCP else ()
    return ("fanin", *alone, *bounded, *args.baseline)


def _take_turns(ready: Stage, setting: Setting, args: argparse.Namespace, advance: Advance) -> Run:
    samples: dict[str, list[Sample]] = {backend: [] for backend in backends(args)}
    bulk_alone: list[float] = []
    for repeat in range(-args.warmup, args.repeat):
        alone_bps = ready.bulk_alone_bps()
        if repeat >= 0 and alone_bps is not None:
            bulk_alone.append(alone_bps)
        for backend, taken in samples.items():
            advance(f"{title(setting)}, {backend}")
            sample = ready.round(
                Round(
                    backend=backend,
                    dtype=setting.dtype,
                    elements=setting.elements,
                    buckets=setting.buckets,
                    calls=setting.calls,
                    collective=setting.collective,
                    step=setting.step,
                )
            )
            _check(backend, setting, sample)
            if repeat >= 0:
                taken.append(sample)
    found = {backend: figures(setting, taken) for backend, taken in samples.items()}
    alone = statistics.median(bulk_alone) if bulk_alone else None
    return Run(setting, found, ready.switch_peak_bytes(), alone)


def _check(backend: str, setting: Setting, sample: Sample) -> None:
    if backend == BOUNDED and DTYPES[setting.dtype][1]:
        # Sums of what came, which only fanin itself knows, are checked for equal bits alone.
        if not sample.lost_share <= setting.loss_bound:
            raise BenchError(
                f"{backend}: {sample.lost_share:.3%} of the contributions are lost, and "
                f"{setting.loss_bound:.3%} is allowed: {title(setting)}"
            )
        # Of what is reduced to one rank, others know no loss.
        if sample.lost_share > 0 or setting.collective in ("reduce", "reduce_scatter"):
            return
    _, epsilon = DTYPES[setting.dtype]
    # Where all came, floats were added as they are.
    travels_as = "native" if backend == BOUNDED else setting.wire_dtype
    allowed = error_allowed(backend, epsilon, setting.workers, PATTERN_MAX, travels_as)
    if not sample.error_max <= allowed:  # true of a NaN, too
        raise BenchError(
            f"{backend}: a sum is off by {sample.error_max:g}, and {allowed:g} is allowed: "
            f"{title(setting)}"
        )
