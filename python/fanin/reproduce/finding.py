"""What an experiment found, beside what the paper says, and why it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fanin.reproduce.lab import Lab, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIFTH = 0.2
"""What a figure may differ by and still agree."""

Verdict = Literal[
    "agrees", "in the range", "explained", "unexplained", "reasons not played", "not counted"
]


@dataclass(frozen=True)
class Finding:
    """One figure of the paper's, and ours."""

    figure: str
    """Where it stands in the paper."""
    what: str
    paper: float | str
    """A number, or what the paper says or shows in words."""
    ours: Spread
    holds: bool | None = None
    """Whether ours is what the words say; None where the paper has a number."""
    unit: str = ""
    swept: str = ""
    """What the paper does not give, and `ours` is therefore the spread over."""
    cannot_fail: str = ""
    """Why this is no evidence, and not counted: it was fitted, or it is arithmetic."""

    @property
    def ratio(self) -> float | None:
        """Ours by the paper's."""
        return self.ours.median / self.paper if isinstance(self.paper, float) else None

    @property
    def agrees(self) -> bool:
        """Whether it is within a fifth, or holds; of what is swept, with every setting."""
        ends = (self.ours.least, self.ours.most) if self.swept else (self.ours.median,)
        return all(_agrees(self.paper, end, self.holds) for end in ends)

    def verdict(self, reasons: Sequence[Reason] | None) -> Verdict:
        """Return what it comes to; `reasons` are those that were played, if any were."""
        if self.cannot_fail:
            return "not counted"
        if self.agrees:
            return "agrees"
        if self.swept and isinstance(self.paper, float) and self._reaches(self.paper):
            return "in the range"
        if reasons is None:
            return "reasons not played"
        explained = any(reason.explains(self) for reason in reasons)
        return "explained" if explained else "unexplained"

    def _reaches(self, paper: float) -> bool:
        return self.ours.least <= (1 + FIFTH) * paper and self.ours.most >= (1 - FIFTH) * paper

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dumps`."""
        return {**asdict(self), "ratio": self.ratio, "agrees": self.agrees}


@dataclass(frozen=True)
class Reason:
    """A finding's scenario again with one thing changed: whether the figure is then the paper's."""

    of: str
    """The finding: its `what`."""
    change: str
    """What is different in this scenario."""
    ours: Spread
    """The same figure as the finding's."""
    holds: bool | None = None
    """As the finding's."""

    def explains(self, finding: Finding) -> bool:
        """Return whether the change makes a finding that differs agree."""
        return self.of == finding.what and _agrees(finding.paper, self.ours.median, self.holds)


def _agrees(paper: float | str, ours: float, holds: bool | None) -> bool:
    if isinstance(paper, float):
        return abs(ours / paper - 1) <= FIFTH
    return holds is True


@dataclass(frozen=True)
class Outcome:
    """All that one experiment found."""

    findings: Sequence[Finding]
    draw: Callable[[Figure], None]
    series: dict[str, Any] = field(default_factory=dict)
    """What is drawn, for programs."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper."""

    name: str
    """On the command line, and of its files."""
    title: str
    """Of the plot."""
    run: Callable[[Lab], Outcome]
    why: Callable[[Lab], Sequence[Reason]] = lambda _: ()
    """Plays the scenarios that may explain where it differs."""
    measures: bool = False
    """Whether it takes times on this machine, where nothing else may run meanwhile."""


@dataclass(frozen=True)
class Paper:
    """What is made again of a paper."""

    experiments: Sequence[Experiment]
    repeated: str
    """What the repetitions of a run differ by, in the plural."""
    repetitions: int
    missing: Sequence[str] = ()
    """Figures of it that are not made again, each with the reason."""


def summary(findings: Sequence[Finding], reasons: Sequence[Reason] | None) -> str:
    """Return how many findings came to what."""
    verdicts = [finding.verdict(reasons) for finding in findings]
    counted = len(verdicts) - verdicts.count("not counted")
    parts = [f"{verdicts.count('agrees')} agree"]
    others: tuple[tuple[Verdict, str], ...] = (
        ("in the range", "have the paper's number within the range of what it does not give"),
        ("explained", "differ, and a scenario that was played says why"),
        ("unexplained", "differ and are unexplained"),
        ("reasons not played", "differ (`--why` plays reasons)"),
    )
    for verdict, words in others:
        if count := verdicts.count(verdict):
            parts.append(f"{count} {words}")
    text = f"Of {counted} findings that could have failed, {', '.join(parts)}."
    if apart := len(verdicts) - counted:
        text += f" {apart} more cannot fail (fitted, or arithmetic) and are not counted."
    return text


def table(findings: Sequence[Finding], reasons: Sequence[Reason] | None = None) -> str:
    """Return the findings as Markdown."""
    head = "| paper | what | paper's | ours | ratio | verdict |\n|---|---|---|---|---|---|\n"
    return head + "".join(_row(finding, reasons) for finding in findings)


def table_of_reasons(findings: Sequence[Finding], reasons: Sequence[Reason]) -> str:
    """Return what was played to explain what differs, as Markdown."""
    head = "| what differs | paper's | ours | changed | ours then | explains it |\n"
    rows = [head, "|---|---|---|---|---|---|\n"]
    for finding in findings:
        for reason in reasons:
            if reason.of != finding.what:
                continue
            if finding.agrees:
                explains = "(it agrees as it is)"
            else:
                explains = "yes" if reason.explains(finding) else "no"
            ours, then = _spread(finding.ours, finding.unit), _spread(reason.ours, finding.unit)
            cells = [f"{finding.figure}: {finding.what}", _paper(finding), ours, reason.change]
            rows.append(f"| {' | '.join([*cells, then, explains])} |\n")
    return "".join(rows)


def _row(finding: Finding, reasons: Sequence[Reason] | None) -> str:
    ratio = "" if finding.ratio is None else f"{finding.ratio:.2f}"
    verdict = finding.verdict(reasons)
    said: str = verdict
    if verdict == "explained":
        changes = [reason.change for reason in reasons or () if reason.explains(finding)]
        said = f"differs; agrees with {' or with '.join(changes)}"
    elif verdict == "in the range":
        said = f"in the range over {finding.swept}"
    elif verdict == "not counted":
        said = f"not counted: {finding.cannot_fail}"
    elif verdict == "reasons not played":
        said = "differs"
    ours = _spread(finding.ours, finding.unit)
    if finding.swept and verdict != "in the range":
        ours += f" over {finding.swept}"
    cells = [finding.figure, finding.what, _paper(finding), ours, ratio, said]
    return f"| {' | '.join(cells)} |\n"


def _paper(finding: Finding) -> str:
    if isinstance(finding.paper, str):
        return finding.paper
    return _with_unit(_number(finding.paper), finding.unit)


def _spread(spread: Spread, unit: str) -> str:
    shown = _number(spread.median)
    low, high = spread.interval
    if low != high:
        shown += f" ({_number(low)} to {_number(high)})"
    return _with_unit(shown, unit)


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit else number


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
