"""Trainings of a script as processes, each to the target or to the script's own end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanin.profile import Metric

from fanin_lab.environment import environment
from fanin_lab.profiler import ProfileError
from fanin_lab.profiler.drops import Losses
from fanin_lab.profiler.tolerance import epochs_to

GRACE_S = 30.0
"""How long a script may take to end that is told to; torchrun gives its ranks as long."""
LINES = 20
"""Of what a script said, where it failed."""


@dataclass(frozen=True)
class Training:
    """What came of one."""

    curve: Sequence[float]
    """The metric after each epoch, until the target was reached."""
    metric: Metric
    epochs: float
    """To the target, as `epochs_to` counts; infinite where it was not reached."""
    sent: int
    """Packets of gradients, of all groups."""
    lost: int


class Trials:
    """Runs the script; `run` may be called from several threads."""

    def __init__(
        self, script: Sequence[str], processes: int | None, target: float, jobs: int, out: Path
    ) -> None:
        """Take a script with its arguments.

        ``processes``: as many ranks, by torchrun; None: one process, and no torchrun. ``jobs``: how
        many trainings share the cores. What the script says stands in ``out``/logs.
        """
        self._script = script
        self._processes = processes
        self._target = target
        self._logs = out / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        threads = max(1, len(os.sched_getaffinity(0)) // (jobs * (processes or 1)))
        self._environment = {"OMP_NUM_THREADS": str(threads), **environment()}
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, losses: Losses, seed: int) -> Training:
        """Train once. Raises `ProfileError`, with what the script said, where it fails."""
        name = f"{losses.among}-{100 * losses.probability:g}-{seed}"
        log = self._logs / f"{name}.log"
        with tempfile.TemporaryDirectory(prefix="fanin-profile-") as folder, log.open("wb") as said:
            pipe = Path(folder) / "reports"
            os.mkfifo(pipe)
            what = {"seed": seed, "losses": vars(losses), "reports": str(pipe)}
            reports: list[dict[str, Any]] = []
            with self._started([json.dumps(what), *self._script], said) as process:
                for report in _reports(pipe, process):
                    reports.append(report)
                    if math.isfinite(self._epochs(reports)):
                        break
                else:
                    if status := process.wait():
                        raise ProfileError(_failed(name, status, log, self._processes))
        return self._training(reports)

    def stop(self) -> None:
        """End those that run, and begin none."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    @contextlib.contextmanager
    def _started(self, arguments: Sequence[str], said: Any) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable]
        if self._processes is not None:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(self._processes)]
        with self._lock:
            if self._stopped:
                raise ProfileError("stopped")
            process = subprocess.Popen(
                [*command, "-m", "fanin_lab.profiler.trial", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                # A group of its own, which is ended whole.
                start_new_session=True,
            )
            self._running.add(process)
        try:
            yield process
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)

    def _epochs(self, reports: Sequence[dict[str, Any]]) -> float:
        return epochs_to(self._target, [one["value"] for one in reports], reports[-1]["metric"])

    def _training(self, reports: Sequence[dict[str, Any]]) -> Training:
        if not reports:
            raise ProfileError(
                f"{self._script[0]} ended and has reported nothing: let it call "
                "fanin.profile.report(accuracy=...) or (loss=...) after each epoch"
            )
        metrics = {one["metric"] for one in reports}
        if len(metrics) > 1:
            raise ProfileError(f"{self._script[0]} reports accuracy and loss: report one of them")
        last = reports[-1]
        if last["sent"] == 0:
            raise ProfileError(
                f"{self._script[0]} has handed no gradients to an optimizer of torch.optim, nor to "
                "DistributedDataParallel, in the process that reports: there is nothing to lose"
            )
        curve = [one["value"] for one in reports]
        epochs = self._epochs(reports)
        return Training(curve, last["metric"], epochs, last["sent"], last["lost"])


def _reports(pipe: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what the process reports, until it ends."""
    # For writing as well: so nobody waits for a writer, and there is no end of file between two.
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    ended = os.pidfd_open(process.pid)
    buffered = b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if reading in ready:
                    buffered += os.read(reading, 1 << 16)
                    *lines, buffered = buffered.split(b"\n")
                    yield from map(json.loads, lines)
                elif ended in ready:
                    return
    finally:
        os.close(ended)
        os.close(reading)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its ranks, if they have not ended."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    # What it has left behind, as workers of a DataLoader.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(name: str, status: int, log: Path, processes: int | None) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LINES:]
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    said = "\n".join(lines)
    # As torch says it of a process group where no launcher was.
    has_group = processes is None and "environment variable RANK expected" in said
    cure = ": it is started as one of several ranks, so say --nproc-per-node N" if has_group else ""
    return f"the training {name} ended with {ending}{cure}; {log} ends:\n{said}"
