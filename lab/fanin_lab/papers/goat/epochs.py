"""§V and §VII-C: whom epochs wait for, and when they end, event by event; nobody sleeps.

An epoch is what the paper calls one: every worker that got the model computes a gradient of one
batch, is late by up to a second, and sends. No bytes are sent here: a gradient takes milliseconds
on the testbed's links.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fanin import _fanin

from fanin_lab.papers.goat.drawn import ratio

DEVIATION = 0.2
EPOCHS = 200
GOAT_S = 420.4 / EPOCHS
"""How long an epoch takes that waits for all of 16 workers (Figure 12(a))."""
BOUNDED_WORKERS = 16
"""Of whom that is known."""


@dataclass(frozen=True)
class Timing:
    """How long workers take; the paper gives neither field."""

    compute_s: float | None
    """For a batch; None where epochs that wait for 16 workers take the paper's 2.1 s."""
    around: float
    """What the ratios by which a worker is late, from 0 to 1, are normally distributed around."""
    most_s: float = 1.0
    """How late a worker is at most, of which that is a ratio; 1 s in the paper."""

    def late_s(self, dice: random.Random) -> float:
        """Draw by how much a worker is late."""
        return self.most_s * ratio(dice, self.around, DEVIATION)


@dataclass(frozen=True)
class Scheme:
    """Whom an epoch waits for."""

    kind: Literal["goat", "k-sgd", "goat-async"]
    part: float = 1.0
    """K-SGD: K by all workers. GOAT-Async: the variance of a worker's gradient by the mean square
    that is to be reached (Eq. 36), and that by all workers."""


@dataclass(frozen=True)
class Epoch:
    """One that ended."""

    ends_s: float
    counted: Sequence[tuple[int, int]]
    """Whose gradients are in it, each with the epoch whose model it is of."""
    processed: int
    """Gradients that were computed for it, K-SGD's discarded ones among them."""


@functools.cache
def played(scheme: Scheme, workers: int, timing: Timing, seed: int) -> Sequence[Epoch]:
    """Return the epochs of one training. Its workers are as late as in other schemes."""
    compute_s = computing(timing) if timing.compute_s is None else timing.compute_s
    dice = [random.Random(f"{seed} {worker}") for worker in range(workers)]

    def takes_s(worker: int) -> float:
        return compute_s + timing.late_s(dice[worker])

    epochs = list[Epoch]()
    began = [(0.0, 0)] * workers
    intervals_s = [takes_s(worker) for worker in range(workers)]
    # By worker, of its last gradient that came.
    history_s: dict[int, float] = {}
    for number in range(EPOCHS):
        arrivals_s = [begin + took for (begin, _), took in zip(began, intervals_s, strict=True)]
        in_order = sorted(range(workers), key=arrivals_s.__getitem__)
        comes = in_order[: _waited_for(scheme, workers, history_s)]
        now_s = arrivals_s[comes[-1]]
        discards = scheme.kind == "k-sgd"
        counted = [(worker, began[worker][1]) for worker in comes]
        epochs.append(Epoch(now_s, counted, workers if discards else len(counted)))
        history_s |= {worker: intervals_s[worker] for worker in comes}
        # K-SGD's stragglers begin anew with all others; GOAT-Async's go on.
        for worker in range(workers) if discards else comes:
            began[worker] = now_s, number + 1
            intervals_s[worker] = takes_s(worker)
    return epochs


def _waited_for(scheme: Scheme, workers: int, history_s: Mapping[int, float]) -> int:
    if scheme.kind == "k-sgd":
        return max(1, round(scheme.part * workers))
    if scheme.kind == "goat" or len(history_s) < workers:
        return workers
    last_s = [history_s[worker] for worker in range(workers)]
    return len(_fanin.participation(last_s, workers, 1.0, scheme.part * workers, 1.0))


@functools.cache
def computing(timing: Timing) -> float:
    """Return the seconds of a batch with which an epoch takes as long as the paper's."""
    dice = random.Random(0)
    latest = [max(timing.late_s(dice) for _ in range(BOUNDED_WORKERS)) for _ in range(1000)]
    return GOAT_S - sum(latest) / len(latest)


def throughput(epochs: Sequence[Epoch]) -> float:
    """Return gradients that are computed, per second, whether an epoch counts them or not.

    The paper measures "processed samples". Its K-SGD processes 668 images a second, and 200 epochs
    take 324 s: 1,082 images an epoch. That is as many as GOAT's 1,076, and GOAT discards none.
    """
    return sum(epoch.processed for epoch in epochs) / epochs[-1].ends_s


def unwaited(timing: Timing) -> float:
    """Return the gradients a second of 16 workers of whom none ever waits, by GOAT's.

    No choice of whom an epoch waits for has more.
    """
    compute_s, dice = computing(timing), random.Random(0)
    late_s = [timing.late_s(dice) for _ in range(10_000)]
    return GOAT_S / (compute_s + sum(late_s) / len(late_s))
