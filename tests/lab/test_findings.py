"""Findings beside the papers': verdicts, ranges and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fanin_lab.papers.finding import (
    LESS,
    MORE,
    Finding,
    Range,
    Reason,
    at_least,
    at_most,
    like,
    summary,
    table,
    table_of_reasons,
)
from fanin_lab.papers.lab import Spread


def finding(ours: float | Sequence[float], paper: float | str, **more: Any) -> Finding:
    samples = [ours] if isinstance(ours, int | float) else ours
    return Finding("Fig. 1", "x", paper, Spread.of(samples), **more)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (finding([8.1, 11.9], 10.0), "agrees"),
        (finding([8.1, 12.1], 10.0), "cannot tell"),
        (finding([7.9, 11.9], 10.0), "cannot tell"),
        (finding([7.8, 7.9], 10.0), "unexplained"),
        (finding([12.1, 14.0], 10.0), "unexplained"),
        (finding([2.0, 3.0], "more", holds=MORE), "agrees"),
        (finding([1.0, 3.0], "more", holds=MORE), "cannot tell"),
        (finding([0.5, 1.0], "more", holds=MORE), "unexplained"),
        (finding([0.5, 0.9], "less", holds=LESS), "agrees"),
        (finding([0.9, 1.0], "less", holds=LESS), "cannot tell"),
        (finding(1.0, "less", holds=LESS), "unexplained"),
        (finding([5.0, 10.0], "5 to 10", holds=Range(5, 10)), "agrees"),
        # Its ends are both outside, and what is between them is not.
        (finding([4.0, 11.0], "5 to 10", holds=Range(5, 10)), "cannot tell"),
        (finding(4.0, "5 to 10", holds=Range(5, 10)), "unexplained"),
        (finding([8.0, 12.1], 10.0, swept="queues"), "in the range"),
        (finding([4.0, 6.0], "5 at least", holds=at_least(5), swept="queues"), "cannot tell"),
        (finding(10.0, 10.0, cannot_fail="fitted"), "not counted"),
    ],
)
def test_a_verdict_heeds_the_whole_interval(found: Finding, verdict: str) -> None:
    assert found.verdict([]) == verdict
    assert found.verdict(None) == verdict.replace("unexplained", "reasons not played")
    assert found.agrees == (verdict in ("agrees", "not counted"))


@pytest.mark.parametrize(
    ("paper", "agree", "differ"),
    [
        # An effect may be 1.5 times weaker or stronger.
        (1.24, [1.16, 1.24, 1.38], [0.9, 1.0, 1.15, 1.39]),
        (1.05, [1.04, 1.05, 1.07], [1.0, 1.03, 1.08]),
        (0.9, [0.86, 0.9, 0.93], [0.84, 0.94, 1.0, 1.1]),
        # And of a strong one the fifth is less.
        (8.7, [7.0, 10.4], [6.9, 10.5]),
        (0.95, [0.93, 0.96], [0.92, 0.97, 1.0]),
        (0.5, [0.41, 0.59], [0.39, 0.61]),
        # Where the paper has none, there is none.
        (1.0, [0.96, 1.0, 1.04], [0.94, 1.06]),
        (1.02, [0.96, 1.0, 1.04], [0.94, 1.06]),
    ],
)
def test_a_ratio_agrees_with_the_effect_and_not_with_none(
    paper: float, agree: list[float], differ: list[float]
) -> None:
    for ours in agree:
        assert finding(ours, paper, unit="x").agrees
    for ours in differ:
        assert finding(ours, paper, unit="x").verdict([]) == "unexplained"
        assert like(paper, "images/s").compared(Spread.of([ours])) == (
            "agrees" if abs(ours / paper - 1) <= 0.2 else "differs"
        )
    # The paper's own rounding never decides.
    for rounded in (paper - 0.005, paper + 0.005):
        assert finding(rounded, paper, unit="x").agrees


def test_the_range_stands_in_the_table() -> None:
    rows = table(
        [
            finding(1.2, 1.24, unit="x"),
            finding(3.0, "some", holds=at_least(10), unit="%"),
            finding(3.0, "few", holds=at_most(5)),
        ]
    )
    assert "| 1.24 x | 1.15 to 1.38 | 1.2 x | agrees |" in rows
    assert "| some | 10 and more | 3 % | differs |" in rows
    assert "| few | 5 and less | 3 | agrees |" in rows


def test_what_is_swept_is_in_the_range_only_where_the_papers_number_is() -> None:
    spreads = [Spread.of([5.0]), Spread.of([16.0]), Spread.of([20.0])]
    over = Spread.over(spreads)
    assert (over.median, over.least, over.most, over.interval) == (16.0, 5.0, 20.0, (5.0, 20.0))
    for paper, verdict in ((10.0, "in the range"), (17.0, "in the range"), (4.0, "unexplained")):
        found = Finding("Fig. 1", "x", paper, over, swept="queues of 1 to 2 MB")
        assert found.verdict([]) == verdict
    seeds = Spread.over([Spread.of([9.0, 13.0]), Spread.of([10.0])])
    assert (seeds.least, seeds.most, seeds.interval) == (10.0, 11.0, (9.0, 13.0))
    unsure = Finding("Fig. 1", "x", 10.0, seeds, swept="queues")
    assert unsure.verdict([]) == "cannot tell", "the settings agree, their seeds do not"
    narrow = Spread.over([Spread.of([9.0]), Spread.of([11.0])])
    assert Finding("Fig. 1", "x", 10.0, narrow, swept="queues").verdict([]) == "agrees"


def test_a_reason_explains_what_agrees_once_its_change_is_made() -> None:
    differs = finding(20.0, 10.0)
    good = Reason("x", "a shorter queue", Spread.of([9.0, 11.0]))
    bad = Reason("x", "a longer queue", Spread.of([30.0]))
    unsure = Reason("x", "another queue", Spread.of([9.0, 13.0]))
    of_another = Reason("y", "a shorter queue", Spread.of([10.0]))
    assert differs.verdict([bad, unsure, of_another]) == "unexplained"
    assert differs.verdict([bad, good]) == "explained"
    assert "differs; agrees with a shorter queue |" in table([differs], [bad, good])
    assert "unexplained |" in table([differs], [bad])
    assert "1 differ and are unexplained" in summary([differs], [bad])
    assert "1 differ, and a scenario that was played says why" in summary([differs], [good])


def test_a_reason_that_changes_what_the_paper_gives_is_shown_and_explains_nothing() -> None:
    differs = finding(20.0, 10.0)
    against = Reason("x", "a shorter timeout", Spread.of([10.0]), contradicts='§5: "1ms"')
    assert differs.verdict([against]) == "unexplained"
    shown = table_of_reasons([([differs], [against])])
    assert '| a shorter timeout (contradicts the paper, §5: "1ms") | 10 |' in shown
    assert "| no: it contradicts the paper |" in shown


def test_a_reason_that_breaks_another_row_of_its_experiment_says_so() -> None:
    differs = finding(20.0, 10.0)
    agrees = Finding("Fig. 2", "y", 5.0, Spread.of([5.0]))
    mends = Reason("x", "a shorter queue", Spread.of([10.0]))
    breaks = Reason("y", "a shorter queue", Spread.of([9.0]))
    keeps = Reason("y", "a shorter queue", Spread.of([5.5]))
    together = table_of_reasons([([differs, agrees], [mends, breaks])])
    assert "| yes, and breaks: y |" in together
    assert "| (it agrees as it is, and with this no longer) |" in together
    kept = table_of_reasons([([differs, agrees], [mends, keeps])])
    assert "| yes |" in kept
    assert "| (it agrees as it is) |" in kept
    # The same words in another experiment are another scenario.
    apart = table_of_reasons([([differs], [mends]), ([agrees], [breaks])])
    assert "| yes |" in apart


def test_what_cannot_fail_is_not_counted() -> None:
    findings = [finding(10.0, 10.0), finding(10.0, 10.0, cannot_fail="it was fitted")]
    assert summary(findings, []).startswith("1 finding could have failed: 1 agree.")
    assert "not counted: it was fitted" in table(findings, [])


@pytest.mark.parametrize(
    ("samples", "interval"),
    # 1 - 2 (1/2)^6 = 0.969 and 1 - 2 (10/512) = 0.961; one rank further in it is less than 0.95.
    [(2, (1, 2)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))],
)
def test_the_interval_has_the_median_with_95_percent(
    samples: int, interval: tuple[int, int]
) -> None:
    spread = Spread.of([float(n) for n in range(samples, 0, -1)])
    assert spread.interval == interval
    assert (spread.least, spread.most) == (1, samples)
