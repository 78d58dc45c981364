"""Simulations as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from importlib.util import find_spec
from typing import Any

from fanin._simulation import StoppedError, program, simulate_on_node

from fanin_lab.sweep import SweepError

ANSWER_S = 30.0
"""How long a cluster may take to answer: Ray waits for minutes, and cannot be interrupted."""
_LOOK_S = 0.5
"""How often who waits for a task looks whether all was stopped."""
_END_S = 1.0
"""How long tasks may take to end by themselves before they are cancelled. Ray ends this process if
it cancels a task as that ends (ray-project/ray#54785), and tasks that all fail do so together."""
_HOST_PORT = re.compile(r"([\w.-]+):(\d+)")
# In a process of its own, which can be ended while Ray waits.
_TRY = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40)"


class Cluster:
    """A cluster whose nodes have the same build of fanin."""

    def __init__(self, address: str):
        _answers(address)
        import ray

        self._ray: Any = ray
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        # Else tasks go to this machine's node until half of it is busy.
        self._task = ray.remote(simulate_on_node).options(scheduling_strategy="SPREAD")
        self._lock = threading.Condition()
        self._running: set[Any] = set()
        self._stopped = False
        self.nodes: Counter[str] = Counter()
        """How many simulations each node has played, by host and Ray's number."""

    @property
    def cores(self) -> int:
        """How many tasks run at a time."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def simulate(
        self, name: str, text: str, seed: int, *, record: bool = False
    ) -> tuple[bytes, str]:
        """Play a scenario file's text; return the JSON, and what is wrong: nothing, if empty."""
        with self._lock:
            if self._stopped:
                raise StoppedError
            task = self._task.remote(program(), name, text, seed, record)
            self._running.add(task)
        try:
            # What is cancelled need not become ready: a node may be gone.
            while not self._ray.wait([task], timeout=_LOOK_S)[0]:
                if self._stopped:
                    raise StoppedError
            found, wrong, node = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            if self._stopped:
                raise StoppedError from None
            raise SweepError(
                f"the cluster cannot run a simulation: {_last_line(str(error))}; every node needs "
                "the same fanin as this machine, from the same wheel"
            ) from error
        finally:
            with self._lock:
                self._running.discard(task)
                self._lock.notify_all()
        with self._lock:
            self.nodes[node] += 1
        return found, wrong

    def stop(self) -> None:
        """End what runs, and leave the cluster as it was."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        if running:
            count = len(running)
            _, running = self._ray.wait(
                running, num_returns=count, timeout=_END_S, fetch_local=False
            )
        for task in running:
            self._ray.cancel(task, force=True)
        with self._lock:
            # Ray never returns to a thread that waits for a task when it is shut down.
            self._lock.wait_for(lambda: not self._running)
        self._ray.shutdown()


def _answers(address: str) -> None:
    """Make sure that there is a cluster, in bounded time."""
    if find_spec("ray") is None:
        raise SweepError("--ray needs Ray, of the cluster's version: pip install ray")
    nobody = f"no Ray cluster answers at {address}; is it running there (ray start --head)?"
    place = _HOST_PORT.fullmatch(address)
    if place is not None:
        try:
            socket.create_connection((place[1], int(place[2])), ANSWER_S).close()
        except OSError as error:
            raise SweepError(f"{nobody} ({error.strerror or error})") from None
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, address],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        raise SweepError(f"{nobody} (waited {ANSWER_S:.0f} s)") from None
    if tried.returncode:
        raise SweepError(f"{nobody} ({_last_line(tried.stderr)})")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
