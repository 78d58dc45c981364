"""§VII-B, Exp 3, Figure 10: what reaches the server of the testbed, with late workers.

Three switches of 20 MB, and half of the workers behind each of two. By how much workers are late is
told in the time that a gradient takes on its link: only the order decides.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fanin import _fanin

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, by_lower
from fanin_lab.papers.goat.drawn import COLOURS, SCHEMES, arrivals, of_drawings
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Line, Mark, Panel, Picture, outcome

MB = 1e6
SIZES = {"ResNet-18": 44_000_000, "ResNet-50": 98_000_000}
SWITCHES = ("s1", "s2", "s3")
MEMORY = 20_000_000
REGISTERS = 16_384 * 256
"""Bytes in the registers that §VI says there are, each of a fragment of 64 elements."""
FRAGMENT = 64_000
"""Coarser than the paper's 256 bytes: what counts is by how many bytes workers are apart."""
SUB_MODEL = 2_000_000
RATE_BPS = 100e9
WORKERS = [4, 8, 12, 16]
LATENESS = [0.03, 0.1, 0.3, 1.0, 10.0]
"""Standard deviations of when workers begin."""
SERVER_MB = {"goat": 44.0, "esa": 167.2, "atp": 198.0, "geryon": 704.0}
"""ResNet-18, 16 workers."""
ARITHMETIC = {"goat": "all of the model fits into the switches", "geryon": "16 times 44 MB"}
"""Why the server can get nothing else."""
LOWER = {"esa": 73.6, "atp": 77.8, "geryon": 93.8}
OVER = "how late workers are, 20 MB or 16,384 registers, ESA's priorities rising or falling"


@dataclass(frozen=True)
class Setting:
    """What decides what reaches the server."""

    model: str
    workers: int
    lateness: float
    memory: int = MEMORY
    rising: bool = True
    """Whether what is sent late is more important to ESA."""


def settings(model: str, workers: int) -> list[Setting]:
    """Return one for each value of what the paper does not give."""
    return [
        Setting(model, workers, lateness, memory, rising)
        for lateness in LATENESS
        for memory, rising in ((MEMORY, True), (MEMORY, False), (REGISTERS, True))
    ]


Counted = Mapping[str, int]
"""Bytes at the server, by scheme."""


def counts(lab: Lab, asked: Sequence[Setting]) -> dict[Setting, list[Counted]]:
    """Count in every setting with all drawings of all seeds."""
    return of_drawings(lab, _counted, asked)


@functools.cache
def _counted(run: tuple[Setting, int]) -> Counted:
    setting, drawing = run
    dice, size = random.Random(drawing), SIZES[setting.model]
    step_s = 8 * size / RATE_BPS
    begins_s = [dice.gauss(0, setting.lateness) * step_s for _ in range(setting.workers)]
    fragments = -(-size // FRAGMENT)
    order = arrivals([RATE_BPS] * setting.workers, begins_s, fragments, FRAGMENT)
    rising = list(range(fragments))
    important = rising if setting.rising else rising[::-1]
    shared = _workload(setting.model, setting.workers, setting.memory)
    return {
        "goat": _planned(setting.model, setting.workers, "krgs", drawing),
        "geryon": _planned(setting.model, setting.workers, "at-server", 0),
        "atp": shared.shared_memory(order, FRAGMENT, None, "tree", 0)["server_bytes"],
        "esa": shared.shared_memory(order, FRAGMENT, important, "tree", 0)["server_bytes"],
    }


@functools.cache
def _planned(model: str, workers: int, planner: str, drawing: int) -> int:
    return _workload(model, workers, MEMORY).plan(planner, drawing)["server_bytes"]


def _workload(model: str, workers: int, memory: int) -> _fanin.Workload:
    switches = dict.fromkeys(SWITCHES, memory)
    names = [f"w{worker}" for worker in range(1, workers + 1)]
    return _fanin.Workload("triangle", switches, names, "ps", SIZES[model], SUB_MODEL, RATE_BPS)


def run(lab: Lab) -> Outcome:
    """Plan for each number of workers, and let some be late."""
    most = WORKERS[-1]
    asked = [s for model in SIZES for workers in WORKERS for s in settings(model, workers)]
    found = counts(lab, asked)

    def at_most(scheme: str, by: str = "") -> Spread:
        return Spread.of_each(
            [each[scheme] / (each[by] if by else MB) for each in found[setting]]
            for setting in settings("ResNet-18", most)
        )

    findings = [
        Finding(
            "Fig. 10",
            f"ResNet-18, 16 workers: {SCHEMES[scheme]}'s bytes at the server",
            SERVER_MB[scheme],
            at_most(scheme),
            unit="MB",
            swept=OVER,
            cannot_fail=ARITHMETIC.get(scheme, ""),
        )
        for scheme in SCHEMES
    ]
    findings += [
        Finding(
            "Fig. 10",
            f"ResNet-18, 16 workers: {SCHEMES[scheme]}'s by GOAT's ({percent} % lower)",
            by_lower(percent),
            at_most(scheme, "goat"),
            unit="x",
            swept=OVER,
            cannot_fail=ARITHMETIC.get(scheme, ""),
        )
        for scheme, percent in LOWER.items()
    ]
    findings += [
        Finding(
            "Fig. 10",
            f"{model}: bytes at the server of the best of the others by GOAT's, for the number of "
            "workers where that is least",
            "GOAT has the least",
            Spread.of_each(
                [min(each[scheme] for scheme in LOWER) / each["goat"] for each in found[setting]]
                for workers in WORKERS
                for setting in settings(model, workers)
            ),
            holds=MORE,
            unit="x",
            swept=f"4 to 16 workers, {OVER}",
        )
        for model in SIZES
    ]

    def bars(model: str, at: int, scheme: str) -> Bars:
        # A whisker is from the least to the most of the settings' medians.
        spreads = [
            Spread.of([median_mb(found[each], scheme) for each in settings(model, workers)])
            for workers in WORKERS
        ]
        places = [workers + 0.6 * (at - 1.5) for workers in WORKERS]
        return Bars(places, spreads, SCHEMES[scheme], 0.6, {"color": COLOURS[scheme]})

    def panel(model: str) -> Panel:
        marks: list[Mark] = [bars(model, at, scheme) for at, scheme in enumerate(SCHEMES)]
        if model == "ResNet-18":
            places = [most + 0.6 * (at - 1.5) for at in range(4)]
            look = {"markersize": 9, "markeredgewidth": 2}
            marks.append(Line(places, list(SERVER_MB.values()), "kx", "paper", look))
        y = "at the server (MB); whiskers: least to most"
        return Panel(marks, "workers", y, model, ticks=WORKERS, least_y=0)

    return outcome(findings, Picture([panel(model) for model in SIZES]))


def median_mb(counted: Sequence[Counted], scheme: str) -> float:
    """Return the median of a scheme's MB at the server."""
    return Spread.of([each[scheme] / MB for each in counted]).median


EXPERIMENT = Experiment("testbed", "Bytes at the testbed's server (Figure 10)", run)
