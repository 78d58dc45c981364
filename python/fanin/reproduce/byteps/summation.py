"""§5, Figure 9(b): how many floats a service sums in a second, on this machine's processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fanin import _fanin
from fanin.reproduce.finding import Experiment, Finding, Outcome, at_least, at_most
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import PAPER, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fanin._fanin import DType

DTYPES: dict[DType, str] = {"float32": "FP32", "float16": "FP16"}
NIC_GBPS = 100.0
CORES_MAX = 3.0
"""§5: "fewer than 3 CPU cores when it runs at 100Gbps throughput"."""
WORKERS = 8
BYTES, BYTES_QUICK = 8 * 2**20, 2**20
"""Of each worker's contribution: all together are more than a processor's nearest caches hold."""
REPEAT, REPEAT_QUICK = 20, 3
"""Of which the fastest counts: what else runs here only makes it slower."""


def run(lab: Lab) -> Outcome:
    """Sum on one core and on all, and copy as many bytes."""
    import numpy

    size, repeat = (BYTES_QUICK, REPEAT_QUICK) if lab.quick else (BYTES, REPEAT)
    cores = len(os.sched_getaffinity(0))
    dice = numpy.random.default_rng(lab.seeds[0])
    found: dict[str, list[float]] = {}
    for _ in lab.seeds:
        for dtype, name in DTYPES.items():
            kind = numpy.dtype(dtype)

            def contributions(kind: numpy.dtype[numpy.generic] = kind) -> list[bytes]:
                values = dice.standard_normal((WORKERS, size // kind.itemsize)).astype(kind)
                return [of_one.tobytes() for of_one in values]

            of_cores = [contributions() for _ in range(cores)]

            def sums(core: int, of: list[list[bytes]] = of_cores, dtype: DType = dtype) -> None:
                _fanin.summed(of[core], dtype)

            for count in sorted({1, cores}):
                rate = _gbps(count * WORKERS * size, repeat, count, sums)
                found.setdefault(f"{name}, {count}", []).append(rate)
        source = numpy.ones(WORKERS * size, numpy.uint8)
        target = numpy.empty_like(source)

        def copy(_: int, to: numpy.ndarray = target, of: numpy.ndarray = source) -> None:
            numpy.copyto(to, of)

        found.setdefault("memcpy", []).append(_gbps(source.nbytes, repeat, 1, copy))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        names = [*DTYPES.values(), "memcpy"]
        for at, count in enumerate((1, cores)):
            there = [name for name in names if name != "memcpy" or count == 1]
            medians = [Spread.of(found[_key(name, count)]).median for name in there]
            places = [names.index(name) + 0.4 * at for name in there]
            axes.bar(places, medians, 0.38, label="1 core" if count == 1 else f"{count} cores")
        axes.axhline(NIC_GBPS, **PAPER, label="the paper's NIC")
        axes.set_xticks([place + 0.2 for place in range(len(names))], names)
        title = f"{WORKERS} contributions, packet by packet"
        finish(axes, "", "Gbit/s of contributions", title)

    findings = []
    for name in DTYPES.values():
        one, all_of_them = (found[_key(name, count)] for count in (1, cores))
        findings += [
            Finding(
                "Fig. 9(b)",
                f"{name}: what all {cores} cores of this machine sum (the paper's have 32)",
                "more than 200 Gbit/s, and so more than the NIC's 100",
                Spread.of(all_of_them),
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
    by_memcpy = {
        name: Spread.of(
            [a / b for a, b in zip(found[_key(name, 1)], found["memcpy"], strict=True)]
        ).median
        for name in DTYPES.values()
    }
    return Outcome(findings, draw, {"gbps": found, "one core by memcpy": by_memcpy})


def _key(name: str, cores: int) -> str:
    return name if name == "memcpy" else f"{name}, {cores}"


def _gbps(size: int, repeat: int, threads: int, work: Callable[[int], None]) -> float:
    """Return how fast so many bytes are done by so many threads at once, the best of some tries."""
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeat):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - began)
    return 8e-9 * size / min(times)


EXPERIMENT = Experiment(
    "summation", "Sums of a service on this machine (Figure 9b)", run, measures=True
)
