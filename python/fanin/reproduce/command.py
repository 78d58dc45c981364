"""`fanin reproduce PAPER`: the options, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path

from fanin import _signals, _units
from fanin.errors import FaninError
from fanin.reproduce import ReproduceError, atp, byteps, plot
from fanin.reproduce.finding import Experiment, Outcome, Paper, table
from fanin.reproduce.lab import Lab
from fanin.reproduce.progress import progress

FORMAT = 1
"""Of the JSON. A field may be added without a new number."""

SEEDS = 3
SEEDS_QUICK = 1

PAPERS = {
    "atp": Paper(atp.EXPERIMENTS, "seeds"),
    "byteps": Paper(byteps.EXPERIMENTS, "rounds"),
}

DESCRIPTION = """\
The figures of a paper, again, beside what the paper says. atp: in the simulator; scenarios are
written, and each is played with several seeds. byteps: by the planner, and measured in several
rounds on shaped links of this machine, which needs root. In the folder of --out: README.md (the
table), results.json, a plot for each figure, and the scenarios and results of all runs; fanin sim
plays a scenario again."""

EXAMPLES = """\
examples:
  fanin reproduce atp                     all figures, in some minutes
  fanin reproduce atp --quick             coarser, in a minute
  fanin reproduce atp --only loss sharing --out /tmp/atp
  sudo fanin reproduce byteps --quick
  fanin reproduce byteps --only theorem acceleration     what needs no links, and no root
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="fanin reproduce",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("paper", choices=list(PAPERS), help="which paper's figures")
    made.add_argument(
        "--quick",
        action="store_true",
        help="one seed or round, fewer points, smaller models and tensors",
    )
    made.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="some of: "
        + "; ".join(f"{name}: {', '.join(_names(paper))}" for name, paper in PAPERS.items()),
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
        type=_units.positive_number,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="simulations at a time (default: cores, %(default)s here)",
    )
    return made


def main(argv: list[str]) -> int:
    """Run `fanin reproduce ARGV` and return its exit status."""
    options = parser()
    args = options.parse_args(argv)
    names = _names(PAPERS[args.paper])
    if unknown := [name for name in args.only or () if name not in names]:
        options.error(f"{args.paper} has no {', '.join(unknown)}: choose from {', '.join(names)}")
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
    paper = PAPERS[args.paper]
    chosen = [e for e in paper.experiments if args.only is None or e.name in args.only]
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
        "doubts": sorted(lab.doubts),
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
        _page(shlex.join(command), document["commit"], paper, seeds, shown, chosen, lab.doubts)
    )
    print(shown)
    print(_doubtful(lab.doubts), end="")
    print(f"{time.monotonic() - began:.0f} s; plots, scenarios and results are in {args.out}")
    return 0


def _run_all(chosen: Sequence[Experiment], lab: Lab) -> list[Outcome]:
    """Run all experiments at once: the simulations of one fill the cores while another thinks.

    But those that measure, afterwards, and one after the other.
    """
    with ThreadPoolExecutor(len(chosen)) as threads:
        thinking = [experiment for experiment in chosen if not experiment.measures]
        running = [threads.submit(experiment.run, lab) for experiment in thinking]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()  # the failure, if there is one
            found = {e.name: one.result() for e, one in zip(thinking, running, strict=True)}
            found |= {e.name: e.run(lab) for e in chosen if e.measures}
        finally:
            lab.stop()
    return [found[experiment.name] for experiment in chosen]


def _names(paper: Paper) -> list[str]:
    return [experiment.name for experiment in paper.experiments]


def _page(
    command: str,
    commit: object,
    paper: Paper,
    seeds: range,
    shown: str,
    chosen: Sequence[Experiment],
    doubts: Sequence[str],
) -> str:
    plots = "\n".join(f"![{e.title}]({e.name}.png)\n" for e in chosen)
    repeated = f"{paper.repeated} {seeds.start} to {seeds.stop - 1}"
    return (
        f"`{command}`, commit {commit}, {repeated}; medians, least and most in brackets.\n\n"
        f"{shown}\n{_doubtful(doubts)}\n{plots}"
    )


def _doubtful(doubts: Sequence[str]) -> str:
    if not doubts:
        return ""
    lines = "".join(f"- {doubt}\n" for doubt in sorted(doubts))
    return f"Runs whose throughputs say little:\n\n{lines}"
