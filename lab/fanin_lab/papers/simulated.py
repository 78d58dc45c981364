"""Experiments that are tables: which scenarios are played, and what a row reads of them.

A *case* is the keys with which an experiment makes a scenario: the parameters of a function. A key
may have a usual value, the parameter's default; axes and settings change it. An axis has the values
that the paper compares, as `system`. A setting changes what the paper does not give, and each row
is its spread over all settings.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, Reason
from fanin_lab.papers.lab import Lab, Report, Runs, Scenario, Spread
from fanin_lab.papers.plot import Picture, outcome

Case = Mapping[str, Any]
"""By key, what a scenario is made of; of an axis or a setting, what is not as usual."""
Read = Callable[[Report], float]
"""Reads a figure of a report."""
_T = TypeVar("_T")


class NotPlayedError(Exception):
    """A row asks for a case that is not among those that were played."""


@dataclass(frozen=True)
class Either(Generic[_T]):
    """A value, and the one that `--quick` takes instead."""

    full: _T
    quick: _T

    def of(self, quick: bool) -> _T:
        """Return the one that is taken."""
        return self.quick if quick else self.full


@dataclass(frozen=True)
class Cases:
    """Cases to play: every combination of values on the axes, in every setting."""

    axes: Mapping[str, Any]
    """By key, a value or several; two of these with `Either`."""
    settings: Any = ({},)
    """A sequence of settings, or two with `Either`. The first one is the usual setting."""
    seeds: int | None = None
    """At most so many; None for all. Without randomness one is enough."""
    seeds_swept: int | None = None
    """At most so many in all settings but the first; None for as many as there. Settings differ by
    more than seeds do."""
    throughputs: bool = True
    """Whether throughputs are read, so that runs must be long enough for one."""
    unfinished: bool = False
    """Whether a job may remain unfinished, since that is the finding."""
    in_quick: bool = True
    """Whether `--quick` plays them, too."""


class At:
    """All that was played, seen from one setting."""

    def __init__(self, played: _Played, setting: Case):
        self._played = played
        self.setting = setting
        self.quick = played.quick

    @property
    def settings(self) -> list[At]:
        """The view from each setting, the usual one first."""
        return self._played.settings

    @property
    def usual(self) -> At:
        """The view from the usual setting."""
        return self._played.usual

    def at(self, setting: Case) -> At:
        """Return the view from another setting."""
        return At(self._played, setting)

    def values(self, axis: str) -> list[Any]:
        """Return all values on an axis."""
        return self._played.values[axis]

    def played(self, axis: str, **case: Any) -> list[Any]:
        """Return the values on an axis with which a case was played in this setting."""
        values = self._played.values.get(axis, [])
        found = [v for v in values if self._played.has({**self.setting, **case, axis: v})]
        if not found:
            raise NotPlayedError(case)
        return found

    def runs(self, **case: Any) -> Runs:
        """Return the runs of a case in this setting. NotPlayedError if there are none."""
        return self._played.runs({**self.setting, **case})

    def samples(self, read: Read, **case: Any) -> list[float]:
        """Return the figures of a case, one for each seed."""
        return self.runs(**case).samples(read)

    def spread(self, read: Read, **case: Any) -> Spread:
        """Return the figures of a case as a spread."""
        return Spread.of(self.samples(read, **case))

    def by(self, read: Read, one: Case, other: Case) -> list[float]:
        """Return one case's figure by another's, for each seed that both have."""
        return by(self.samples(read, **one), self.samples(read, **other))


Formula = Callable[[At], Sequence[float] | Spread]
"""Computes a row in one setting: a sample for each seed."""


def by(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return ratios, seed by seed; a case may have been played with fewer seeds than the other."""
    return [one / other for one, other in zip(ones, others, strict=False)]


def each(
    choose: Callable[[Sequence[float]], float], samples: Sequence[Sequence[float]]
) -> list[float]:
    """Return what is chosen from several figures, for each seed."""
    return [choose(of_seed) for of_seed in zip(*samples, strict=True)]


def figure(read: Read, **case: Any) -> Formula:
    """Return the formula that reads one figure of one case."""
    return lambda at: at.samples(read, **case)


def ratio(read: Read, one: Case, other: Case) -> Formula:
    """Return the formula of one case's figure by another's."""
    return lambda at: at.by(read, one, other)


def computed(function: Callable[..., Sequence[float] | Spread], *given: Any) -> Formula:
    """Return the formula that computes something of what was played, and of what is given."""
    return lambda at: function(at, *given)


@dataclass(frozen=True)
class Row:
    """A figure of the paper's, and how ours is computed."""

    figure: str
    """Its place in the paper."""
    what: str
    paper: float | str
    """A number, or what the paper says or shows in words."""
    ours: Formula
    unit: str = ""
    holds: Range | None = None
    """The range in which ours is what the paper's words say; None if the paper has a number."""
    cannot_fail: str = ""
    """Why this is no evidence, and not counted: it was fitted, or it is arithmetic."""
    over: str | None = None
    """The settings in words, if they are not those of the experiment's other rows."""
    swept: str = ""
    """What the formula itself is the spread over, in words: then it returns a spread."""
    usual_only: bool = False
    """Whether it is of the usual setting alone."""


@dataclass(frozen=True)
class Change:
    """Something that is changed in an experiment's scenarios, as a reason for what differs."""

    words: str
    """All that is different."""
    keys: Case
    """The keys that are other than usual. A value may be an `Either`."""
    contradicts: str = ""
    """The paper's section and words that this contradicts, if any."""
    of: Sequence[Row] | None = None
    """Rows for which it may be a reason; None for all."""
    where: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """By axis, the values with which a case is changed; any other case is played as it is."""
    cases: Sequence[Cases] | None = None
    """Cases to play, if not all."""

    def of_case(self, case: Case, quick: bool) -> Case:
        """Return the case with what is changed in it."""
        if any(case[axis] not in values for axis, values in self.where.items()):
            return case
        return {**case, **{key: _chosen(value, quick) for key, value in self.keys.items()}}


@dataclass(frozen=True)
class Simulated:
    """An experiment in the simulator."""

    name: str
    title: str
    scenario: Callable[..., Scenario]
    """Makes a scenario of a case's keys. A key is as usual where it has its parameter's default."""
    cases: Sequence[Cases]
    rows: Sequence[Row] | Either[list[Row]]
    picture: Callable[[At], Picture]
    usual: Case = field(default_factory=dict)
    """More keys that have a usual value, or a usual value with `--quick`."""
    over: str = ""
    """The settings in words."""
    changes: Sequence[Change] | Either[list[Change]] = ()

    def experiment(self) -> Experiment:
        """Return it for a paper's list."""
        return Experiment(self.name, self.title, self.run, self.why)

    def run(self, lab: Lab) -> Outcome:
        """Play all cases, and compute the rows."""
        plays = _Plays(lab)
        played = _Played(self, self.cases, plays, self.name)
        plays.play()
        rows = _chosen(self.rows, lab.quick)
        findings = played.findings(rows)
        assert lab.quick or len(findings) == len(rows), "a row asks for what is not played"
        return outcome(findings, self.picture(played.usual))

    def why(self, lab: Lab) -> Sequence[Reason]:
        """Play what may explain where findings differ."""
        plays = _Plays(lab)
        changed = [
            (
                change,
                _Played(self, change.cases or self.cases, plays, f"{self.name}-why-{at}", change),
            )
            for at, change in enumerate(_chosen(self.changes, lab.quick))
        ]
        plays.play()
        return [
            Reason(finding.what, change.words, finding.ours, change.contradicts)
            for change, played in changed
            for finding in played.findings(
                _chosen(self.rows if change.of is None else change.of, lab.quick)
            )
        ]


class _Plays:
    """Scenarios to play. Equal scenarios are played once."""

    def __init__(self, lab: Lab):
        self.lab = lab
        self._asked: dict[str, _Asked] = {}
        self._runs: dict[str, Runs] = {}

    def add(self, name: str, scenario: Scenario, cases: Cases, seeds: int | None) -> _Seen:
        """Ask for a scenario with the first seeds."""
        key = repr((scenario, cases.throughputs, cases.unfinished))
        seeds = len(self.lab.seeds) if seeds is None else min(seeds, len(self.lab.seeds))
        before = self._asked.get(key)
        if before is None or before.seeds < seeds:
            name = before.name if before else name
            self._asked[key] = _Asked(name, scenario, seeds, cases.throughputs, cases.unfinished)
        return _Seen(key, seeds)

    def play(self) -> None:
        """Play all that were asked for."""
        groups: dict[tuple[int, bool, bool], list[str]] = {}
        for key, of in self._asked.items():
            groups.setdefault((of.seeds, of.throughputs, of.unfinished), []).append(key)
        for (seeds, throughputs, unfinished), keys in groups.items():
            lab = self.lab.with_seeds(self.lab.seeds[:seeds])
            scenarios = {self._asked[key].name: self._asked[key].scenario for key in keys}
            assert len(scenarios) == len(keys), "two scenarios have one name"
            runs = lab.play(scenarios, throughputs=throughputs, unfinished=unfinished)
            self._runs |= {key: runs[self._asked[key].name] for key in keys}

    def runs(self, seen: _Seen) -> Runs:
        """Return the runs of a scenario that was asked for."""
        return Runs(self._runs[seen.key].reports[: seen.seeds])


@dataclass(frozen=True)
class _Asked:
    name: str
    scenario: Scenario
    seeds: int
    throughputs: bool
    unfinished: bool


@dataclass(frozen=True)
class _Seen:
    key: str
    seeds: int


class _Played:
    """The cases of an experiment, or of a change of it, and their runs."""

    def __init__(
        self,
        experiment: Simulated,
        cases: Sequence[Cases],
        plays: _Plays,
        name: str,
        change: Change | None = None,
    ):
        self.quick = plays.lab.quick
        self.values: dict[str, list[Any]] = {}
        self._settings: list[Case] = []
        self._experiment = experiment
        self._plays = plays
        usual = {**_defaults(experiment.scenario), **experiment.usual}
        self._usual = {key: _chosen(value, self.quick) for key, value in usual.items()}
        self._seen: dict[str, _Seen] = {}
        for of in cases:
            if self.quick and not of.in_quick:
                continue
            axes = {
                axis: _several(_chosen(of_axis, self.quick)) for axis, of_axis in of.axes.items()
            }
            for axis, values in axes.items():
                known = self.values.setdefault(axis, [])
                known += [value for value in values if value not in known]
            for at, setting in enumerate(_chosen(of.settings, self.quick)):
                if setting not in self._settings:
                    self._settings.append(setting)
                seeds = of.seeds_swept if at and of.seeds_swept is not None else of.seeds
                for point in itertools.product(*axes.values()):
                    given = {**dict(zip(axes, point, strict=True)), **setting}
                    case = {**self._usual, **given}
                    changed = change.of_case(case, self.quick) if change else case
                    scenario = experiment.scenario(**changed)
                    seen = plays.add(_name(name, given), scenario, of, seeds)
                    before = self._seen.get(_key(case), seen)
                    self._seen[_key(case)] = max(before, seen, key=lambda one: one.seeds)

    @property
    def settings(self) -> list[At]:
        """The view from each setting, the usual one first."""
        return [At(self, setting) for setting in self._settings]

    @property
    def usual(self) -> At:
        """The view from the usual setting."""
        return self.settings[0]

    def has(self, case: Case) -> bool:
        """Return whether a case was played."""
        return _key({**self._usual, **case}) in self._seen

    def runs(self, case: Case) -> Runs:
        """Return the runs of a case, of which what is as usual need not be given."""
        if not self.has(case):
            raise NotPlayedError(case)
        return self._plays.runs(self._seen[_key({**self._usual, **case})])

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """Return the findings of all rows whose cases were played."""
        found = [(row, self._over_settings(row)) for row in rows]
        return [self._finding(row, spreads) for row, spreads in found if spreads]

    def _finding(self, row: Row, spreads: Sequence[Spread]) -> Finding:
        over = self._experiment.over if row.over is None else row.over
        is_swept = bool(over) and not row.usual_only
        return Finding(
            row.figure,
            row.what,
            row.paper,
            Spread.over(spreads) if is_swept else spreads[0],
            row.holds,
            row.unit,
            row.swept or (over if is_swept and len(spreads) > 1 and not self.quick else ""),
            row.cannot_fail,
        )

    def _over_settings(self, row: Row) -> list[Spread]:
        """Return what a row is in each setting whose cases were played."""
        spreads = []
        for at in [self.usual] if row.usual_only else self.settings:
            try:
                ours = row.ours(at)
            except NotPlayedError:
                continue
            spreads.append(ours if isinstance(ours, Spread) else Spread.of(ours))
        return spreads


def _chosen(value: Any, quick: bool) -> Any:
    return value.of(quick) if isinstance(value, Either) else value


def _defaults(scenario: Callable[..., Scenario]) -> Case:
    parameters = inspect.signature(scenario).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _several(values: Any) -> list[Any]:
    is_one = isinstance(values, str) or not isinstance(values, Iterable)
    return [values] if is_one else list(values)


def _key(case: Case) -> str:
    return repr(sorted(case.items()))


def _name(prefix: str, given: Case) -> str:
    """Return the name of a scenario's file."""
    return "-".join([prefix, *(f"{key}-{_word(value)}" for key, value in given.items())])


def _word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
