"""Runs of `fanin sim`, many at a time; what went in and what came out is kept."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fanin._simulation import StoppedError, program

from fanin_lab.sweep.progress import Progress

Report = Mapping[str, Any]
"""`result` of the JSON that `fanin sim` writes."""
_T = TypeVar("_T")
_Found = TypeVar("_Found")


class Place(Protocol):
    """The place where simulations run: `fanin._simulation.Processes`, or a cluster."""

    def simulate(
        self, name: str, text: str, seed: int, *, record: bool = False
    ) -> tuple[bytes, str]:
        """Play a scenario file's text; return the JSON, and what is wrong: nothing, if empty."""

    def stop(self) -> None:
        """End those that run, and begin none."""


@dataclass(frozen=True)
class Run:
    """A scenario that was played with a seed."""

    scenario: Path
    seed: int
    result: Path
    """The JSON's path; the file is missing when a rule was broken."""
    wrong: str
    """Why it failed; empty if it did not."""

    @property
    def replay(self) -> str:
        """The command that plays it again."""
        return f"fanin sim {shlex.quote(str(self.scenario))} --seed {self.seed}"

    @property
    def has_result(self) -> bool:
        """Whether it came to its end; work may be unfinished there."""
        return self.result.exists()

    def document(self) -> Mapping[str, Any]:
        """Return the JSON that `fanin sim` wrote."""
        document: Mapping[str, Any] = json.loads(self.result.read_text())
        return document

    def report(self) -> Report:
        """Return what was found."""
        report: Report = self.document()["result"]
        return report


def scenario_path(out: Path, name: str, seed: int) -> Path:
    """Return where the scenario of a run is written."""
    return out / "scenarios" / f"{name}-{seed}.toml"


class Runner:
    """Plays scenarios with seeds, so many at a time, and keeps them in the folder ``out``.

    What has been played there by the same program, with the same scenario and seed, is not played
    again: it would give the same bytes. So what was stopped goes on.
    """

    def __init__(
        self, out: Path, place: Place, jobs: int, progress: Progress, *, record: bool = False
    ):
        self.played: dict[tuple[str, int], Run] = {}
        """The runs that have a result, by name and seed."""
        self._out = out
        self._record = record
        self._place = place
        self._progress = progress
        self._pool = ThreadPoolExecutor(jobs)
        self._stopped = threading.Event()
        for folder in ("scenarios", "results"):
            (out / folder).mkdir(parents=True, exist_ok=True)

    def submit(self, name: str, text: str, seed: int) -> Future[Run]:
        """Play a scenario file's text with a seed. No two runs have the same name and seed."""
        self._progress.expect(1)
        return self._pool.submit(self._play, name, text, seed)

    def each(
        self, what: str, function: Callable[[_T], _Found], items: Sequence[_T]
    ) -> list[_Found]:
        """Return what the function finds for each item; as many at a time as simulations."""

        def one(item: _T) -> _Found:
            if self._stopped.is_set():
                raise StoppedError
            found = function(item)
            self._progress.done(what)
            return found

        self._progress.expect(len(items))
        return list(self._pool.map(one, items))

    def stop(self) -> None:
        """End the simulations that run, and begin no other."""
        self._stopped.set()
        self._place.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _play(self, name: str, text: str, seed: int) -> Run:
        if self._stopped.is_set():
            raise StoppedError
        # A result with a recording is one without, too.
        recorded, figures = (
            hashlib.sha256(f"{program()}{kind} {seed} {text}".encode()).hexdigest()
            for kind in (" recorded", "")
        )
        key = recorded if self._record else figures
        file = scenario_path(self._out, name, seed)
        result = self._out / "results" / f"{name}-{seed}.json"
        played = result.with_suffix(".key")
        before, _, wrong = played.read_text().partition("\n") if played.exists() else ("", "", "")
        if before not in {recorded, key}:
            for old in (played, result):
                old.unlink(missing_ok=True)
            file.write_text(text)
            found, wrong = self._place.simulate(str(file), text, seed, record=self._record)
            # What broke a rule has no result, and is played again.
            if found:
                result.write_bytes(found)
                played.write_text(f"{key}\n{wrong}")
        self._progress.done(name)
        run = Run(file, seed, result, wrong)
        if run.has_result:
            self.played[name, seed] = run
        return run
