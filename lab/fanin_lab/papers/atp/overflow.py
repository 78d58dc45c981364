"""§5.3.1 and §B.2, Table 1: what overflows, and what a proactive mechanism keeps from switches.

Gradients of trainings, in packets of 64 elements, through ATP's machines: once with the reactive
mechanism, whose sums the training goes on with, and once with the proactive one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin_lab.papers import training
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Reason, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Line, Panel, Picture, outcome

TABLE_1 = {8: 37_002, 16: 231_528, 32: 1_156_126, 64: 14_602_998}
LEAST = min(TABLE_1[2 * workers] / TABLE_1[workers] for workers in (8, 16, 32))
"""What a doubling of the workers multiplies the paper's false positives by, at least."""
ELEMENTS = 64
"""Of a packet; the paper's have 62."""
PACKETS = -(-25_557_032 // 62) * 1_281_167 / 32
"""Of the paper's epoch of ResNet50, from all workers, if each has 32 images an iteration, which the
paper does not say. For any number of workers, since they share the images. Only drawn."""
BATCH = 2
"""Samples of a worker: an epoch of 64 workers has a few iterations."""
WORKERS = {"digits": list(TABLE_1), "GPT": [32, 64]}
"""With fewer workers than that the GPT has no false positives."""
EPOCHS = {"digits": 2, "GPT": 4}
TINY = 1e-8
"""What the factor makes less than one."""
_COUNTING = threading.Lock()


@dataclass
class Iteration:
    """What one had, of all workers together."""

    packets: int
    false_positives: int
    """Packets that no switch was to add, though their sum does not overflow."""
    overflows: int
    """Sums of packets."""
    tiny: int
    """Values below 10^-8, but zero."""
    values: int
    at_server: int
    """Packets that it added."""
    at_server_proactively: int


Found = Mapping[str, Mapping[int, list[list[Iteration]]]]
"""By task and by workers: for each seed, the iterations."""


def run(lab: Lab) -> Outcome:
    """Train with each number of workers, and count."""
    found = _counted(lab)

    def line(at: int, task: str) -> Line:
        medians = {
            workers: Spread.of([100 * _share(of_seed) for of_seed in of_seeds]).median
            for workers, of_seeds in found[task].items()
        }
        seen = {workers: median for workers, median in medians.items() if median > 0}
        return Line(list(seen), list(seen.values()), f"C{at}o-", f"ours: {task}")

    shares = [100 * count / PACKETS for count in TABLE_1.values()]
    label = "paper: ResNet50 (Table 1), if of 32 images"
    panel = Panel(
        [
            Line(list(TABLE_1), shares, "ks--", label),
            *(line(at, task) for at, task in enumerate(found)),
        ],
        "workers",
        "false positives, % of an epoch's packets",
        log_x=2,
        log_y=10,
        ticks={workers: str(workers) for workers in TABLE_1},
    )
    findings = [finding for task, by_workers in found.items() for finding in _of(task, by_workers)]
    return outcome(findings, Picture([panel]))


def why(lab: Lab) -> Sequence[Reason]:
    """Leave the beginning out, and half of the workers.

    The paper's mean is over all epochs of a long training; at first the workers' gradients are
    alike, and what is large with all of them does overflow. Its overflows are of 8 workers.
    """
    found = _counted(lab)
    half = "the second half of the iterations alone"
    return [
        *(Reason(LATE.format(of), "32 workers", _overflows_late(found[of][32])) for of in found),
        *(Reason(GROWS.format(of), half, _grows(found[of], late=True)) for of in found),
    ]


LATE = "{}, 64 workers: overflows in the second half of the iterations"
GROWS = "{}: false positives of an epoch with 64 workers by those with 32"


def _of(task: str, found: Mapping[int, list[list[Iteration]]]) -> list[Finding]:
    grows, many = _grows(found), found[64]
    server = Spread.of(
        [
            sum(each.at_server_proactively for each in of_seed)
            / sum(each.at_server for each in of_seed)
            for of_seed in many
        ]
    )
    late = _overflows_late(many)
    tiny = Spread.of(
        [
            100 * sum(each.tiny for each in of_seed) / sum(each.values for each in of_seed)
            for of_seeds in found.values()
            for of_seed in of_seeds
        ]
    )
    return [
        Finding(
            "Table 1",
            GROWS.format(task),
            f"{LEAST:.2g} at least, as each doubling there",
            grows,
            holds=at_least(LEAST),
            unit="x",
        ),
        Finding(
            "§B.2",
            f"{task}, 64 workers: packets that the server adds, proactive by reactive",
            "more",
            server,
            holds=MORE,
            unit="x",
        ),
        Finding(
            "§5.3.1", LATE.format(task), "none: only the first few have any", late, holds=at_most(0)
        ),
        Finding(
            "§5.3.1",
            f"{task}: gradient values below 10^-8, but zero",
            0.00002,
            tiny,
            unit="%",
            cannot_fail="the paper's is of ResNet50",
        ),
    ]


def _late(iterations: list[Iteration]) -> list[Iteration]:
    return iterations[len(iterations) // 2 :]


def _overflows_late(of_seeds: list[list[Iteration]]) -> Spread:
    return Spread.of([sum(each.overflows for each in _late(of_seed)) for of_seed in of_seeds])


def _share(iterations: list[Iteration]) -> float:
    """Return the false positives among all packets."""
    false_positives = sum(each.false_positives for each in iterations)
    return false_positives / sum(each.packets for each in iterations)


def _grows(found: Mapping[int, list[list[Iteration]]], *, late: bool = False) -> Spread:
    """Return the false positives with 64 workers by those with 32, whose packets are as many."""
    part = _late if late else list[Iteration]
    least = 1 / sum(each.packets for each in found[32][0])
    pairs = zip(found[64], found[32], strict=True)
    return Spread.of([_share(part(a)) / max(_share(part(b)), least) for a, b in pairs])


def _counted(lab: Lab) -> Found:
    """Return what was counted; each training is run once, for the findings and the reasons."""
    tasks = list(training.tasks())

    def one(case: tuple[str, int, int]) -> list[Iteration]:
        task, workers, seed = case
        with _COUNTING:
            return _count(task, 1 if lab.quick else EPOCHS[task], workers, seed)

    seeds = lab.seeds
    cases = [(task, count, seed) for task in tasks for count in WORKERS[task] for seed in seeds]
    counted = iter(lab.each("training", one, cases))
    return {
        task: {count: [next(counted) for _ in seeds] for count in WORKERS[task]} for task in tasks
    }


@functools.cache
def _count(task: str, epochs: int, workers: int, seed: int) -> list[Iteration]:
    import numpy as np

    keys: dict[str, Any] = {"elements": ELEMENTS, "hashing": "linear", "window": 128}
    reactive = training.Job("atp", workers, seed, **keys)
    proactive = training.Job("atp", workers, seed, **keys, overflow="proactive")
    found = []

    def summed(gradients: training.Array) -> training.Array:
        sums, of_reactive = reactive.sum(gradients)
        _, of_proactive = proactive.sum(gradients)
        large, overflows = classes(gradients)
        # No report says which packets these are, but how many.
        assert of_proactive["proactive"] == large.sum()
        sizes = np.abs(gradients)
        iteration = Iteration(
            packets=large.size,
            false_positives=int(large[:, ~overflows].sum()),
            overflows=of_reactive["overflows"],
            tiny=int(np.count_nonzero((sizes < TINY) & (sizes > 0))),
            values=gradients.size,
            at_server=of_reactive["server_aggregations"],
            at_server_proactively=of_proactive["server_aggregations"],
        )
        found.append(iteration)
        return sums

    training.train(training.tasks()[task], seed, workers, epochs, summed, batch=BATCH)
    return found


def classes(gradients: training.Array) -> tuple[training.Array, training.Array]:
    """Return which packets of each worker are beyond B, and of which the sum overflows (§B.2)."""
    import numpy as np

    workers, elements = gradients.shape
    padded = np.pad(gradients, ((0, 0), (0, -elements % ELEMENTS))).astype(np.float64)
    integers = np.rint(padded * 1e8).astype(np.int64).reshape(workers, -1, ELEMENTS)
    large = np.abs(integers).max(axis=2) > 2**31 // workers - 1
    return large, np.abs(integers.sum(axis=0)).max(axis=1) >= 2**31 - 1


EXPERIMENT = Experiment(
    "overflow", "False positives of proactive overflow handling (Table 1)", run, why
)
