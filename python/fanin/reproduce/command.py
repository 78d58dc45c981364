"""`fanin reproduce atp`: the options, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path

from fanin import _signals
from fanin.errors import FaninError
from fanin.reproduce import ReproduceError, plot
from fanin.reproduce.atp import EXPERIMENTS
from fanin.reproduce.finding import Experiment, Outcome, table
from fanin.reproduce.lab import Lab
from fanin.reproduce.progress import progress

FORMAT = 1
"""Of the JSON. A field may be added without a new number."""

SEEDS = 3
SEEDS_QUICK = 1

DESCRIPTION = """\
The figures of a paper, again, in the simulator: writes scenarios, plays each with several seeds,
and sets what comes out beside what the paper says. In the folder of --out: README.md (the table),
results.json, a plot for each figure, and the scenarios and results of all runs, each of which
fanin sim plays again."""

EXAMPLES = """\
examples:
  fanin reproduce atp                     all figures, in some minutes
  fanin reproduce atp --quick             coarser, in a minute
  fanin reproduce atp --only loss sharing --out /tmp/atp
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="fanin reproduce",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("paper", choices=["atp"], help="which paper's figures")
    made.add_argument("--quick", action="store_true", help="one seed, fewer points, smaller models")
    made.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[experiment.name for experiment in EXPERIMENTS],
        help=f"some of: {', '.join(experiment.name for experiment in EXPERIMENTS)}",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("reproduction"),
        metavar="DIR",
        help="(default: %(default)s)",
    )
    made.add_argument(
        "--seed", type=int, default=1, metavar="S", help="the first one (default: %(default)s)"
    )
    made.add_argument(
        "--jobs",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="simulations at a time (default: cores, %(default)s here)",
    )
    return made


def main(argv: list[str]) -> int:
    """Run `fanin reproduce ARGV` and return its exit status."""
    args = parser().parse_args(argv)
    try:
        return _run(args, ["fanin", "reproduce", *argv])
    except FaninError as error:
        print(f"fanin reproduce: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace, command: list[str]) -> int:
    missing = [module for module in ("matplotlib", "numpy", "rich") if find_spec(module) is None]
    if missing:
        text = f'missing: {", ".join(missing)}; install with: pip install "fanin[lab]"'
        raise ReproduceError(text)
    from fanin import _fanin
    from fanin.bench import machine

    began = time.monotonic()
    chosen = [e for e in EXPERIMENTS if args.only is None or e.name in args.only]
    seeds = range(args.seed, args.seed + (SEEDS_QUICK if args.quick else SEEDS))
    with _signals.as_exit(), progress() as bar:
        lab = Lab(args.out, seeds, args.jobs, args.quick, bar)
        outcomes = _run_all(chosen, lab)
    for experiment, outcome in zip(chosen, outcomes, strict=True):
        plot.save(experiment, outcome, args.out / f"{experiment.name}.png")
    document = {
        "format": FORMAT,
        "command": shlex.join(command),
        "commit": machine.commit(),
        "version": _fanin.version,
        "seeds": list(seeds),
        "quick": args.quick,
        "experiments": {
            experiment.name: {
                "title": experiment.title,
                "findings": [finding.as_json() for finding in outcome.findings],
                "series": outcome.series,
            }
            for experiment, outcome in zip(chosen, outcomes, strict=True)
        },
    }
    (args.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    shown = table(findings)
    (args.out / "README.md").write_text(
        _page(shlex.join(command), document["commit"], seeds, shown, chosen)
    )
    print(shown)
    print(f"{time.monotonic() - began:.0f} s; plots, scenarios and results are in {args.out}")
    return 0


def _run_all(chosen: Sequence[Experiment], lab: Lab) -> list[Outcome]:
    """Run all experiments at once: the simulations of one fill the cores while another thinks."""
    with ThreadPoolExecutor(len(chosen)) as threads:
        running = [threads.submit(experiment.run, lab) for experiment in chosen]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()  # the failure, if there is one
            return [one.result() for one in running]
        finally:
            lab.stop()


def _page(
    command: str, commit: object, seeds: range, shown: str, chosen: Sequence[Experiment]
) -> str:
    plots = "\n".join(f"![{e.title}]({e.name}.png)\n" for e in chosen)
    return (
        f"`{command}`, commit {commit}, seeds {seeds.start} to {seeds.stop - 1}; medians, "
        f"least and most in brackets.\n\n{shown}\n{plots}"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number
