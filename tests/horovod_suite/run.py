"""Runs Horovod's own tests against fanin.horovod, from a fetched copy of Horovod.

    git clone https://github.com/horovod/horovod
    python tests/horovod_suite/run.py --horovod horovod --world-size 2
    python tests/horovod_suite/run.py --horovod horovod --world-size 2 --suite tensorflow

They import `horovod.torch` or `horovod.tensorflow`, and `shim/` gives them fanin's. Each test has
processes of its own, one for each rank, which are killed when the test's time is up; it passes if
it does on all of them.
Ends with status 1 if a test fails that `exceptions.toml` does not name with its reason, and if one
is named there that passes: the file says what is, not what was.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import unittest
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import pytest
import torch

HERE = Path(__file__).parent
FOLDER = Path("test/parallel")
# The file and the class of each suite.
SUITES = {
    "torch": ("test_torch", "TorchTests"),
    "tensorflow": ("test_tensorflow", "TensorFlowTests"),
    "tensorflow_process_sets": ("test_tensorflow_process_sets", "TensorFlowProcessSetsTests"),
    "tensorflow2_keras": ("test_tensorflow2_keras", "Tf2KerasTests"),
}
EXCEPTIONS = HERE / "exceptions.toml"
OUTPUT_MAX = 4000
# Optimizers that torch has got since, and that do not take the parameters that the tests give to
# all of torch's: they are kept from being one of those.
SINCE = ("Muon",)

_context = multiprocessing.get_context("fork")

Case = type[unittest.TestCase]


@dataclass(frozen=True)
class Outcome:
    """What became of a test, or of one rank of it: "passed", "failed" or "skipped", and why."""

    outcome: str
    reason: str = ""


def load(horovod: Path, suite: str) -> Case:
    """The tests' class. The process is left without further threads, so that it can be forked."""
    sys.path.insert(0, str(HERE / "shim"))
    sys.path.insert(0, str(horovod / FOLDER))
    file, tests = SUITES[suite]
    if suite != "torch":
        os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
        once: Any = importlib.import_module("tensorflow.python.framework.test_util")
        # Eagerly, and not in sessions of TensorFlow 1, too.
        once.run_all_in_graph_and_eager_modes = lambda case: case
        # As unittest knows it: pytest does not run these tests.
        pytest.skip = _skip  # type: ignore[assignment]
        loaded: Case = getattr(importlib.import_module(file), tests)
        return loaded
    importlib.import_module("torch._dynamo")  # optimizers import it when they step
    optimizers: Any = importlib.import_module("torch.optim")
    for name in SINCE:
        getattr(optimizers, name).__module__ = "since"
    case: Case = getattr(importlib.import_module(file), tests)
    return case


def _skip(reason: str) -> None:
    raise unittest.SkipTest(reason)


def play(case: Case, name: str, world_size: int, limit: float) -> tuple[Outcome, str]:
    """One test on all its ranks, and what they printed if it failed."""
    # In a process of its own: it has threads, and this one is forked.
    told, theirs = _context.Pipe(duplex=False)
    store = _context.Process(target=_store, args=(theirs,))
    store.start()
    theirs.close()
    port = told.recv()
    pipes: list[Connection] = []
    processes = []
    logs: list[IO[str]] = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        # Open for as long as the test runs.
        logs.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "HOROVOD_RANK": str(rank),  # as the tests ask for it
            "HOROVOD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # Tensors of GPUs are scaled as those of the host are: Horovod without GPU operations.
            "HOROVOD_MIXED_INSTALL": "1",
        }
        if 0 < torch.cuda.device_count() < world_size:
            # Tests take the GPU of their local rank: each rank is the first of a machine.
            environment["GROUP_RANK"] = str(rank)
        process = _context.Process(target=_rank, args=(case, name, environment, logs[-1], theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes = _outcomes(pipes, time.monotonic() + limit, limit)
    for process in processes:
        process.join(0.5 if all(o.outcome != "failed" for o in outcomes) else 0)
        process.kill()
        process.join()
    store.kill()
    store.join()
    told.close()
    text = ""
    for rank, log in enumerate(logs):
        log.seek(0)
        text += f"--- rank {rank}\n{log.read()[-OUTPUT_MAX:]}\n"
        log.close()
    return _of_all(outcomes), text


def _store(told: Connection) -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send(store.port)
    signal.pause()


def _outcomes(pipes: list[Connection], end: float, limit: float) -> list[Outcome]:
    hung = Outcome("failed", f"hung: not done within {limit:.0f} s")
    outcomes = dict.fromkeys(pipes, hung)
    waiting = list(pipes)
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(waiting, left):
            assert isinstance(pipe, Connection)
            outcomes[pipe] = Outcome("failed", "the process died")
            with contextlib.suppress(EOFError):
                outcomes[pipe] = pipe.recv()
            waiting.remove(pipe)
            if outcomes[pipe].outcome == "failed":
                end = min(end, time.monotonic() + 10.0)  # the others may wait for it
    return [outcomes[pipe] for pipe in pipes]


def _of_all(outcomes: list[Outcome]) -> Outcome:
    """That of the rank for which it is worst; a hang is worth less than what led to it."""
    rank = {"failed": 0, "passed": 1, "skipped": 2}
    return min(outcomes, key=lambda o: (rank[o.outcome], o.reason.startswith("hung")))


def _rank(
    case: Case, name: str, environment: dict[str, str], log: IO[str], verdict: Connection
) -> None:
    os.environ.update(environment)
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    result = unittest.TestResult()
    try:
        if getattr(getattr(case, name), "pytestmark", None):
            # `pytest.mark.skip` is pytest's: played all the same.
            print("marked:", getattr(case, name).pytestmark)
        # As a suite: it sets the class up first.
        unittest.TestSuite([case(name)]).run(result)
    except BaseException:
        traceback.print_exc()
    problems = [text for _, text in result.failures + result.errors]
    print(*problems, sep="\n", flush=True)
    if problems or not result.testsRun:
        last = problems[0].strip().splitlines()[-1] if problems else "it did not run"
        verdict.send(Outcome("failed", last))
    elif result.skipped:
        verdict.send(Outcome("skipped", result.skipped[0][1]))
    else:
        verdict.send(Outcome("passed"))
    # The job's end is a part of the test.
    sys.modules["fanin.horovod.world"].shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--horovod", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--suite", choices=SUITES, default="torch")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="of names, as in a shell; repeatable"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each test")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    case = load(given.horovod, given.suite)
    names = [
        name
        for name in unittest.defaultTestLoader.getTestCaseNames(case)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in given.only or ["*"])
    ]
    if not names:
        print(f"no test has a name like {' or '.join(given.only)}", file=sys.stderr)
        return 2
    listed: dict[str, Any] = tomllib.loads(EXCEPTIONS.read_text()).get(given.suite, {})
    size = given.world_size
    known = {name for name, entry in listed.items() if entry.get("ranks", size) == size}
    outcomes: dict[str, Outcome] = {}
    for number, name in enumerate(names, 1):
        began = time.monotonic()
        outcome, text = play(case, name, given.world_size, given.timeout)
        outcomes[name] = outcome
        seconds = time.monotonic() - began
        say = f"{number:4}/{len(names)} {outcome.outcome:7} {seconds:6.1f} s  {name}"
        print(f"{say}  {outcome.reason}".rstrip(), flush=True)
        if outcome.outcome == "failed" and name not in known:
            print(text, file=sys.stderr, flush=True)
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    print(
        f"{given.world_size} ranks: "
        + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    )
    failed = {name for name, outcome in outcomes.items() if outcome.outcome == "failed"}
    for name in sorted(failed - known):
        print(f"failed, and no exception: {name}")
    stale = [name for name in known if name in outcomes and name not in failed]
    for name in stale:
        print(f"named in exceptions.toml, and did not fail: {name}")
    return 1 if failed - known or stale else 0


if __name__ == "__main__":
    sys.exit(main())
