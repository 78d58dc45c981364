"""The findings of an experiment, beside those of the paper, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fanin_lab.papers.lab import Lab, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIFTH = 0.2
"""The most that a figure may differ and still agree."""
EFFECT = 1.5
"""How many times stronger or weaker an effect may be and still agree."""
NONE = 0.05
"""Which effect is none: what runs of a testbed differ by anyway."""
RATIO = "x"
"""The unit of a ratio, which claims an effect, or that there is none: how far it is from 1."""

Compared = Literal["agrees", "cannot tell", "differs", "not measured"]
Verdict = Literal[
    "agrees",
    "in the range",
    "cannot tell",
    "explained",
    "unexplained",
    "reasons not played",
    "not measured",
    "not counted",
]


@dataclass(frozen=True)
class Range:
    """The range in which a figure agrees with the paper, its ends included."""

    least: float = -math.inf
    most: float = math.inf

    def compared(self, ours: Spread) -> Compared:
        """Return where the whole interval lies."""
        return self._compared(*ours.interval)

    def divides(self, ours: Spread) -> bool:
        """Return whether some settings' medians are in it, or around it, and some are not."""
        return self._compared(ours.least, ours.most) == "cannot tell"

    def _compared(self, low: float, high: float) -> Compared:
        if math.isnan(low):
            return "not measured"
        if self.least <= low and high <= self.most:
            return "agrees"
        if high < self.least or low > self.most:
            return "differs"
        return "cannot tell"

    def __str__(self) -> str:
        if math.isinf(self.most):
            return f"{_number(self.least)} and more"
        if math.isinf(self.least):
            return f"{_number(self.most)} and less"
        return f"{_number(self.least)} to {_number(self.most)}"


def at_least(bound: float) -> Range:
    """Return this and more."""
    return Range(least=bound)


def at_most(bound: float) -> Range:
    """Return this and less."""
    return Range(most=bound)


MORE, LESS = at_least(1 + NONE), at_most(1 - NONE)
"""A ratio that is above 1, or below it, by some effect."""


def by_lower(percent: float) -> float:
    """Return what others are by something that is so many percent lower, to two digits."""
    return round(1 / (1 - percent / 100), 2)


def like(paper: float, unit: str) -> Range:
    """Return where a figure agrees with the paper's number.

    Within a fifth. A ratio besides: an effect of the paper's is there, in the same direction, and
    at most 1.5 times stronger or weaker (1.24 is three times 1.0746, and so is 1.24^3); where the
    paper's is none, so is ours. Without that, no effect at all would agree with 1.2 and with 0.9.
    """
    fifth = Range((1 - FIFTH) * paper, (1 + FIFTH) * paper)
    if unit != RATIO:
        return fifth
    if abs(paper - 1) < NONE:
        return Range(1 - NONE, 1 + NONE)
    weaker, stronger = sorted((paper ** (1 / EFFECT), paper**EFFECT))
    return Range(max(fifth.least, weaker), min(fifth.most, stronger))


@dataclass(frozen=True)
class Finding:
    """A figure of the paper's, and ours."""

    figure: str
    """Its place in the paper."""
    what: str
    paper: float | str
    """A number, or what the paper says or shows in words."""
    ours: Spread
    """NaN where it was not measured."""
    holds: Range | None = None
    """The range in which ours is what the paper's words say; None if the paper has a number."""
    unit: str = ""
    swept: str = ""
    """The settings that the paper does not give; `ours` is the spread over them."""
    cannot_fail: str = ""
    """Why this is no evidence, and not counted: it was fitted, or it is arithmetic."""

    @property
    def range(self) -> Range:
        """The range in which it agrees."""
        if isinstance(self.paper, str):
            assert self.holds is not None, f"{self.what}: no number says when the words hold"
            return self.holds
        return like(self.paper, self.unit)

    @property
    def agrees(self) -> bool:
        """Whether all of its interval does: over seeds, and over what is swept."""
        return self.range.compared(self.ours) == "agrees"

    def verdict(self, reasons: Sequence[Reason] | None) -> Verdict:
        """Return what it comes to; `reasons` are those that were played, if any were."""
        if self.cannot_fail:
            return "not counted"
        compared = self.range.compared(self.ours)
        in_words = isinstance(self.paper, str)
        if compared == "cannot tell" and self.swept and not in_words:
            return "in the range" if self.range.divides(self.ours) else compared
        if compared != "differs":
            return compared
        if reasons is None:
            return "reasons not played"
        explained = any(reason.explains(self) for reason in reasons)
        return "explained" if explained else "unexplained"

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dumps`."""
        ratio = None if isinstance(self.paper, str) else self.ours.median / self.paper
        fields = asdict(self) | {"range": asdict(self.range)}
        del fields["holds"]
        return {**fields, "ratio": ratio, "agrees": self.agrees}


@dataclass(frozen=True)
class Reason:
    """A finding's scenario with something changed: whether the figure is then the paper's.

    It is played with every setting of the finding's.
    """

    of: str
    """The finding: its `what`."""
    change: str
    """All that is different in this scenario."""
    ours: Spread
    """The same figure as the finding's."""
    contradicts: str = ""
    """The paper's section and words that this contradicts, if any. Then it explains nothing."""

    def explains(self, finding: Finding) -> bool:
        """Return whether the change makes a finding that differs agree, by the finding's rule."""
        return not self.contradicts and self._mends(finding)

    def breaks(self, finding: Finding) -> bool:
        """Return whether a finding that agrees no longer does."""
        return self.of == finding.what and finding.agrees and not self._mends(finding)

    def _mends(self, finding: Finding) -> bool:
        return self.of == finding.what and finding.range.compared(self.ours) == "agrees"


@dataclass(frozen=True)
class Outcome:
    """All that one experiment found."""

    findings: Sequence[Finding]
    draw: Callable[[Figure], None]
    series: dict[str, Any] = field(default_factory=dict)
    """The data of the plot, for programs."""


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper."""

    name: str
    """On the command line, and of its files."""
    title: str
    """The title of the plot."""
    run: Callable[[Lab], Outcome]
    why: Callable[[Lab], Sequence[Reason]] = lambda _: ()
    """Plays the scenarios that may explain where it differs."""
    measures: bool = False
    """Whether it takes times on this machine, where nothing else may run meanwhile."""


@dataclass(frozen=True)
class Paper:
    """The figures of a paper that are made again."""

    experiments: Sequence[Experiment]
    repeated: str
    """The difference between repetitions of a run, in the plural."""
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
        ("cannot tell", "cannot tell: their intervals are too wide"),
        ("explained", "differ, and a scenario that was played says why"),
        ("unexplained", "differ and are unexplained"),
        ("reasons not played", "differ (`--why` plays reasons)"),
        ("not measured", "were not measured"),
    )
    for verdict, words in others:
        if count := verdicts.count(verdict):
            parts.append(f"{count} {words}")
    text = f"{counted} finding{'s' if counted != 1 else ''} could have failed: {', '.join(parts)}."
    if apart := len(verdicts) - counted:
        text += f" {apart} more cannot fail (fitted, chosen or arithmetic) and are not counted."
    return text


def table(findings: Sequence[Finding], reasons: Sequence[Reason] | None = None) -> str:
    """Return the findings as Markdown."""
    head = "| paper | what | paper's | agrees from | ours | verdict |\n|---|---|---|---|---|---|\n"
    rows = (" | ".join(cells(finding, reasons)) for finding in findings)
    return head + "".join(f"| {row} |\n" for row in rows)


def table_of_reasons(played: Sequence[tuple[Sequence[Finding], Sequence[Reason]]]) -> str:
    """Return what was played to explain what differs, as Markdown; given by experiment."""
    head = "| what differs | paper's | ours | changed | ours then | explains it |\n"
    rows = [head, "|---|---|---|---|---|---|\n"]
    for findings, reasons in played:
        for finding in findings:
            for reason in reasons:
                if reason.of != finding.what:
                    continue
                ours, then = _spread(finding.ours, finding.unit), _spread(reason.ours, finding.unit)
                cells = [
                    f"{finding.figure}: {finding.what}",
                    _paper(finding),
                    ours,
                    _change(reason),
                ]
                cells += [then, _explains(finding, reason, findings, reasons)]
                rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _change(reason: Reason) -> str:
    if not reason.contradicts:
        return reason.change
    return f"{reason.change} (contradicts the paper, {reason.contradicts})"


def _explains(
    finding: Finding, reason: Reason, findings: Sequence[Finding], reasons: Sequence[Reason]
) -> str:
    verdict = finding.verdict(reasons)
    if reason.breaks(finding):
        return "(it agrees as it is, and with this no longer)"
    if verdict not in ("explained", "unexplained"):
        return "(it agrees as it is)" if finding.agrees else f"({verdict} as it is)"
    if reason.contradicts:
        return "no: it contradicts the paper"
    if not reason.explains(finding):
        return "no: it was not measured" if math.isnan(reason.ours.median) else "no"
    alike = [other for other in reasons if other.change == reason.change]
    broken = [one.what for one in findings if any(other.breaks(one) for other in alike)]
    return f"yes, and breaks: {'; '.join(broken)}" if broken else "yes"


def cells(finding: Finding, reasons: Sequence[Reason] | None) -> list[str]:
    """Return it in words: its place, what it is, the paper's, its range, ours, the verdict."""
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
    return [finding.figure, finding.what, _paper(finding), str(finding.range), ours, said]


def _paper(finding: Finding) -> str:
    if isinstance(finding.paper, str):
        return finding.paper
    return _with_unit(_number(finding.paper), finding.unit)


def _spread(spread: Spread, unit: str) -> str:
    if math.isnan(spread.median):
        return "none"
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
