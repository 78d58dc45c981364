"""§VII-C, Exp 5, Figure 12: accuracy over time, of digits that 16 workers learn.

The gradients that an epoch counts are those of the models that their workers had: a late one's is
of an older model. When epochs end is played (`epochs.py`), and everything else is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from fanin.reproduce import training
from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, at_least
from fanin.reproduce.goat.epochs import Epoch, Scheme, Timing, played
from fanin.reproduce.goat.throughput import GOAT
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 16
TIMINGS = [Timing(0.1, 0.0), Timing(1.0, 0.0), Timing(0.1, 0.5), Timing(1.0, 0.5)]
K_SGD = [Scheme("k-sgd", part) for part in (0.5, 0.9)]
ASYNC = [Scheme("goat-async", noise) for noise in (0.1, 0.3, 0.7)]
OVER = "batches of 0.1 or 1 s, workers late around 0 or 0.5 s, variances of 0.1, 0.3 or 0.7"
AIM = 90
"""Right answers of a hundred."""
BELOW = -5.0
"""Figure 12: the accuracy of GOAT-Async is some 5 % below GOAT's after as many epochs."""


@dataclass(frozen=True)
class Curve:
    """Accuracy over time."""

    ends_s: Sequence[float]
    right: Sequence[float]
    """After each epoch, of a hundred answers."""

    def at(self, time_s: float) -> float:
        """Return the accuracy of the last epoch that has ended by then."""
        ended = [right for end, right in zip(self.ends_s, self.right, strict=True) if end <= time_s]
        return ended[-1] if ended else 0.0

    def reaches(self, right: float) -> float:
        """Return when the first epoch with this accuracy ended; NaN if none had it."""
        times = zip(self.ends_s, self.right, strict=True)
        return next((end for end, each in times if each >= right), float("nan"))


Found = Mapping[tuple[Scheme, Timing, int], Curve]
Figures = Callable[[Found, Scheme, Timing, int], float]


def run(lab: Lab) -> Outcome:
    """Train with every scheme, and with all that is swept."""
    task = training.tasks()["digits"]
    timings = TIMINGS[:1] if lab.quick else TIMINGS
    schemes = [GOAT, *K_SGD[:1], *ASYNC[:1]] if lab.quick else [GOAT, *K_SGD, *ASYNC]
    asked = list(product(schemes, timings, lab.seeds))

    def learn(one: tuple[Scheme, Timing, int]) -> Curve:
        scheme, timing, seed = one
        epochs = played(scheme, WORKERS, timing, seed)
        return Curve([epoch.ends_s for epoch in epochs], learned(task, seed, epochs))

    found = dict(zip(asked, lab.each("training", learn, asked), strict=True))
    late = [scheme for scheme in schemes if scheme in ASYNC]

    def over(figure: Figures, schemes: Sequence[Scheme]) -> Spread:
        return Spread.over(
            [
                Spread.of([figure(found, scheme, timing, seed) for seed in lab.seeds])
                for scheme in schemes
                for timing in timings
            ]
        )

    findings = [
        Finding(
            "Fig. 12",
            "16 workers: accuracy after 200 epochs, GOAT-Async's less GOAT's",
            "some 5 % less, and no more",
            over(_after_all, late),
            holds=at_least(BELOW),
            unit="%",
            swept=OVER,
        ),
        Finding(
            "Fig. 12(a)",
            "16 workers: accuracy when GOAT-Async's 200 epochs are over, less GOAT's then",
            "greater (5.78 %)",
            over(_meanwhile, late),
            holds=at_least(0),
            unit="%",
            swept=OVER,
        ),
        Finding(
            "Fig. 12",
            f"16 workers: time to {AIM} % right answers, GOAT's by GOAT-Async's",
            "faster",
            over(_earlier, late),
            holds=MORE,
            unit="x",
            swept=OVER,
        ),
    ]

    def draw(figure: Figure) -> None:
        names = ("GOAT", "K-SGD, half of the workers", "GOAT-Async, variance of 0.1")
        shown = (GOAT, K_SGD[0], ASYNC[0])
        for axes, timing in zip(
            figure.subplots(1, min(2, len(timings)), squeeze=False)[0],
            (timings[0], timings[-1]),
            strict=False,
        ):
            for at, (name, scheme) in enumerate(zip(names, shown, strict=True)):
                for number, seed in enumerate(lab.seeds):
                    curve = found[scheme, timing, seed]
                    label = None if number else name
                    axes.plot(curve.ends_s, curve.right, f"C{at}", alpha=0.7, label=label)
            axes.set_ylim(50)
            title = f"batches of {timing.compute_s:g} s, late around {timing.around:g} s"
            finish(axes, "seconds", "right answers on what was held back, %", title)

    series = {
        f"{scheme}": {
            f"{timing}": {
                str(seed): [found[scheme, timing, seed].ends_s, found[scheme, timing, seed].right]
                for seed in lab.seeds
            }
            for timing in timings
        }
        for scheme in schemes
    }
    return Outcome(findings, draw, series)


def _after_all(found: Found, scheme: Scheme, timing: Timing, seed: int) -> float:
    return found[scheme, timing, seed].right[-1] - found[GOAT, timing, seed].right[-1]


def _meanwhile(found: Found, scheme: Scheme, timing: Timing, seed: int) -> float:
    curve = found[scheme, timing, seed]
    return curve.right[-1] - found[GOAT, timing, seed].at(curve.ends_s[-1])


def _earlier(found: Found, scheme: Scheme, timing: Timing, seed: int) -> float:
    return found[GOAT, timing, seed].reaches(AIM) / found[scheme, timing, seed].reaches(AIM)


def learned(task: training.Task, seed: int, epochs: Sequence[Epoch]) -> list[float]:
    """Learn as the epochs say; return of a hundred answers those that are right after each.

    A worker's batch is drawn when it gets a model, and is discarded with its gradient.
    """
    import torch

    learner, dice = training.begun(task, seed)
    steps = training.Steps(learner)
    batches: Iterator[torch.Tensor] = iter(())

    def batch() -> torch.Tensor:
        nonlocal batches
        drawn = next(batches, None)
        if drawn is None:
            order = torch.randperm(learner.samples, generator=dice)
            parts = torch.split(order, task.batch)
            batches = iter(part for part in parts if len(part) == task.batch)
            drawn = next(batches)
        return drawn

    # By the epoch whose model it is of: who computes what will count.
    computing: dict[int, list[int]] = {}
    for epoch in epochs:
        for worker, model in epoch.counted:
            computing.setdefault(model, []).append(worker)
    waiting: dict[tuple[int, int], torch.Tensor] = {}
    right = []
    for number, epoch in enumerate(epochs):
        if begins := computing.get(number):
            rows = steps.gradients(torch.stack([batch() for _ in begins]))
            waiting |= {(worker, number): row for worker, row in zip(begins, rows, strict=True)}
        counted = torch.stack([waiting.pop(each) for each in epoch.counted])
        steps.step(counted.mean(dim=0))
        right.append(100 * steps.right())
    return right


EXPERIMENT = Experiment("accuracy", "Accuracy over time (Figure 12)", run)
