"""Programs for tests about processes: they are stopped, killed, interrupted, and read."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

import psutil
from ranks import DEADLINE

# The beginning of every rank below: it joins a job by NumPy's way, or a group by torch's.
BY_NUMPY = """
import os, signal, sys, time
import numpy as np
import fanin

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def connect(**keywords):
    return fanin.connect(rank=rank, world_size=world_size, **keywords)

def say(*words):
    print(*words, flush=True)
"""
BY_TORCH = """
import os, signal, sys, time
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def say(*words):
    print(*words, flush=True)
"""


# In the environment of all that a program starts, whatever session or parent it has by then.
MARK = "STARTED_BY_PROGRAM"
_numbers = itertools.count()


class Program:
    """A process whose lines, on standard output and on standard error, can be waited for."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], folder: str | None = None
    ) -> None:
        self._mark = f"{os.getpid()}.{next(_numbers)}"
        # A session of its own, as a terminal's: it can be interrupted with all its children.
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment | {MARK: self._mark},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(line.rstrip())
        self._unread.put(None)

    def line(self, pattern: str, deadline: float = DEADLINE) -> re.Match[str]:
        """The next line in which the pattern is found."""
        while True:
            try:
                line = self._unread.get(timeout=deadline)
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} after:\n{self.text()}") from None
            assert line is not None, f"it ended without {pattern!r}:\n{self.text()}"
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def wait(self, deadline: float = DEADLINE) -> int:
        """The exit status; all lines are in `lines` then, also those of processes that it left."""
        try:
            status = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text()}") from None
        while True:
            try:
                line = self._unread.get(timeout=deadline)
            except queue.Empty:
                raise AssertionError(f"a process of it is left:\n{self.text()}") from None
            if line is None:
                return status
            self.lines.append(line)

    def text(self) -> str:
        while not self._unread.empty():
            self.lines.append(self._unread.get() or "(the end)")
        return "\n".join(self.lines)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process itself, and waits until it is gone."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def end(self) -> None:
        """Kills it with all that it started, also what has a session of its own by now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)
        while left := [each for each in psutil.process_iter() if self._started(each)]:
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            assert not psutil.wait_procs(left, DEADLINE)[1], left

    def _started(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self._mark)
        except (psutil.Error, OSError):
            return False  # gone, or somebody else's


Start = Callable[..., Program]
