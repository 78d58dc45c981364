"""Files that are a bench and the program of its ranks, one in each machine of a laboratory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab

SWITCH_AT = f"{SWITCH_ADDRESS}:4800"
Rank = Callable[[argparse.Namespace], Any]
"""What a rank does; it returns what can be said as JSON."""


def answers(lab: Netlab, file: str, told: Mapping[str, Any]) -> list[Any]:
    """Return what each worker's rank of `file` returns, which is `told` that and its `rank`.

    Ends the program if a rank fails.
    """
    ranks = [
        lab.popen(
            f"w{rank}",
            [sys.executable, file, "rank", json.dumps({**told, "rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(lab.workers)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def start_switch(lab: Netlab) -> None:
    """Start `fanin switch` at `SWITCH_AT`, which has the links of all; it ends with `lab`."""
    command = [sys.executable, "-m", "fanin", "switch", "--listen", SWITCH_AT]
    options = ["--json", "--log", "error"]
    switch = lab.popen(SWITCH, [*command, *options], stdout=subprocess.PIPE, text=True)
    assert switch.stdout is not None
    if not switch.stdout.readline():
        sys.exit("the switch ended")


def run(main: Callable[[], int], be_rank: Rank) -> NoReturn:
    """Be the bench, or the rank that `answers` started, and end."""
    if sys.argv[1:2] != ["rank"]:
        sys.exit(main())
    print(json.dumps(be_rank(argparse.Namespace(**json.loads(sys.argv[2])))), flush=True)
    os._exit(0)  # PyTorch may abort a process that is taken apart
