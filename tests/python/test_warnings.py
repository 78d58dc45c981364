"""What a rank says on stderr although nobody asked for its logs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SwitchProcess
from ranks import DEADLINE, wait_until

# Each line of its input is a number of all-reduces; the answer is one line.
RANK = """
import sys, numpy, fanin
array = numpy.ones(100_000, numpy.float32)
with fanin.connect(sys.argv[1], job="warned", rank=0, world_size=1) as group:
    for line in sys.stdin:
        for _ in range(int(line)):
            group.all_reduce(array)
        print("done", flush=True)
"""


class Rank:
    """A rank whose stderr is a file."""

    def __init__(self, switch: str, stderr: Path) -> None:
        self._stderr = stderr
        with stderr.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RANK, switch],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | {"FANIN_LOG": ""},
            )

    def all_reduce(self, times: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.said("")

    def said(self, about: str) -> list[str]:
        """The lines of its stderr that have this in them."""
        return [line for line in self._stderr.read_text().splitlines() if about in line]


@pytest.fixture
def rank(switch_process: SwitchProcess, tmp_path: Path) -> Iterator[Rank]:
    started = Rank(switch_process.address, tmp_path / "stderr")
    yield started
    started.process.communicate(timeout=DEADLINE)


def test_a_restart_of_the_switch_is_told_once(rank: Rank, switch_process: SwitchProcess) -> None:
    rank.all_reduce(1)
    assert not rank.said("restarted")
    for _ in range(2):
        switch_process.kill()
        switch_process.start()
        wait_until(lambda: bool(rank.said("restarted")), "the rank says so")
        rank.all_reduce(1)
    (line,) = rank.said("restarted")
    assert line.startswith(f"fanin: rank 0: switch {switch_process.address} restarted")
