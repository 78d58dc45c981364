"""An experiment is a table: what is played for it, and what its rows come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from fanin_lab.papers.finding import at_least
from fanin_lab.papers.lab import Lab, Report, Runs, Scenario
from fanin_lab.papers.plot import Bars, Level, Line, Panel, Picture, Whiskers
from fanin_lab.papers.simulated import (
    At,
    Cases,
    Change,
    Either,
    Row,
    Simulated,
    computed,
    each,
    figure,
    ratio,
)
from fanin_lab.sweep.spread import Spread


class Stub:
    """A laboratory that answers with a number of the scenario, times the seed."""

    def __init__(self, quick: bool = False, seeds: Sequence[int] = (1, 2, 3)):
        self.quick = quick
        self.seeds = seeds
        self.played: list[tuple[str, int]] = []

    def with_seeds(self, seeds: Sequence[int]) -> Stub:
        other = Stub(self.quick, seeds)
        other.played = self.played
        return other

    def play(self, scenarios: Mapping[str, Scenario], **_: Any) -> dict[str, Runs]:
        self.played += [(name, seed) for name in scenarios for seed in self.seeds]
        return {
            name: Runs([{"speed": scenario["speed"] * seed} for seed in self.seeds])
            for name, scenario in scenarios.items()
        }


def lab(**more: Any) -> Lab:
    return cast(Lab, Stub(**more))


def played(of: Lab) -> list[tuple[str, int]]:
    return cast(Stub, of).played


def speed(report: Report) -> float:
    return float(report["speed"])


def scenario(system: str, queue: float, window: int) -> Scenario:
    """Return a scenario in which only the fast system has a window."""
    fast = system == "fast"
    return {"title": system, "speed": (2.0 * window if fast else 1.0) * queue}


FASTER = Row(
    "Fig. 1", "fast by slow", 2.0, ratio(speed, {"system": "fast"}, {"system": "slow"}), "x"
)
EXPERIMENT = Simulated(
    "example",
    "An example",
    scenario,
    [Cases({"system": ["fast", "slow"]}, [{}, {"window": 3}, {"queue": 5.0}], seeds_swept=1)],
    [FASTER, Row("Fig. 2", "fast", 2.0, figure(speed, system="fast"), usual_only=True)],
    lambda at: Picture(
        [Panel([Line([1], at.samples(speed, system="slow")[:1], label="slow")], "x", "y")]
    ),
    usual={"queue": 1.0, "window": 1},
    over="windows of 1 or 3, queues of 1 or 5",
)


def test_a_row_is_the_spread_of_its_medians_over_all_settings() -> None:
    by_slow, fast = EXPERIMENT.run(lab()).findings
    assert (by_slow.ours.median, by_slow.ours.least, by_slow.ours.most) == (2, 2, 6)
    assert by_slow.swept == EXPERIMENT.over
    # Of the usual setting alone, it is the spread over seeds.
    assert (fast.ours.median, fast.ours.least, fast.ours.most) == (4, 2, 6)
    assert fast.swept == ""


def test_equal_scenarios_are_played_once_and_settings_beyond_the_first_with_few_seeds() -> None:
    here = lab()
    EXPERIMENT.run(here)
    seeds: dict[str, list[int]] = {}
    for name, seed in played(here):
        seeds.setdefault(name, []).append(seed)
    # The slow system has no window: the second setting has nothing new for it.
    assert seeds == {
        "example-system-fast": [1, 2, 3],
        "example-system-slow": [1, 2, 3],
        "example-system-fast-window-3": [1],
        "example-system-fast-queue-5.0": [1],
        "example-system-slow-queue-5.0": [1],
    }


def test_what_is_played_quickly_leaves_out_rows_whose_cases_are_not_there() -> None:
    few = replace(
        EXPERIMENT,
        cases=[
            Cases(
                {"system": Either(["fast", "slow"], quick=["fast"])}, Either([{}], [{"queue": 7.0}])
            )
        ],
        picture=lambda _: Picture([]),
    )
    assert [one.what for one in few.run(lab()).findings] == ["fast by slow", "fast"]
    (fast,) = few.run(lab(quick=True)).findings
    assert (fast.what, fast.ours.median) == ("fast", 2 * 2 * 7)


def test_a_row_of_what_is_never_played_is_a_mistake_that_is_noticed() -> None:
    other = Row("Fig. 3", "another", 1.0, figure(speed, system="another"))
    with pytest.raises(AssertionError, match="not played"):
        replace(EXPERIMENT, rows=[FASTER, other]).run(lab())


def test_a_change_is_played_for_its_rows_and_for_no_others() -> None:
    slower = Change(
        "a queue of 10 for the slow", {"queue": 10.0}, of=[FASTER], where={"system": ["slow"]}
    )
    forbidden = replace(
        slower, contradicts="§1", cases=[Cases({"system": ["fast", "slow"]}, seeds=1)]
    )
    here = lab()
    first, second = replace(EXPERIMENT, changes=[slower, forbidden]).why(here)
    assert (first.of, first.change) == (FASTER.what, slower.words)
    assert first.ours.median == pytest.approx(0.6)
    assert (second.contradicts, second.ours.median) == ("§1", 0.2)
    names = [name for name, _ in played(here)]
    assert all(name.startswith(("example-why-0", "example-why-1")) for name in names)
    # What the second change has in common with the first one is played once.
    assert not any(name.startswith("example-why-1") for name in names)


def test_a_formula_may_choose_among_all_values_of_an_axis() -> None:
    def most(at: At, choose: Callable[[Sequence[float]], float]) -> list[float]:
        return each(choose, [at.samples(speed, system=one) for one in at.values("system")])

    def of_seeds(at: At) -> Spread:
        return Spread.of_each([one] for one in at.samples(speed, system="slow"))

    rows = [
        Row("Fig. 4", "the most", "more", computed(most, max), holds=at_least(1), usual_only=True),
        Row("Fig. 5", "of each", 2.0, of_seeds, swept="seeds"),
    ]
    best, of_each = replace(EXPERIMENT, rows=rows).run(lab()).findings
    assert (best.ours.least, best.ours.most) == (2, 6)
    assert of_each.swept == "seeds"


def test_what_is_drawn_is_what_programs_read() -> None:
    spread = Spread.of([1.0, 2.0, 4.0])
    panel = Panel(
        [
            Line([1, 2], [3, 4], "o-", "ours"),
            Line([1], [2], "kx"),
            Whiskers([5], [spread], "seeds"),
            Bars(["a"], [3.0], "heights"),
            Level(2.5, "paper"),
        ],
        "x",
        "y",
        "a panel",
    )
    assert Picture([panel, panel]).series() == {
        "a panel": {
            "ours": [[1, 2], [3, 4]],
            "seeds": [[5], [[2.0, 1.0, 4.0]]],
            "heights": [["a"], [3.0]],
            "paper": 2.5,
        },
        "a panel, 1": panel.series(),
    }
    assert EXPERIMENT.run(lab()).series == {"y": {"slow": [[1], [1.0]]}}
