"""What an experiment found, beside what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fanin.reproduce.lab import Lab, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIFTH = 0.2
"""What a figure may differ by without a reason."""


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
    why: str = ""
    """Why a number differs by more than a fifth, or words do not hold."""

    @property
    def ratio(self) -> float | None:
        """Ours by the paper's."""
        return self.ours.median / self.paper if isinstance(self.paper, float) else None

    @property
    def agrees(self) -> bool:
        """Whether it is within a fifth, or holds."""
        if self.ratio is None:
            return self.holds is True
        return abs(self.ratio - 1) <= FIFTH

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dumps`."""
        return {**asdict(self), "ratio": self.ratio, "agrees": self.agrees}


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
    measures: bool = False
    """Whether it takes times on this machine, where nothing else may run meanwhile."""


@dataclass(frozen=True)
class Paper:
    """What is made again of a paper."""

    experiments: Sequence[Experiment]
    repeated: str
    """What the repetitions of a run differ by, in the plural."""


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as Markdown."""
    head = "| paper | what | paper's | ours | ratio | within a fifth |\n|---|---|---|---|---|---|\n"
    return head + "".join(_row(finding) for finding in findings)


def _row(finding: Finding) -> str:
    unit = f" {finding.unit}" if finding.unit else ""
    paper = finding.paper if isinstance(finding.paper, str) else f"{_number(finding.paper)}{unit}"
    ours = finding.ours
    shown = _number(ours.median)
    if ours.least != ours.most:
        shown += f" ({_number(ours.least)} to {_number(ours.most)})"
    ratio = "" if finding.ratio is None else f"{finding.ratio:.2f}"
    if finding.ratio is None:
        verdict = "holds" if finding.agrees else f"does not hold: {finding.why}"
    else:
        verdict = "yes" if finding.agrees else f"no: {finding.why}"
    cells = [finding.figure, finding.what, paper, f"{shown}{unit}", ratio, verdict]
    return f"| {' | '.join(cells)} |\n"


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
