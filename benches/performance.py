"""Measures what docs/performance.md says, and writes it: the document, its picture, and the JSON.

    make bench
    python benches/performance.py --quick

Rows that need network namespaces need root; without, they are skipped, and the document says so.
What stands outside the marks in the document is kept. Exit status 1 if a measurement failed; a
target that was missed is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import document
import kernels
import rows
from fanin import _signals
from fanin_lab.bench import machine
from fanin_lab.bench.command import main as run_bench
from fanin_lab.bench.progress import Advance, progress
from fanin_lab.netlab import NetlabError
from fanin_lab.netlab.kernel import require_root, require_tools
from rows import Command

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
FORMAT = 1
"""Of the JSON."""

FANIN = [sys.executable, "-m", "fanin"]
SWEEP = ["--sweep", "--repeat", "5"]
SWEEP_QUICK = ["--sweep", *("--workers", "2", "--size", "4KB,100KB", "--repeat", "1")]
SWEEP_LINKS = ["--rate", "1gbit"]
LATE = ["python", "benches/goat.py"]
LATE_JOBS = [*LATE, "--jobs", "3", "--own-link", "--steps", "8"]


class FailedError(Exception):
    """A command failed; its message is what it said."""


def main() -> int:
    """Measure, write, and say where."""
    args = _arguments()
    partial = args.quick or args.only is not None
    checks = [
        check for check in rows.CHECKS if args.only is None or args.only in check.command.what
    ]
    others = [command for command in rows.FAST if args.only is None or args.only in command.what]
    if not checks and not others:
        sys.exit(f"no row has {args.only!r} in its name")
    into: Path = (args.into or ROOT / ("target/partial" if partial else "docs")).resolve()
    path = into / "performance.md"
    before = path.read_text() if path.exists() else None
    try:
        document.rewritten(before, "")  # now, and not after minutes of measuring
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    into.mkdir(parents=True, exist_ok=True)
    raw = (ROOT / "target" if into == ROOT / "docs" else into) / "performance.json"
    raw.parent.mkdir(exist_ok=True)

    measured = document.Measured(
        where=machine.where(),
        checks=rows.quick(checks) if args.quick else checks,
        fast=[command.quick() for command in others] if args.quick else others,
        quick=args.quick,
        only=args.only,
    )
    try:
        with _signals.as_exit():
            results = _measure(measured, into)
    except KeyboardInterrupt:
        return 130
    path.write_text(document.rewritten(before, document.generated(measured)))
    raw.write_text(json.dumps(results, indent=1) + "\n")
    for check in measured.checks:
        print(f"{check.command.what}: {check.asked()}: {measured.verdict(check)}")
    print(f"{path}\n{raw}")
    said = [*measured.broken.values(), measured.late_broken]
    said += [measured.kernels_broken, measured.picture_broken]
    return int(any(reason is not None and reason.startswith("failed") for reason in said))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure, and write docs/performance.md")
    parser.add_argument("--quick", action="store_true", help="tiny, once, to see that it runs")
    parser.add_argument("--only", metavar="TEXT", help='rows with this in their name: "loss 1 %%"')
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="for all three files (default: docs, and target for the JSON; "
        "with --quick or --only: target/partial)",
    )
    return parser.parse_args()


def _measure(measured: document.Measured, into: Path) -> dict[str, Any]:
    """Run everything; returns the raw results."""
    rounds = 1 if measured.quick else ROUNDS
    commands = measured.commands()
    usage = _output([*FANIN, "bench", "allreduce", "--help"])
    for command in commands:
        if (why := _missing(command, usage)) is not None:
            measured.broken[command] = f"skipped: {why}"
    steps = rounds * (len(commands) - len(measured.broken))
    if measured.only is None:
        steps += 1 if measured.quick else 3  # the picture, late ranks, and the kernels
    raw: list[dict[str, Any]] = []
    with progress(steps) as bar:
        for number in range(rounds):
            found: dict[Command, Any] = {}
            raw.append({})
            # Backwards every other round: a machine that grows slower favours nobody.
            for command in commands[:: -1 if number % 2 else 1]:
                if command in measured.broken:
                    continue
                say(bar, f"round {number + 1} of {rounds}: {command.what}")
                try:
                    result = bench(command.arguments(), here=measured.quick)
                except FailedError as error:
                    measured.broken[command] = f"failed: {error}"
                    continue
                raw[-1][command.what] = result
                (found[command],) = result["runs"]
            measured.rounds.append(found)
        sweep = _sweep(measured, into, bar)
        _late(measured, bar)
        _kernels(measured, bar)
    return {
        "format": FORMAT,
        **measured.where,
        "quick": measured.quick,
        "checks": [
            {
                "what": check.command.what,
                "asked": check.asked(),
                "figures": [] if measured.broken_of(check) else measured.figures(check),
                "verdict": measured.verdict(check),
            }
            for check in measured.checks
        ],
        "rounds": raw,
        "sweep": sweep,
        "late": measured.late,
        "late_jobs": measured.late_jobs,
        "kernels": [asdict(kernel) for kernel in measured.kernels],
    }


def _missing(command: Command, usage: str) -> str | None:
    """Return why the command cannot run here, if it cannot."""
    more = ["ethtool"] if "--no-udp-offload" in command.links else []
    if command.links and (why := no_laboratory(*more)):
        return why
    options = [argument for argument in command.arguments() if argument.startswith("--")]
    unknown = [option for option in options if option not in usage]
    return f"fanin bench allreduce has no {', '.join(unknown)}" if unknown else None


def no_laboratory(*more: str) -> str | None:
    """Return why there can be no network namespaces here, if there can be none.

    ``more`` are tools that not every laboratory needs.
    """
    try:
        require_root()
        require_tools("ip", "tc", "nft", *more)
    except NetlabError as error:
        return str(error)
    return None


def bench(
    arguments: Sequence[str],
    fanin: Sequence[str] = FANIN,
    name: str = "allreduce",
    here: bool = False,
) -> Any:
    """Run `fanin bench NAME` and return its JSON.

    With ``here`` this process does it: all commands' ranks are then forked from one server, which
    imports torch once. Without, a command finds nothing that the one before has warmed.

    Raises `FailedError`.
    """
    with tempfile.TemporaryDirectory(prefix="fanin-performance-") as folder:
        result = Path(folder) / "result.json"
        options = [*arguments, "--json", str(result)]
        if here:
            _run_here(name, options)
        else:
            _output([*fanin, "bench", name, *options])
        return json.loads(result.read_text())


def _run_here(name: str, options: list[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = run_bench(name, options)
    if status == 130:
        raise KeyboardInterrupt
    if status != 0:
        raise FailedError(_last_line(said.getvalue(), status))


def _last_line(said: str, status: int) -> str:
    return (said.strip().splitlines() or [f"exit status {status}"])[-1]


def _sweep(measured: document.Measured, into: Path, bar: Advance) -> Any:
    links = SWEEP_LINKS if no_laboratory() is None else []
    arguments = [*(SWEEP_QUICK if measured.quick else SWEEP), *links]
    measured.picture_command = shlex.join(["fanin", "bench", "allreduce", *arguments])
    if measured.only is not None:
        measured.picture_broken = "skipped: with --only"
        return None
    say(bar, f"the picture: {measured.picture_command}")
    picture = into / "performance.png"
    try:
        result = bench([*arguments, "--plot", str(picture)])
    except FailedError as error:
        measured.picture_broken = f"failed: {error}"
        return None
    measured.picture = picture
    return result


def _late(measured: document.Measured, bar: Advance) -> None:
    measured.late_command = shlex.join(LATE)
    measured.late_jobs_command = shlex.join(LATE_JOBS)
    if measured.quick or measured.only is not None:
        measured.late_broken = "skipped: with --quick and with --only"
    elif why := no_laboratory():
        measured.late_broken = f"skipped: {why}"
    else:
        say(bar, f"{measured.late_command}, some minutes")
        try:
            measured.late = _output([sys.executable, *LATE[1:]]).splitlines()
            say(bar, f"{measured.late_jobs_command}, some minutes")
            measured.late_jobs = _output([sys.executable, *LATE_JOBS[1:]]).splitlines()
        except FailedError as error:
            measured.late_broken = f"failed: {error}"


def _kernels(measured: document.Measured, bar: Advance) -> None:
    measured.kernels_command = shlex.join(kernels.COMMAND)
    if measured.quick or measured.only is not None:
        measured.kernels_broken = "skipped: with --quick and with --only"
    elif why := kernels.missing():
        measured.kernels_broken = f"skipped: {why}"
    else:
        say(bar, f"{measured.kernels_command}, some minutes")
        try:
            measured.kernels = kernels.parse(_output(kernels.COMMAND))
        except (FailedError, ValueError) as error:
            measured.kernels_broken = f"failed: {error}"


def say(bar: Advance, what: str) -> None:
    """Show what comes next."""
    bar(what)
    if not sys.stderr.isatty():  # there is no bar
        print(what, file=sys.stderr, flush=True)


def _output(command: Sequence[str]) -> str:
    """Run the command and return what it prints.

    Raises `FailedError`.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        printed, said = process.communicate()
    except BaseException:
        process.terminate()  # it removes its laboratory before it ends
        process.wait()
        raise
    if process.returncode != 0:
        raise FailedError(_last_line(said, process.returncode))
    return printed


if __name__ == "__main__":
    sys.exit(main())
