"""`fanin sim` as a process: for who runs it often, on this machine or on a cluster's nodes."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

_STDIN = "/dev/stdin"
_FAILURE = 1
"""The status of a run that failed and says why."""


class StoppedError(Exception):
    """No further simulation begins."""


class Processes:
    """Simulations on this machine, each a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def simulate(
        self, name: str, text: str, seed: int, *, record: bool = False
    ) -> tuple[bytes, str]:
        """Play a scenario file's text; return the JSON, and what is wrong: nothing, if empty.

        ``name`` is the scenario's in messages. With ``record``, the JSON has a recording, too. A
        run that did not finish its work is wrong, and has its JSON nevertheless; a run that broke
        a rule has none. Raises `StoppedError` once it was stopped.
        """
        # No files: whoever ends the process ends all that there is of the run.
        command = [sys.executable, "-m", "fanin", "sim", _STDIN, "--seed", str(seed)]
        with self._lock:
            if self._stopped:
                raise StoppedError
            process = subprocess.Popen(
                [*command, "--json", "-", *(["--record"] if record else [])],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._running.add(process)
        try:
            found, said = process.communicate(text.encode())
        finally:
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            raise StoppedError
        if process.returncode == 0:
            return found, ""
        # How it is played again is the caller's to say, who knows where the scenario lies.
        lines = said.decode(errors="replace").replace(_STDIN, name).splitlines()
        wrong = "\n".join(line for line in lines if not line.startswith("replay: "))
        if process.returncode != _FAILURE or not wrong:
            return b"", f"it ended with status {process.returncode}: {wrong or 'no message'}"
        return found, wrong.removeprefix("fanin: ").strip()

    def stop(self) -> None:
        """End those that run, and begin none."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()


def simulate_on_node(
    expected: str, name: str, text: str, seed: int, record: bool
) -> tuple[bytes, str, str]:
    """Play a scenario in a task of Ray; return what `Processes.simulate` does, and the node.

    ``expected`` is `program` where it was asked for: another one might find something else.
    """
    import ray

    node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"
    if program() != expected:
        raise RuntimeError(f"{node} has another build of fanin; install the same wheel everywhere")
    return (*Processes().simulate(name, text, seed, record=record), node)


@functools.cache
def program() -> str:
    """Return a number that stands for the compiled simulator."""
    from fanin import _fanin

    assert _fanin.__file__ is not None
    return hashlib.sha256(Path(_fanin.__file__).read_bytes()).hexdigest()


def environment() -> dict[str, str]:
    """Return an environment in which `python -m fanin` is this package, wherever it was found."""
    here = str(Path(__file__).parents[1])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
