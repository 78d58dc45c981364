"""Runs PyTorch's own process group tests against a backend, and writes down what became of each.

    python tests/torch_suite/run.py --backend fanin --world-size 2 --json fanin.json
    python tests/torch_suite/run.py --backend gloo  --world-size 2 --json gloo.json
    python tests/torch_suite/compare.py fanin.json gloo.json

Each test has processes of its own: one that judges and one for each rank, all of them killed when
the test's time is up. A switch is started for the run. Ends with status 0 whenever all tests were
run: what may fail is for `compare.py` to say.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import suite

# The characters that are kept of the output of a test that failed.
OUTPUT_MAX = 6000

SWITCH = """
import sys
from fanin import _fanin
switch = _fanin.Switch()
print(switch.address, flush=True)
sys.stdin.read()
switch.stop()
"""

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Outcome:
    """What became of one test: "passed", "failed" or "skipped", and why if not the first."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0
    output: str = ""


@contextlib.contextmanager
def switch() -> Iterator[str]:
    """A switch in a process that ends with this one, however this one ends: its stdin is closed."""
    command = [sys.executable, "-c", SWITCH]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("the switch did not start")
        yield address
        process.stdin.close()


class RunningTest:
    """One test in a process group of its own."""

    def __init__(self, case: suite.Case, name: str) -> None:
        self.name = name
        self._began = time.monotonic()
        # Open for as long as this lives.
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.verdict, theirs = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_judge, args=(case, name, self._log, theirs))
        self._process.start()
        theirs.close()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def outcome(self, limit: float) -> Outcome | None:
        """What became of it; None while it runs. Kills it, and calls it failed, after `limit` s."""
        if self.verdict.poll():
            with contextlib.suppress(EOFError):  # it died: the reason is in its output
                return self._end(*self.verdict.recv())
            self._process.join(1)
            return self._end("failed", f"the test's process died: {self._process.exitcode}")
        if self.seconds() < limit:
            return None
        return self._end("failed", f"hung: not done within {limit:.0f} s")

    def _end(self, outcome: str, reason: str) -> Outcome:
        seconds = self.seconds()
        self.kill()
        self._log.seek(0)
        output = self._log.read()[-OUTPUT_MAX:] if outcome == "failed" else ""
        self._log.close()
        return Outcome(outcome, reason, round(seconds, 2), output)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            assert self._process.pid is not None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # should it not have got so far as to have a group
        self._process.join()
        self.verdict.close()


def _judge(case: suite.Case, name: str, log: IO[str], verdict: Connection) -> None:
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    result = unittest.TestResult()
    case(name).run(result)
    problems = [text for _, text in result.failures + result.errors]
    if problems:
        print(*problems, sep="\n", flush=True)
        verdict.send(("failed", _last_error(problems[0])))
    elif result.skipped:
        verdict.send(("skipped", result.skipped[0][1]))
    else:
        verdict.send(("passed", ""))


def _last_error(text: str) -> str:
    """The line of tracebacks that names an exception: others may come after it."""
    errors = [
        line for line in text.splitlines() if re.match(r"[A-Za-z_.]+(Error|Exception)\b", line)
    ]
    return errors[-1] if errors else text.strip().splitlines()[-1]


def run(tests: dict[str, suite.Case], jobs: int, limit: float) -> dict[str, Outcome]:
    """All the tests, `jobs` at a time; says on stderr how each ended."""
    waiting = sorted(tests, reverse=True)
    running: list[RunningTest] = []
    outcomes: dict[str, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                running.append(RunningTest(tests[name], name))
            wait([test.verdict for test in running], timeout=1.0)
            for test in list(running):
                outcome = test.outcome(limit)
                if outcome is not None:
                    running.remove(test)
                    outcomes[test.name] = outcome
                    count = f"{len(outcomes):4}/{len(tests)}"
                    say = f"{count} {outcome.outcome:7} {outcome.seconds:6.1f} s  {test.name}"
                    print(f"{say}  {outcome.reason}".rstrip(), file=sys.stderr)
    finally:
        for test in running:
            test.kill()
    return dict(sorted(outcomes.items()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=["fanin", "gloo"], required=True)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="of names, as in a shell; repeatable"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for each test")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument(
        "--import-as",
        action="append",
        metavar="NAME",
        help="the backend that the suite's decorators see; repeatable: the first to admit a test "
        "has it (gloo, then mpi)",
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tests end as well
    # Before torch is loaded: the switch's process needs none of it.
    with switch() as address:
        os.environ["FANIN_SWITCH"] = address
        import_as = given.import_as or ["gloo", "mpi"]
        tests = {
            name: case
            for name, case in suite.load(
                given.backend, import_as, given.world_size, given.timeout
            ).items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in given.only or ["*"])
        }
        if not tests:
            print(f"no test has a name like {' or '.join(given.only)}", file=sys.stderr)
            return 2
        outcomes = run(tests, given.jobs, given.timeout)
    given.json.write_text(json.dumps(report(given, outcomes), indent=1) + "\n")
    counts = {
        kind: sum(outcome.outcome == kind for outcome in outcomes.values())
        for kind in ("passed", "failed", "skipped")
    }
    print(f"{given.backend}, {given.world_size} ranks:", *(f"{n} {k}" for k, n in counts.items()))
    return 0


def report(given: argparse.Namespace, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    import torch

    return {
        "backend": given.backend,
        "world_size": given.world_size,
        "torch": torch.__version__,
        "tests": {name: vars(outcome) for name, outcome in outcomes.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
