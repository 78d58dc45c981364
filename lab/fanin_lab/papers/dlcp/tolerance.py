"""§2.3, Figure 4, Tables 1 and 2: up to which loss a training takes no more epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from fanin_lab.papers import training
from fanin_lab.papers.dlcp.trained import (
    SAME,
    SWEPT,
    WORKERS,
    Curves,
    Setting,
    curves,
    epochs_more,
    in_percent,
    picture_of_costs,
)
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import outcome
from fanin_lab.profiler.drops import Losses
from fanin_lab.profiler.tolerance import bound, epochs_to

PROBABILITIES = (0.01, 0.1, 0.3, 0.5, 0.8)
OF_OTHER_DATA = (0.3, 0.5)
LEAST, MOST = 0.6, 3.5
"""Bounds of twelve models, in per cent: LSTM's and ResNet101's (Table 1)."""
ALIKE = Range(1 / 1.1, 1.1)
"""Bounds of two data sets differ by a fifth of one at most (GRU's 1.2 % and 1.4 %, Table 2)."""


def run(lab: Lab) -> Outcome:
    """Train with rising losses: 8 workers and 1, and 8 on other data."""
    tasks = training.tasks()
    kinds = [Setting(task, workers=workers) for task in tasks for workers in WORKERS]
    settings = [
        *(_with(kind, probability) for kind in kinds for probability in PROBABILITIES),
        *(_with(Setting(task, data="other"), p) for task in tasks for p in OF_OTHER_DATA),
    ]
    found = curves(lab, settings, only_to_aim=True)
    costs = {kind: {p: epochs_more(found, _with(kind, p)) for p in PROBABILITIES} for kind in kinds}

    lines = {
        task: {f"{w} worker{'s'[: w - 1]}": costs[Setting(task, workers=w)] for w in WORKERS}
        for task in tasks
    }
    findings = [finding for task in tasks for finding in _findings(task, costs, found)]
    return outcome(findings, picture_of_costs(lines, linear_to={"y": 10}))


def _findings(
    task: str, costs: Mapping[Setting, Mapping[float, Spread]], found: Curves
) -> list[Finding]:
    of_workers = [costs[Setting(task, workers=workers)] for workers in WORKERS]
    bounds = Spread.over([_bound(of_one) for of_one in of_workers])

    def at(probability: float) -> Spread:
        return in_percent(Spread.over([of_one[probability] for of_one in of_workers]))

    fig_4, table_1 = (partial(Finding, of, unit="%", swept=SWEPT) for of in ("Fig. 4", "Table 1"))
    more = f"beyond 1 % gradually more: above {SAME:g} %"
    return [
        fig_4(
            f"{task}: epochs more with 1 % of the packets lost",
            f"the same epochs: at most {SAME:g} % more",
            at(0.01),
            at_most(SAME),
        ),
        fig_4(f"{task}: epochs more with 10 % lost", more, at(0.1), at_least(SAME)),
        fig_4(f"{task}: epochs more with 50 % lost", more, at(0.5), at_least(SAME)),
        table_1(
            f"{task}: the largest loss without more epochs (from what was shown to cost none, to "
            "what costs some)",
            f"at least {LEAST:g} %: the least of twelve models",
            bounds,
            at_least(LEAST),
        ),
        table_1(
            f"{task}: the same, and where the twelve models are",
            f"{LEAST:g} % to {MOST:g} %",
            bounds,
            Range(LEAST, MOST),
        ),
        *(
            Finding(
                "Table 2",
                f"{task}: epochs with {100 * p:g} % lost, as a multiple of those without, on "
                "other data over its own",
                "the bounds remain similar: within a tenth",
                _on_other_data(task, p, found),
                ALIKE,
            )
            for p in OF_OTHER_DATA
        ),
    ]


def _with(setting: Setting, probability: float) -> Setting:
    return Setting(setting.task, Losses("all", probability), setting.workers, setting.data)


def _bound(costs: Mapping[float, Spread]) -> Spread:
    """Return between which losses the bound is, in per cent; the middle is geometric."""
    tolerated, costly = (100 * end for end in bound(costs))
    middle = math.sqrt(tolerated * costly) if tolerated else costly / 2
    return Spread(middle, middle, middle, (tolerated, costly))


def _on_other_data(task: str, probability: float, found: Curves) -> Spread:
    aim = training.tasks()[task].aim

    def multiples(setting: Setting) -> list[float]:
        with_loss, without = found[_with(setting, probability)], found[setting]
        return [
            epochs_to(aim, one, "accuracy") / epochs_to(aim, other, "accuracy")
            for one, other in zip(with_loss, without, strict=True)
        ]

    own, other = multiples(Setting(task)), multiples(Setting(task, data="other"))
    return Spread.of([b / a for a, b in zip(own, other, strict=True)])


EXPERIMENT = Experiment("tolerance", "What a loss of packets costs (Figure 4, Table 1)", run)
