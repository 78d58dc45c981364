"""Runs what experiments ask for as processes, and keeps what went in and what came out.

`fanin sim` and `fanin plan` a few at a time; `fanin bench`, which measures, alone.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fanin import _fanin
from fanin._simulation import Processes

from fanin_lab.environment import environment as lab_environment
from fanin_lab.papers import ReproduceError
from fanin_lab.papers.sources import digest
from fanin_lab.sweep.progress import Progress
from fanin_lab.sweep.runs import Report, Run, Runner
from fanin_lab.sweep.scenario import Scenario, toml
from fanin_lab.sweep.spread import Spread

__all__ = ["Between", "Lab", "Report", "Runs", "Scenario", "Spread", "doubts", "throughput"]

_T = TypeVar("_T")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Between:
    """A time that the dice of a seed choose for a scenario, evenly."""

    least_ms: float
    most_ms: float


@dataclass(frozen=True)
class Runs:
    """A scenario, played with every seed."""

    reports: Sequence[Report]

    def samples(self, figure: Callable[[Report], float]) -> list[float]:
        """Return what `figure` finds in each report."""
        return [figure(report) for report in self.reports]

    def spread(self, figure: Callable[[Report], float]) -> Spread:
        """Return what `figure` finds in the reports."""
        return Spread.of(self.samples(figure))


class Lab:
    """The place where an experiment's scenarios are played."""

    def __init__(self, out: Path, seeds: Sequence[int], jobs: int, quick: bool, progress: Progress):
        self.out = out
        self.seeds = seeds
        self.quick = quick
        """Whether coarse figures will do."""
        self.doubts: list[str] = []
        """Runs with too little completed for a throughput."""
        self._progress = progress
        self._runner = Runner(out, Processes(), jobs, progress)

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

        def begun(name: str, scenario: Scenario, seed: int) -> Future[Run]:
            return self._runner.submit(name, toml(own_tables(_drawn(scenario, seed))), seed)

        running = {
            name: [begun(name, scenario, seed) for seed in seeds]
            for name, scenario in scenarios.items()
        }
        played = {
            name: [_report(name, run.result()) for run in of_one]
            for name, of_one in running.items()
        }
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
        return self._runner.each(what, function, items)

    def trained(
        self, train: Callable[[_T], Sequence[float]], items: Sequence[_T], module: str
    ) -> list[list[float]]:
        """Return the curve that `train` finds for each item; as many at a time as simulations.

        A curve must depend on nothing but the item's `repr` and the code of `module`, with all
        that this imports. So it is kept, as results of simulations are.
        """
        code = digest(module)
        folder = self.out / "trainings"
        folder.mkdir(parents=True, exist_ok=True)

        def one(item: _T) -> list[float]:
            kept = folder / f"{hashlib.sha256(f'{code} {item!r}'.encode()).hexdigest()}.json"
            if not kept.exists():
                # Two threads may train the same; each file appears whole.
                begun = kept.with_suffix(f".{threading.get_ident()}")
                begun.write_text(json.dumps(list(train(item))))
                begun.rename(kept)
            curve: list[float] = json.loads(kept.read_text())
            return curve

        return self.each("training", one, items)

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
        environment = {**lab_environment(), **(settings or {})}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise ReproduceError(f"{name}: {ended.stderr.strip()}")
        self._progress.done(name)
        (run,) = json.loads(result.read_text())["runs"]
        return dict(run)

    @property
    def played(self) -> list[tuple[str, Path]]:
        """The name of each simulation's scenario, and the path of its result."""
        return [(name, run.result) for (name, _), run in sorted(self._runner.played.items())]

    def stop(self) -> None:
        """End the simulations that run, and begin no other."""
        self._runner.stop()


def _report(name: str, run: Run) -> Report:
    # With unfinished jobs it fails, and has a result nevertheless.
    if not run.has_result:
        raise ReproduceError(f"{name}: {run.wrong}\nreplay: {run.replay}")
    return run.report()


def _refuse_unfinished(name: str, report: Report) -> None:
    for job in report["jobs"]:
        if job["unfinished"] is not None:
            text = f"{name}: {job['name']} has not finished: {job['unfinished']}"
            raise ReproduceError(f"{text}; give it a later `until`, or less to do")
    for servers in report["parameter_servers"]:
        late = servers["flow_times"]["unfinished"] + servers["unopened"]
        if late:
            text = f"{name}: {late} flows of {servers['name']} have not arrived"
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


def own_tables(scenario: Scenario) -> Scenario:
    """Return the scenario with what its jobs' systems alone have in the systems' own tables.

    Experiments write jobs flat, for a key is named where it varies.
    """

    def job(flat: Mapping[str, Any]) -> dict[str, Any]:
        of_system = _fanin.system_keys(flat["system"])
        own = {key: value for key, value in flat.items() if key in of_system}
        rest = {key: value for key, value in flat.items() if key not in of_system}
        return {**rest, flat["system"]: own} if own else rest

    jobs = [job(flat) for flat in scenario.get("job", [])]
    return {**scenario, "job": jobs} if jobs else scenario
