"""§VII-C, Exp 5, Figure 12: accuracy over time, of digits that 16 workers learn.

The gradients that an epoch counts are those of the models that their workers had: a late one's is
of an older model. When epochs end is played (`epochs.py`), and everything else is trained. SGD is
plain, as in the paper's Eq. 28, and once more with the momentum that digits have elsewhere here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fanin_lab.papers import training
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, at_least
from fanin_lab.papers.goat.epochs import Scheme, Timing, played
from fanin_lab.papers.goat.throughput import GOAT
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Panel, Picture, Seeds, outcome

WORKERS = 16
TIMINGS = [Timing(0.1, 0.0), Timing(1.0, 0.0), Timing(0.1, 0.5), Timing(1.0, 0.5)]
K_SGD = Scheme("k-sgd", 0.5)
ASYNC = [Scheme("goat-async", noise) for noise in (0.1, 0.2, 0.3)]
OVER = "batches of 0.1 or 1 s, workers late around 0 or 0.5 s, variances of 0.1 to 0.3"
SEEDS = 4
RATE = 0.1
MOMENTA = {0.0: "", 0.9: ", with a momentum of 0.9"}
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
        """Return when the first epoch with this accuracy ended; never, if none had it."""
        times = zip(self.ends_s, self.right, strict=True)
        return next((end for end, each in times if each >= right), math.inf)


Figures = Callable[[Curve, Curve], float]
"""Of GOAT-Async's curve and GOAT's."""


def run(lab: Lab) -> Outcome:
    """Train with every scheme, and with all that is swept."""
    seeds = lab.seeds[:SEEDS]
    timings = TIMINGS[:1] if lab.quick else TIMINGS
    momenta = list(MOMENTA)[:1] if lab.quick else list(MOMENTA)
    late = ASYNC[:1] if lab.quick else ASYNC
    asked = [
        (Training(momentum, scheme, timing), seed)
        for momentum in momenta
        for timing in timings
        for scheme in [GOAT, K_SGD, *late]
        for seed in seeds
    ]

    def learn(one: tuple[Training, int]) -> Curve:
        training, seed = one
        epochs = played(training.scheme, WORKERS, training.timing, seed)
        # Who waits for all learns the same, whenever it is.
        counted = tuple(tuple(epoch.counted) for epoch in epochs)
        return Curve([epoch.ends_s for epoch in epochs], learned(seed, training.momentum, counted))

    found = dict(zip(asked, lab.each("training", learn, asked), strict=True))

    def over(figure: Figures, momentum: float) -> Spread:
        def of(scheme: Scheme, timing: Timing) -> Spread:
            pairs = [
                [found[Training(momentum, each, timing), seed] for each in (scheme, GOAT)]
                for seed in seeds
            ]
            return Spread.of([figure(*pair) for pair in pairs])

        return Spread.over([of(scheme, timing) for scheme in late for timing in timings])

    row = functools.partial(Finding, swept=OVER)
    findings = [
        finding
        for momentum in momenta
        for finding in (
            row(
                "Fig. 12",
                f"16 workers{MOMENTA[momentum]}: accuracy after 200 epochs, GOAT-Async's less "
                "GOAT's",
                "some 5 % less, and no more",
                over(_after_all, momentum),
                at_least(BELOW),
                "%",
            ),
            row(
                "Fig. 12(a)",
                f"16 workers{MOMENTA[momentum]}: accuracy when GOAT-Async's 200 epochs are over, "
                "less GOAT's then",
                "greater (5.78 %)",
                over(_meanwhile, momentum),
                at_least(0),
                "%",
            ),
            row(
                "Fig. 12",
                f"16 workers{MOMENTA[momentum]}: epochs' time to {AIM} % right answers, GOAT's by "
                "GOAT-Async's (0: not reached)",
                "faster",
                over(_earlier, momentum),
                MORE,
                "x",
            ),
        )
    ]

    shown = {
        "GOAT": GOAT,
        "K-SGD, half of the workers": K_SGD,
        **{f"GOAT-Async, variance of {each.part:g}": each for each in late[::2]},
    }

    def panel(timing: Timing) -> Panel:
        def curves(scheme: Scheme) -> list[tuple[Sequence[float], Sequence[float]]]:
            each = [found[Training(0.0, scheme, timing), seed] for seed in seeds]
            return [(curve.ends_s, curve.right) for curve in each]

        marks = [Seeds(curves(shown[name]), f"C{at}", name) for at, name in enumerate(shown)]
        title = f"batches of {timing.compute_s:g} s, late around {timing.around:g} s"
        return Panel(marks, "seconds", "right answers on what was held back, %", title, least_y=50)

    return outcome(findings, Picture([panel(timing) for timing in timings[:2]]))


@dataclass(frozen=True)
class Training:
    """How digits are learned."""

    momentum: float
    scheme: Scheme
    timing: Timing


def _after_all(late: Curve, goat: Curve) -> float:
    return late.right[-1] - goat.right[-1]


def _meanwhile(late: Curve, goat: Curve) -> float:
    return late.right[-1] - goat.at(late.ends_s[-1])


def _earlier(late: Curve, goat: Curve) -> float:
    # A time that never comes is infinite, and what is divided by it is nothing.
    return goat.reaches(AIM) / late.reaches(AIM)


@functools.cache
def learned(
    seed: int, momentum: float, epochs: Sequence[Sequence[tuple[int, int]]]
) -> Sequence[float]:
    """Learn as the epochs say; return of a hundred answers those that are right after each.

    An epoch is the gradients that it counts, each a worker and the epoch whose model it is of. A
    worker's batch is drawn when it gets a model; what is discarded later is not drawn.
    """
    import torch

    task = training.tasks()["digits"]
    learner, dice = training.begun(task, seed)
    parameters = learner.network.parameters()
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=momentum)
    steps = training.Steps(replace(learner, optimizer=optimizer))
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
    for counted in epochs:
        for worker, model in counted:
            computing.setdefault(model, []).append(worker)
    waiting: dict[tuple[int, int], torch.Tensor] = {}
    right = []
    for number, counted in enumerate(epochs):
        if begins := computing.get(number):
            rows = steps.gradients(torch.stack([batch() for _ in begins]))
            waiting |= {(worker, number): row for worker, row in zip(begins, rows, strict=True)}
        mean = torch.stack([waiting.pop(each) for each in counted]).mean(dim=0)
        steps.step(mean)
        right.append(100 * steps.right())
    return right


EXPERIMENT = Experiment("accuracy", "Accuracy over time (Figure 12)", run)
