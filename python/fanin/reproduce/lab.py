"""Runs what experiments ask for as processes, and keeps what went in and what came out.

`fanin sim` and `fanin plan` a few at a time; `fanin bench`, which measures, alone.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fanin.reproduce import ReproduceError
from fanin.reproduce.progress import Progress

Scenario = Mapping[str, Any]
"""A scenario file's keys; a list of mappings is an array of tables."""
Report = Mapping[str, Any]
"""`result` of the JSON that `fanin sim` writes, or one of the `runs` of `fanin bench`."""
OWN = {"server", "elements", "window", "slots", "hashing", "scaling", "overflow"}
OWN |= {"congestion_control", "timeout", "timeouts_only", "receive_window"}
"""Keys of a job that stand in the table of its system."""
_T = TypeVar("_T")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    median: float
    least: float
    most: float
    interval: tuple[float, float]
    """In which the median of all seeds lies with 95 % confidence, whatever the distribution; with
    fewer than six seeds there is no such interval, and it is all that was seen."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of one figure in runs with different seeds.

        Where one of them was not measured (NaN), none is.
        """
        if any(map(math.isnan, samples)):
            return cls(math.nan, math.nan, math.nan, (math.nan, math.nan))
        ordered = sorted(samples)
        cut = _ranks_cut(len(ordered))
        interval = ordered[cut], ordered[-1 - cut]
        return cls(statistics.median(ordered), ordered[0], ordered[-1], interval)

    @classmethod
    def over(cls, spreads: Sequence[Spread]) -> Spread:
        """Return the spread of the medians, one for each value of what is swept."""
        found = cls.of([spread.median for spread in spreads])
        return cls(found.median, found.least, found.most, (found.least, found.most))


def _ranks_cut(samples: int) -> int:
    """Return how many of the least and of the most lie outside the median's 95 % interval.

    The median lies below the sample of rank r + 1 when at most r of n fair coins show heads.
    """
    below, cut = 0.0, 0
    for rank in range(samples // 2):
        below += math.comb(samples, rank) / 2**samples
        if 2 * below > 0.05:
            break
        cut = rank
    return cut


@dataclass(frozen=True)
class Between:
    """A time that the dice of a seed choose for a scenario, evenly."""

    least_ms: float
    most_ms: float


@dataclass(frozen=True)
class Runs:
    """One scenario, played with every seed."""

    reports: Sequence[Report]

    def samples(self, figure: Callable[[Report], float]) -> list[float]:
        """Return what `figure` finds in each report."""
        return [figure(report) for report in self.reports]

    def spread(self, figure: Callable[[Report], float]) -> Spread:
        """Return what `figure` finds in the reports."""
        return Spread.of(self.samples(figure))


class Lab:
    """Where an experiment's scenarios are played."""

    def __init__(self, out: Path, seeds: Sequence[int], jobs: int, quick: bool, progress: Progress):
        self.out = out
        self.seeds = seeds
        self.quick = quick
        """Whether coarse figures will do."""
        self.doubts: list[str] = []
        """Runs whose throughputs say little: too short to measure, or not finished."""
        self._progress = progress
        self._pool = ThreadPoolExecutor(jobs)
        self._stopped = threading.Event()
        for folder in ("scenarios", "results"):
            (out / folder).mkdir(parents=True, exist_ok=True)

    def with_seeds(self, seeds: Sequence[int]) -> Lab:
        """Return this one, which plays with other seeds."""
        other = copy.copy(self)
        other.seeds = seeds
        return other

    def play(
        self,
        scenarios: Mapping[str, Scenario],
        *,
        once: bool = False,
        throughputs: bool = True,
        unfinished: bool = False,
    ) -> dict[str, Runs]:
        """Play every scenario with every seed; return the runs by the scenarios' names.

        With ``once``, only with the first seed. Without ``throughputs`` none is read of them, and
        it does not matter whether they were measured for long enough. A job that was to end and
        has not raises ReproduceError, unless what has not ``unfinished`` is what is looked for.
        """
        seeds = self.seeds[:1] if once else self.seeds
        self._progress.expect(len(scenarios) * len(seeds))
        running = {
            name: [self._pool.submit(self._simulate, name, scenario, seed) for seed in seeds]
            for name, scenario in scenarios.items()
        }
        played = {name: [run.result() for run in of_one] for name, of_one in running.items()}
        for name, reports in played.items():
            for seed, report in zip(seeds, reports, strict=True):
                if not unfinished:
                    _refuse_unfinished(f"{name}, seed {seed}", report)
        if throughputs:
            self.doubts += [
                f"{name}, seed {seed}: {doubt}"
                for name, reports in played.items()
                for seed, report in zip(seeds, reports, strict=True)
                for doubt in doubts(report)
            ]
        return {name: Runs(reports) for name, reports in played.items()}

    def each(
        self, what: str, function: Callable[[_T], _Found], items: Sequence[_T]
    ) -> list[_Found]:
        """Return what the function finds for each item; as many at a time as simulations."""

        def one(item: _T) -> _Found:
            if self._stopped.is_set():
                raise ReproduceError("stopped")
            found = function(item)
            self._progress.done(what)
            return found

        self._progress.expect(len(items))
        return list(self._pool.map(one, items))

    def bench(
        self, name: str, arguments: Sequence[str], settings: Mapping[str, str] | None = None
    ) -> Report:
        """Run `fanin bench allreduce`, of one setting; return that of the JSON that it writes.

        ``settings`` are environment variables.
        """
        result = self.out / "results" / f"{name}.json"
        command = [sys.executable, "-m", "fanin", "bench", "allreduce", *arguments]
        command += ["--json", str(result)]
        self._progress.expect(1)
        environment = {**_environment(), **(settings or {})}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise ReproduceError(f"{name}: {ended.stderr.strip()}")
        self._progress.done(name)
        (run,) = json.loads(result.read_text())["runs"]
        return dict(run)

    def stop(self) -> None:
        """Begin no further simulation."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _simulate(self, name: str, scenario: Scenario, seed: int) -> Report:
        if self._stopped.is_set():
            raise ReproduceError("stopped")
        text = toml(own_tables(_drawn(scenario, seed)))
        key = hashlib.sha256(f"{_program()} {seed} {text}".encode()).hexdigest()
        file = self.out / "scenarios" / f"{name}-{seed}.toml"
        result = self.out / "results" / f"{name}-{seed}.json"
        played = result.with_suffix(".key")
        # A run that was stopped goes on: the same program, scenario and seed give the same bytes.
        if not (played.exists() and played.read_text() == key):
            for old in (played, result):
                old.unlink(missing_ok=True)
            file.write_text(text)
            command = [sys.executable, "-m", "fanin", "sim", str(file)]
            command += ["--seed", str(seed), "--json", str(result)]
            ended = subprocess.run(command, capture_output=True, text=True, env=_environment())
            # With unfinished jobs it fails, and writes its result nevertheless.
            if ended.returncode and not result.exists():
                raise ReproduceError(f"{name}: {ended.stderr.strip()}")
            played.write_text(key)
        self._progress.done(name)
        report: Report = json.loads(result.read_text())["result"]
        return report


def _refuse_unfinished(name: str, report: Report) -> None:
    for job in report["jobs"]:
        if job["unfinished"] is not None:
            text = f"{name}: {job['name']} has not finished: {job['unfinished']}"
            raise ReproduceError(f"{text}; give it a later `until`, or less to do")


def doubts(report: Report) -> list[str]:
    """Return why the throughputs of a run's jobs say little, if they do."""
    return [
        f"{job['name']} is not measured: {measurement['completed']} completed in "
        f"{1e3 * measurement['window_s']:.3g} ms, {measurement['needed']} needed"
        for job in report["jobs"]
        if not (measurement := job["measurement"])["enough"]
    ]


def throughput(job: Report, value: float) -> float:
    """Return a throughput of a job's; NaN where too little was completed to measure one."""
    return float(value) if job["measurement"]["enough"] else math.nan


@functools.cache
def _program() -> str:
    """Return a number that stands for the compiled simulator."""
    from fanin import _fanin

    assert _fanin.__file__ is not None
    return hashlib.sha256(Path(_fanin.__file__).read_bytes()).hexdigest()


def _drawn(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario with its times drawn: the same ones wherever seed and order are."""
    dice = random.Random(seed)

    def value(given: Any) -> Any:
        if isinstance(given, Between):
            return f"{dice.uniform(given.least_ms, given.most_ms):.6f}ms"
        if isinstance(given, Mapping):
            return {key: value(inner) for key, inner in given.items()}
        if isinstance(given, list):
            return [value(inner) for inner in given]
        return given

    drawn: Scenario = value(scenario)
    return drawn


def _environment() -> dict[str, str]:
    """Return an environment in which `python -m fanin` is this package, wherever it was found."""
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def own_tables(scenario: Scenario) -> Scenario:
    """Return the scenario with what its jobs' systems alone have in the systems' own tables.

    Experiments write jobs flat, for a key is named where it varies.
    """

    def job(flat: Mapping[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in flat.items() if key in OWN}
        rest = {key: value for key, value in flat.items() if key not in OWN}
        return {**rest, flat["system"]: own} if own else rest

    jobs = [job(flat) for flat in scenario.get("job", [])]
    return {**scenario, "job": jobs} if jobs else scenario


def toml(scenario: Scenario) -> str:
    """Write a scenario file."""
    return "\n".join(_table(scenario, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: str) -> list[str]:
    lines = [f"{key} = {_plain(value)}" for key, value in table.items() if not _is_nested(value)]
    for key, value in table.items():
        if not _is_nested(value):
            continue
        inner = f"{path}{key}"
        if isinstance(value, Mapping):
            lines += ["", f"[{inner}]", *_table(value, f"{inner}.")]
        else:
            for one in value:
                lines += ["", f"[[{inner}]]", *_table(one, f"{inner}.")]
    return lines


def _is_nested(value: Any) -> bool:
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return is_tables or isinstance(value, Mapping)


def _plain(value: Any) -> str:
    # Numbers, strings, booleans and lists of them are written alike in TOML and in JSON.
    return json.dumps(value)
