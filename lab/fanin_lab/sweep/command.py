"""`fanin sim FILE --sweep ..` and `--seeds N`: the options, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, NoReturn

from fanin import _fanin, _signals
from fanin._simulation import Processes

from fanin_lab import commands, units
from fanin_lab.sweep import SweepError, plot, report
from fanin_lab.sweep.cluster import Cluster
from fanin_lab.sweep.figures import figures_of
from fanin_lab.sweep.parameter import Parameter, Point, points
from fanin_lab.sweep.progress import progress
from fanin_lab.sweep.runs import Runner, scenario_path
from fanin_lab.sweep.scenario import toml
from fanin_lab.sweep.table import PointPlayed, document, failures, table

_OF_ONE_RUN = ("json", "pcap", "trace", "against", "record", "watch")


_FLAG: dict[str, Any] = {"action": "store_true", "default": None}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the options are explained."""
        self.exit(2, f"fanin sim: {message}; see fanin sim --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; `fanin sim --help`, in crates/cli, explains them."""
    made = _Parser(prog="fanin sim", add_help=False, allow_abbrev=False)
    made.add_argument("file", type=Path)
    made.add_argument("--sweep", action="append", default=[])
    made.add_argument("--seeds", type=units.positive_number)
    made.add_argument("--seed", type=units.whole_number, default=1)
    made.add_argument("--jobs", type=units.positive_number)
    made.add_argument("--out", type=Path)
    made.add_argument("--ray")
    made.add_argument("--report", type=Path)
    for option in _OF_ONE_RUN:
        made.add_argument(f"--{option}", **_FLAG if option in ("record", "watch") else {})
    return made


def main(argv: list[str]) -> int:
    """Run `fanin sim ARGV`, which asks for many runs, and return its exit status."""
    options = parser()
    args = options.parse_args(argv)
    if not args.sweep and args.seeds is None:
        options.error("--jobs, --out and --ray are for many runs: give --sweep or --seeds as well")
    if given := [option for option in _OF_ONE_RUN if getattr(args, option) is not None]:
        options.error(
            f"--{given[0]} is of a single run; --out has the scenario and result of each of many"
        )
    if args.ray == "":  # Ray would start a cluster of its own
        options.error("--ray needs the address of a cluster, as 10.0.0.9:6379")
    command = shlex.join(["fanin", "sim", *argv])
    stopped = "stopped; the same command goes on from here"
    return commands.status("fanin sim", lambda: _run(args, command), stopped=stopped)


def _run(args: argparse.Namespace, command: str) -> int:
    commands.require(SweepError, "matplotlib", "rich")
    began = time.monotonic()
    parameters = [Parameter.parse(text) for text in args.sweep]
    out: Path = args.out or Path(f"{args.file.stem}-sweep")
    seeds = range(args.seed, args.seed + (args.seeds or 1))
    to_play = _to_play(args.file, parameters, out, seeds[0])
    if args.report is not None:
        commands.require_report(SweepError, args.report)
    place = Cluster(args.ray) if args.ray else Processes()
    cores = place.cores if isinstance(place, Cluster) else len(os.sched_getaffinity(0))
    jobs = min(args.jobs or cores, len(to_play) * len(seeds))
    with _signals.as_exit(), progress() as bar:
        runner = Runner(out, place, jobs, bar, record=args.report is not None)
        try:
            played = _play(runner, to_play, seeds)
        finally:
            with _signals.ignored():
                runner.stop()
    plot.save(args.file.name, played, out / "sweep.png")
    values = {parameter.path: parameter.values for parameter in parameters}
    found = document(command, seeds, values, played)
    (out / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(played))
    if args.report is not None:
        report.save(args.report, command, found, played)
    if isinstance(place, Cluster):
        nodes = ", ".join(f"{count} on {node}" for node, count in sorted(place.nodes.items()))
        print(f"{place.nodes.total()} runs on {len(place.nodes)} nodes of the cluster: {nodes}")
    print(
        f"{len(to_play) * len(seeds)} runs, {time.monotonic() - began:.0f} s; table, plot, "
        f"scenarios and results are in {out}"
    )
    failed = sum(one.failed for one in played)
    if failed:
        print(f"fanin sim: {failed} runs failed\n{failures(played)}", file=sys.stderr)
    return 1 if failed else 0


def _to_play(
    file: Path, parameters: Sequence[Parameter], out: Path, seed: int
) -> list[tuple[Point, str]]:
    """Return the points with the texts of their scenarios, all of which the simulator takes."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"cannot read the scenario {file}: {error}") from None
    if not parameters:
        _check(str(file), text)
        return [(Point({}, {}), _alone(file, text))]
    try:
        scenario = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _check(str(file), text)  # says it as `fanin sim FILE` does
        raise SweepError(f"{file}: {error}") from None
    found = []
    for point in points(scenario, parameters):
        try:
            written = _alone(file, toml(point.scenario))
        except TypeError as error:
            raise SweepError(f"{file}: a value that no scenario has: {error}") from None
        # Written down, so that the line of a mistake can be looked at.
        kept = scenario_path(out, point.name, seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(written)
        _check(str(kept), written)
        found.append((point, written))
    return found


def _alone(file: Path, text: str) -> str:
    """Return a scenario that needs no file beside it, to be played elsewhere."""
    if "file" not in tomllib.loads(text).get("network", {}):
        return text
    try:
        return toml(json.loads(_fanin.whole_scenario(str(file), text)))
    except ValueError as error:
        raise SweepError(str(error)) from None


def _check(name: str, text: str) -> None:
    try:
        _fanin.check_scenario(name, text)
    except ValueError as error:
        raise SweepError(str(error)) from None


def _play(
    runner: Runner, to_play: Sequence[tuple[Point, str]], seeds: Sequence[int]
) -> list[PointPlayed]:
    running = [[runner.submit(point.name, text, seed) for seed in seeds] for point, text in to_play]
    of_all = [run for of_one in running for run in of_one]
    # As they end: results are large, and what is kept of them is small.
    found = {run: figures_of(run.result()) for run in as_completed(of_all)}
    return [
        PointPlayed(point, [found[run] for run in of_one])
        for (point, _), of_one in zip(to_play, running, strict=True)
    ]
