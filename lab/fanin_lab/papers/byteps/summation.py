"""§5, Figure 9(b): how many floats a service sums in a second, on this machine's processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fanin import _fanin

from fanin_lab.papers.finding import Experiment, Finding, Outcome, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Level, Mark, Panel, Picture, outcome

if TYPE_CHECKING:
    from fanin._fanin import DType

DTYPES: dict[DType, str] = {"float32": "FP32", "float16": "FP16"}
NIC_GBPS = 100.0
CORES_MAX = 3.0
"""§5: "fewer than 3 CPU cores when it runs at 100Gbps throughput"."""
WORKERS = 8
BYTES, BYTES_QUICK = 4 * 2**20, 2**18
"""Of each worker's contribution: a partition of the paper's (§4.1)."""
REPEAT, REPEAT_QUICK = 20, 5
"""Of which the fastest counts: what else runs here only makes it slower."""


def run(lab: Lab) -> Outcome:
    """Sum on one core and on all, and copy as many bytes."""
    import numpy

    cores = available()
    found: dict[str, list[float]] = {}
    for _ in lab.seeds:
        for dtype, name in DTYPES.items():
            sums = service_sums(lab, dtype)
            for of, count in (("1", 1), ("all", cores)):
                found.setdefault(f"{name}, {of}", []).append(cpu_gbps(*sums, count))
        size, repeat = _sizes(lab)
        source = numpy.ones(WORKERS * size, numpy.uint8)
        target = numpy.empty_like(source)

        def copy(_: int, to: numpy.ndarray = target, of: numpy.ndarray = source) -> None:
            numpy.copyto(to, of)

        rate = cpu_gbps(repeat, source.nbytes, copy, 1)
        found.setdefault("memcpy, 1", []).append(rate)

    names = [*DTYPES.values(), "memcpy"]

    def bars(at: int, cores_of: str, label: str) -> Bars:
        there = [name for name in names if f"{name}, {cores_of}" in found]
        medians = [Spread.of(found[f"{name}, {cores_of}"]).median for name in there]
        return Bars([names.index(name) + 0.4 * at for name in there], medians, label, 0.38)

    marks: list[Mark] = [
        bars(0, "1", "1 core"),
        bars(1, "all", f"all {cores} cores"),
        Level(NIC_GBPS, "the paper's NIC"),
    ]
    # A copy has one bar and a sum has two: the name is below their middle.
    ticks = {
        place + (0.2 if f"{name}, all" in found else 0): name for place, name in enumerate(names)
    }
    title = f"{WORKERS} contributions, packet by packet"
    panel = Panel(marks, "", "Gbit/s of contributions", title, ticks=ticks)

    findings = []
    for name in DTYPES.values():
        one, every = (found[f"{name}, {cores_of}"] for cores_of in ("1", "all"))
        findings += [
            Finding(
                "Fig. 9(b)",
                f"{name}: what all {cores} cores of this machine sum (the paper's have 32)",
                "more than 200 Gbit/s, and so more than the NIC's 100",
                Spread.of(every),
                holds=at_least(NIC_GBPS),
                unit="Gbit/s",
            ),
            Finding(
                "§5",
                f"{name}: cores of this machine that sum 100 Gbit/s",
                "fewer than 3",
                Spread.of([NIC_GBPS / rate for rate in one]),
                holds=at_most(CORES_MAX),
            ),
        ]
    return outcome(findings, Picture([panel]))


def available() -> int:
    """Return how many cores there are."""
    return len(os.sched_getaffinity(0))


def _sizes(lab: Lab) -> tuple[int, int]:
    return (BYTES_QUICK, REPEAT_QUICK) if lab.quick else (BYTES, REPEAT)


def service_sums(lab: Lab, dtype: DType) -> tuple[int, int, Callable[[int], object]]:
    """Return what `cpu_gbps` measures of a service: sums of eight partitions."""
    import numpy

    size, repeat = _sizes(lab)
    kind = numpy.dtype(dtype)
    dice = numpy.random.default_rng(lab.seeds[0])

    def contributions() -> list[bytes]:
        values = dice.standard_normal((WORKERS, size // kind.itemsize)).astype(kind)
        return [of_one.tobytes() for of_one in values]

    of_cores = [contributions() for _ in range(available())]
    return repeat, WORKERS * size, lambda core: _fanin.summed(of_cores[core], dtype)


def cpu_gbps(
    repeat: int, size: int, work: Callable[[int], object], cores: int | None = None
) -> float:
    """Return how fast cores are at once, each with so many bytes, the best of some tries.

    All cores, unless their number is given.

    By how long a core works for it: what else runs there meanwhile is not in it.
    """

    def cpu_s(core: int) -> float:
        began = time.thread_time()
        work(core)
        return time.thread_time() - began

    count = cores or available()
    with ThreadPoolExecutor(count) as pool:
        tries = [list(pool.map(cpu_s, range(count))) for _ in range(repeat)]
    return max(sum(8e-9 * size / of_core for of_core in times) for times in tries)


EXPERIMENT = Experiment(
    "summation", "Sums of a service on this machine (Figure 9b)", run, measures=True
)
