"""Holds this checkout's speed against another one's, in the rows of docs/performance.md.

    python benches/against.py ../before
    python benches/against.py ../before --only loopback --rounds 9

Both must be built. Their commands take turns, so that a machine that is slow today is slow for
both; what counts is the ratio within a round. The seconds of processors that ranks and switches
take for a gigabyte are held against each other likewise. The exit status says nothing about speed:
look at the spread, and judge.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import performance
import rows
from fanin import _signals
from fanin_lab.bench.progress import progress
from fanin_lab.units import shown_time
from rows import Command


@dataclass(frozen=True)
class Figures:
    """What one run of a command came to."""

    time_s: float
    cpu_s_per_gb: float


def main() -> int:
    """Measure, and print a line a row."""
    args = _arguments()
    pythons = [
        tree.resolve() / ".venv" / "bin" / "python" for tree in (args.other, performance.ROOT)
    ]
    for python in pythons:
        if not python.with_name("fanin").exists():
            sys.exit(f"there is no {python.with_name('fanin')}: run `make build` there")
    commands = [
        command for command in rows.commands(rows.CHECKS) if (args.only or "") in command.what
    ]
    if not commands:
        sys.exit(f"no row has {args.only!r} in its name")
    if why := performance.no_laboratory():
        print(f"without the rows with links: {why}", file=sys.stderr)
        commands = [command for command in commands if not command.links]
    figures: dict[Command, list[list[Figures]]] = defaultdict(list)
    try:
        with _signals.as_exit(), progress(args.rounds * len(commands)) as bar:
            for number in range(args.rounds):
                for command in list(commands):
                    performance.say(bar, f"round {number + 1} of {args.rounds}: {command.what}")
                    # First and second by turns: the first of two leaves the other a warm machine.
                    turn = slice(None, None, -1 if number % 2 else 1)
                    try:
                        pair = [_measured(python, command) for python in pythons[turn]]
                    except performance.FailedError as error:
                        print(f"without {command.what}: {error}", file=sys.stderr)
                        commands.remove(command)
                        continue
                    figures[command].append(pair[turn])
    except KeyboardInterrupt:
        return 130
    print(
        f"{'workers, links, tensor':<45} {'there':>10} {'here':>10}  {'here / there':<20}  "
        "CPU s/GB, here / there"
    )
    for command, pairs in figures.items():
        there, here = (
            statistics.median(side.time_s for side in column) for column in zip(*pairs, strict=True)
        )
        print(
            f"{command.what:<45} {shown_time(there):>10} {shown_time(here):>10}  "
            f"{_ratio([(there.time_s, here.time_s) for there, here in pairs]):<20}  "
            f"{_ratio([(there.cpu_s_per_gb, here.cpu_s_per_gb) for there, here in pairs])}"
        )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure two checkouts by turns")
    parser.add_argument("other", type=Path, help="the checkout to hold this one against")
    parser.add_argument("--only", metavar="TEXT", help="rows with this in their name: loopback")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    return parser.parse_args()


def _measured(python: Path, command: Command) -> Figures:
    arguments = replace(command, peers="none").arguments()
    (run,) = performance.bench(arguments, [str(python), "-m", "fanin"])["runs"]
    fanin = run["backends"]["fanin"]
    cpu = fanin["ranks_cpu_s_per_gb"] + fanin["switch_cpu_s_per_gb"]
    return Figures(float(fanin["median_s"]), float(cpu))


def _ratio(pairs: list[tuple[float, float]]) -> str:
    ratios = [here / there for there, here in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
