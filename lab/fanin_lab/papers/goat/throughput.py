"""§VII-C, Exp 4, Figures 11 and 12: gradients a second, and how long 200 epochs take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Reason
from fanin_lab.papers.goat.epochs import Epoch, Scheme, Timing, played, throughput, unwaited
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Band, Line, Mark, Panel, Picture, outcome

WORKERS = [4, 8, 12, 16]
TIMINGS = [Timing(compute_s, around) for around in (0.0, 0.5) for compute_s in (0.1, 0.3, 1.0)]
BOUND = [Timing(None, around) for around in (0.0, 0.5)]
"""Where an epoch of GOAT's is as long as the paper's."""
GOAT = Scheme("goat")
PARTS = [0.5, 0.75, 0.9]
"""K-SGD's K."""
NOISES = [0.1, 0.2, 0.3, 0.5]
"""GOAT-Async's."""
K_SGD = [Scheme("k-sgd", part) for part in PARTS]
ASYNC = [Scheme("goat-async", noise) for noise in NOISES]
LATE = "workers late around 0 or 0.5 s"
OVER_BOUND = f"{LATE}, variances of 0.1 to 0.5"
OVER = f"batches of 0.1, 0.3 or 1 s, {OVER_BOUND}"
K = "K of 50, 75 or 90 % of the workers"
MOST = WORKERS[-1]
IMAGES_A_SECOND = (512, 668, 766)
"""GOAT's, K-SGD's and GOAT-Async's, of 16 workers (Figure 11(b))."""
Figures = Callable[[Sequence[Epoch]], float]


def run(lab: Lab) -> Outcome:
    """Play the epochs of all schemes."""
    throughput_row = partial(Finding, "Fig. 11(b)", unit="x")
    time_row = partial(Finding, "Fig. 12(a)", unit="x")
    bound_row = partial(Finding, "Figs. 11, 12", unit="x", swept=OVER_BOUND)
    batches = f"batches of 0.1, 0.3 or 1 s, {LATE}, {K}"
    findings = [
        throughput_row(
            OF_16.format("throughput, GOAT-Async's by GOAT's"),
            1.497,
            _by(lab, throughput, ASYNC, [GOAT], TIMINGS),
            swept=OVER,
        ),
        throughput_row(
            OF_16.format("throughput, GOAT-Async's by K-SGD's"),
            1.147,
            _by(lab, throughput, ASYNC, K_SGD, TIMINGS),
            swept=f"{OVER}, {K}",
        ),
        throughput_row(
            OF_16.format("throughput, K-SGD's by GOAT's"),
            round(IMAGES_A_SECOND[1] / IMAGES_A_SECOND[0], 2),
            _by(lab, throughput, K_SGD, [GOAT], TIMINGS),
            swept=batches,
        ),
        time_row(
            OF_16.format("time of 200 epochs, GOAT's by GOAT-Async's"),
            2.02,
            _by(lab, _seconds, [GOAT], ASYNC, TIMINGS),
            swept=OVER,
        ),
        time_row(
            OF_16.format("time of 200 epochs, K-SGD's by GOAT-Async's"),
            round(324 / 207.7, 2),
            _by(lab, _seconds, K_SGD, ASYNC, TIMINGS),
            swept=f"{OVER}, {K}",
        ),
        time_row(
            OF_16.format("time of 200 epochs, GOAT's by K-SGD's"),
            round(420.4 / 324, 2),
            _by(lab, _seconds, [GOAT], K_SGD, TIMINGS),
            swept=batches,
            cannot_fail="what K-SGD discards counts, so it is the throughput's ratio",
        ),
        bound_row(
            OF_16.format(BOUND_THROUGHPUT), 1.497, _by(lab, throughput, ASYNC, [GOAT], BOUND)
        ),
        bound_row(OF_16.format(BOUND_TIME), 2.02, _by(lab, _seconds, [GOAT], ASYNC, BOUND)),
    ]
    findings.append(
        Finding(
            "Fig. 11",
            "throughput, GOAT-Async's by the better of the others', for the number of workers "
            "where that is least",
            "GOAT-Async has the most",
            Spread.of_each(
                [_ahead(noise, part, timing, seed) for seed in lab.seeds]
                for noise in ASYNC
                for part in K_SGD
                for timing in TIMINGS
            ),
            holds=MORE,
            unit="x",
            swept=f"{OVER}, {K}",
        )
    )

    def lines(timing: Timing, scheme: Scheme) -> list[float]:
        # 64 images are a batch.
        return [
            64 * Spread.of([throughput(played(scheme, n, timing, s)) for s in lab.seeds]).median
            for n in WORKERS
        ]

    def marks(timing: Timing, at: int, name: str, schemes: Sequence[Scheme]) -> Mark:
        of_schemes = [lines(timing, scheme) for scheme in schemes]
        low, high = (
            [end(of_workers) for of_workers in zip(*of_schemes, strict=True)] for end in (min, max)
        )
        if low == high:
            return Line(WORKERS, low, f"C{at}o-", name)
        return Band(WORKERS, low, high, {"color": f"C{at}", "alpha": 0.35}, name)

    def panel(timing: Timing) -> Panel:
        shown = [marks(timing, at, *named) for at, named in enumerate(NAMED.items())]
        if timing.compute_s is None:
            shown += [
                Line([MOST], [paper], "x", look={"color": f"C{at}", "markersize": 11})
                for at, paper in enumerate(IMAGES_A_SECOND)
            ]
            shown.append(Line([], [], "kx", "paper"))
        title = "a batch takes 0.1 s" if timing.compute_s else "an epoch of GOAT's takes 2.1 s"
        return Panel(shown, "workers", "images a second", title, ticks=WORKERS, least_y=0)

    return outcome(findings, Picture([panel(timing) for timing in (Timing(0.1, 0.0), BOUND[0])]))


def why(lab: Lab) -> Sequence[Reason]:
    """Let nobody wait at all, and let workers be as late as on the testbed elsewhere."""
    later = [replace(timing, most_s=1.83) for timing in BOUND]
    most = Spread.over([Spread.of([unwaited(timing)]) for timing in BOUND])
    return [
        Reason(OF_16.format(BOUND_THROUGHPUT), UNWAITED, most),
        *(
            Reason(OF_16.format(what), CHANGE, spread, CONTRADICTS)
            for what, spread in (
                (BOUND_THROUGHPUT, _by(lab, throughput, ASYNC, [GOAT], later)),
                (BOUND_TIME, _by(lab, _seconds, [GOAT], ASYNC, later)),
            )
        ),
    ]


OF_16 = "16 workers: {}"
BOUND_THROUGHPUT = (
    "throughput, GOAT-Async's by GOAT's, where an epoch of GOAT's takes the paper's 2.1 s"
)
BOUND_TIME = (
    "time of 200 epochs, GOAT's by GOAT-Async's, where an epoch of GOAT's takes the paper's 2.1 s"
)
UNWAITED = "no worker ever waits for another, which is the most that any choice can have"
CHANGE = "workers late by up to 1.83 s, the asynchronicity of Exp 3"
CONTRADICTS = '§VII-C: "ratio in [0, 1] seconds"'
NAMED: dict[str, Sequence[Scheme]] = {
    "GOAT": [GOAT],
    "K-SGD, K of 50 to 90 %": K_SGD,
    "GOAT-Async, variance of 0.1 to 0.5": ASYNC,
}


def _by(
    lab: Lab,
    figure: Figures,
    ones: Sequence[Scheme],
    others: Sequence[Scheme],
    timings: Sequence[Timing],
) -> Spread:
    """Return the ratios of a figure of 16 workers, of each pair of schemes."""

    def ratio(one: Scheme, other: Scheme, timing: Timing, seed: int) -> float:
        return figure(played(one, MOST, timing, seed)) / figure(played(other, MOST, timing, seed))

    return Spread.of_each(
        [ratio(one, other, timing, seed) for seed in lab.seeds]
        for one in ones
        for other in others
        for timing in timings
    )


def _seconds(epochs: Sequence[Epoch]) -> float:
    return epochs[-1].ends_s


def _ahead(scheme: Scheme, k_sgd: Scheme, timing: Timing, seed: int) -> float:
    return min(
        throughput(played(scheme, workers, timing, seed))
        / max(throughput(played(other, workers, timing, seed)) for other in (GOAT, k_sgd))
        for workers in WORKERS
    )


EXPERIMENT = Experiment(
    "throughput", "Training that does not wait for the last (Figures 11 and 12)", run, why
)
