"""What an open page costs a switch: the CPU time of its threads, and the time of a sum.

`python benches/page.py` writes a part of docs/page.md. Four ranks sum at a switch, all on this
machine, while the page is open and closed by turns. An open page asks for the state once a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import document
from fanin_lab.bench import machine
from performance import FANIN, ROOT

BEGIN = "<!-- what stands from here on is written by `python benches/page.py` -->"
END = "<!-- written by `python benches/page.py` to here -->"
PATH = ROOT / "docs" / "page.md"
RANKS = 4
SECONDS, ROUNDS = 10.0, 7
# The kernel's unit of a thread's CPU time.
TICKS_A_SECOND = 100
# Whoever has looked within this time still looks.
FORGOTTEN = 20.0

# Rank 0 tells what each sum took.
SUMS = """
import sys, time
import fanin, numpy as np
switch, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
values = np.ones(250_000, np.float32)
with fanin.connect(switch, job="page", rank=rank, world_size=world_size) as group:
    while True:
        began = time.perf_counter()
        group.all_reduce(values)
        if rank == 0:
            print(time.perf_counter() - began, flush=True)
"""


class Turn(NamedTuple):
    """What was measured while the page was open, or closed."""

    control: float
    """CPU seconds of the threads that answer, a second."""
    summing: float
    """CPU seconds of the threads that sum, a sum."""
    took: float
    """The seconds of a sum: a median."""


class Ranks:
    """The ranks, and how long each sum took since it was asked last."""

    def __init__(self, switch: str) -> None:
        command = [sys.executable, "-c", SUMS, switch]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(RANKS)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self.took: list[float] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        lines = self.processes[0].stdout
        assert lines is not None
        for line in lines:
            self.took.append(float(line))

    def taken(self) -> list[float]:
        """Return the seconds of each sum since this was asked last."""
        took, self.took = self.took, []
        return took

    def end(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


def cpu_seconds(process: int) -> dict[str, float]:
    """Return the CPU time of a process's threads, by their names."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except FileNotFoundError:
            continue  # it has ended
        user, system = rest.split()[11:13]
        seconds[name] += (int(user) + int(system)) / TICKS_A_SECOND
    return seconds


def turn(process: int, address: str, ranks: Ranks, *, is_open: bool) -> Turn:
    """Measure for a while."""
    ranks.taken()
    before, since = cpu_seconds(process), 0.0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if is_open:
            asked = f"http://{address}/page/state?since={since}"
            with urllib.request.urlopen(asked, timeout=10) as answer:
                since = (json.loads(answer.read())["history"]["times"] or [since])[-1]
        time.sleep(1)  # as the page does
    after, took = cpu_seconds(process), ranks.taken()
    spent = {name: after[name] - before.get(name, 0) for name in after}
    summing = sum(seconds for name, seconds in spent.items() if name.startswith("fanin-switch"))
    control = sum(seconds for name, seconds in spent.items() if name.startswith("fanin-control"))
    return Turn(control / SECONDS, summing / len(took), statistics.median(took))


def main() -> int:
    """Measure by turns, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    where = machine.where()
    command = [*FANIN, "switch", "--listen", "127.0.0.1:0", "--json", "--log", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as switch:
        assert switch.stdout is not None
        address = json.loads(switch.stdout.readline())["address"]
        ranks = Ranks(address)
        turns: dict[bool, list[Turn]] = {True: [], False: []}
        try:
            time.sleep(5)  # ranks start, and their first sums are slower
            for _ in range(args.rounds):
                turns[False].append(turn(switch.pid, address, ranks, is_open=False))
                turns[True].append(turn(switch.pid, address, ranks, is_open=True))
                time.sleep(FORGOTTEN)
        finally:
            ranks.end()
            switch.kill()
    rows = []
    for name, of in (("closed", turns[False]), ("open", turns[True])):
        middle = [statistics.median(each) for each in zip(*of, strict=True)]
        rows.append(
            [
                name,
                f"{100 * middle[0]:.2f} %",
                f"{1e6 * middle[1]:.0f} µs",
                f"{1e3 * middle[2]:.2f} ms",
            ]
        )
    ratios = [
        opened.took / closed.took for closed, opened in zip(turns[False], turns[True], strict=True)
    ]
    text = document.where_line(f"python benches/page.py --rounds {args.rounds}", where) + "\n"
    text += (
        f"{RANKS} ranks and a switch on this machine, sums of 1 MB, medians of {args.rounds} turns "
        f"of {SECONDS:.0f} s each.\n\n"
    )
    table = [
        "page",
        "a core's time of the threads that answer",
        "CPU time of the threads that sum, a sum",
        "time of a sum",
    ]
    text += document.table(table, rows)
    text += (
        f"\nWith the page open a sum took {statistics.median(ratios):.3f} times as long "
        f"({min(ratios):.3f} to {max(ratios):.3f} over the turns).\n"
    )
    args.into.write_text(document.rewritten(args.into.read_text(), text, BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
