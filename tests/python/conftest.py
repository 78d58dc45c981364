"""Fixtures: a switch in this process, a switch in a process of its own, and ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fanin import _fanin
from ranks import Ranks, wait_until


@pytest.fixture(scope="session")
def switch() -> Iterator[str]:
    """The address of a switch that all tests share, as jobs of several users share one."""
    running = _fanin.Switch()
    yield running.address
    running.stop()


Launch = Callable[..., Ranks]


@pytest.fixture
def launch(switch: str) -> Iterator[Launch]:
    """``launch(body, world_size, *args)``: the body in that many processes."""
    started: list[Ranks] = []

    def start(body: Callable[..., Any], world_size: int, *args: Any, at: str = switch) -> Ranks:
        started.append(Ranks(body, world_size, at, args))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


class SwitchProcess:
    """`fanin switch` (or `server`) as a user runs it, so that it can be killed."""

    def __init__(self, *options: str, command: str = "switch") -> None:
        self.options = options
        self.command = command
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "fanin", self.command]
        command += ["--listen", self.address, *self.options]
        process = subprocess.Popen(command)
        self.process = process

        def answers() -> bool:
            assert process.poll() is None, f"fanin {self.command} ended: {process.returncode}"
            host, port = self.address.split(":")
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return False
            return True

        wait_until(answers, "the switch listens")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def switch_process() -> Iterator[SwitchProcess]:
    """A switch that runs, and that the test may kill and start again on the same port."""
    process = SwitchProcess()
    process.start()
    yield process
    process.kill()
