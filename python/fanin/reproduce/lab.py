"""Runs what experiments ask for as processes, and keeps what went in and what came out.

`fanin sim` and `fanin plan` a few at a time; `fanin bench`, which measures, alone.
"""

from __future__ import annotations

import json
import os
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
_T = TypeVar("_T")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of one figure in runs with different seeds."""
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Runs:
    """One scenario, played with every seed."""

    reports: Sequence[Report]

    def spread(self, figure: Callable[[Report], float]) -> Spread:
        """Return what `figure` finds in the reports."""
        return Spread.of([figure(report) for report in self.reports])


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

    def play(self, scenarios: Mapping[str, Scenario], *, once: bool = False) -> dict[str, Runs]:
        """Play every scenario with every seed; return the runs by the scenarios' names.

        With ``once``, only with the first seed.
        """
        seeds = self.seeds[:1] if once else self.seeds
        for name, scenario in scenarios.items():
            self._scenario(name).write_text(toml(scenario))
        self._progress.expect(len(scenarios) * len(seeds))
        runs = {
            name: [self._pool.submit(self._simulate, name, seed) for seed in seeds]
            for name in scenarios
        }
        return {name: Runs([run.result() for run in of_one]) for name, of_one in runs.items()}

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

    def bench(self, name: str, arguments: Sequence[str]) -> Report:
        """Run `fanin bench allreduce`, of one setting; return that of the JSON that it writes."""
        result = self.out / "results" / f"{name}.json"
        command = [sys.executable, "-m", "fanin", "bench", "allreduce", *arguments]
        command += ["--json", str(result)]
        self._progress.expect(1)
        ended = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if ended.returncode:
            raise ReproduceError(f"{name}: {ended.stderr.strip()}")
        self._progress.done(name)
        (run,) = json.loads(result.read_text())["runs"]
        return dict(run)

    def stop(self) -> None:
        """Begin no further simulation."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _scenario(self, name: str) -> Path:
        return self.out / "scenarios" / f"{name}.toml"

    def _simulate(self, name: str, seed: int) -> Report:
        if self._stopped.is_set():
            raise ReproduceError("stopped")
        result = self.out / "results" / f"{name}-{seed}.json"
        command = [sys.executable, "-m", "fanin", "sim", str(self._scenario(name))]
        command += ["--seed", str(seed), "--json", str(result)]
        result.unlink(missing_ok=True)
        ended = subprocess.run(command, capture_output=True, text=True, env=_environment())
        # With unfinished jobs it fails, and writes its result nevertheless.
        if ended.returncode and not result.exists():
            raise ReproduceError(f"{name}: {ended.stderr.strip()}")
        self._progress.done(name)
        report: Report = json.loads(result.read_text())["result"]
        self.doubts += [f"{name}, seed {seed}: {doubt}" for doubt in doubts(report)]
        return report


def doubts(report: Report) -> list[str]:
    """Return why the throughputs of a run's jobs say little, if they do."""
    found = []
    for job in report["jobs"]:
        measurement = job["measurement"]
        if job["unfinished"] is not None:
            found.append(f"{job['name']} has not finished")
        if not measurement["enough"]:
            found.append(
                f"{job['name']} is not measured: {measurement['completed']} completed in "
                f"{1e3 * measurement['window_s']:.3g} ms, {measurement['needed']} needed"
            )
    return found


def _environment() -> dict[str, str]:
    """Return an environment in which `python -m fanin` is this package, wherever it was found."""
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def toml(scenario: Scenario) -> str:
    """Write a scenario file."""
    plain = [line for key, value in scenario.items() if (line := _plain(key, value))]
    for key, value in scenario.items():
        if isinstance(value, Mapping):
            plain += ["", f"[{key}]", *_table(value)]
        elif _is_tables(value):
            for table in value:
                plain += ["", f"[[{key}]]", *_table(table)]
    return "\n".join(plain) + "\n"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _plain(key: str, value: Any) -> str | None:
    if isinstance(value, Mapping) or _is_tables(value):
        return None
    # Numbers, strings, booleans and lists of them are written alike in TOML and in JSON.
    return f"{key} = {json.dumps(value)}"


def _table(table: Mapping[str, Any]) -> list[str]:
    return [line for key, value in table.items() if (line := _plain(key, value))]
