"""Programs of ranks beside one switch in a laboratory: what benches of a loss bound share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from fanin_lab.netlab import Netlab, address

SPARE = "s0"
LISTEN = f"{address(SPARE)}:4800"


def answers(lab: Netlab, ranks: int, file: str, told: Sequence[Any]) -> list[Any]:
    """Return what each rank printed as JSON, with the switch on the spare machine.

    A rank is `file` with one argument: its number and what all are `told`, as JSON.
    """
    command = [sys.executable, "-m", "fanin", "switch", "--listen", LISTEN]
    command += ["--json", "--log", "warn"]
    switch = lab.popen(SPARE, command, stdout=subprocess.PIPE, text=True)
    assert switch.stdout is not None
    switch.stdout.readline()
    programs = [
        lab.popen(
            f"w{rank}",
            [sys.executable, file, json.dumps([rank, *told])],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [json.loads(program.communicate()[0]) for program in programs]
    switch.terminate()
    switch.wait()
    return said
