"""`fanin reproduce PAPER`: the options, and what is written."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fanin
from fanin import _signals
from fanin._cures import nearest

from fanin_lab import commands, units
from fanin_lab.papers import ReproduceError, atp, byteps, dlcp, goat, plot, report, switchml
from fanin_lab.papers.finding import (
    Experiment,
    Outcome,
    Paper,
    Reason,
    summary,
    table,
    table_of_reasons,
)
from fanin_lab.papers.lab import Lab
from fanin_lab.sweep.progress import progress
from fanin_lab.sweep.spread import in_brackets

FORMAT = 4
"""The JSON's version. A field may be added without a new number."""

SEEDS_OF_REASONS = 3
"""As many scenarios again, and more, are played for reasons; three seeds show what seeds do."""

PAPERS = {
    "atp": atp.PAPER,
    "switchml": switchml.PAPER,
    "byteps": byteps.PAPER,
    "dlcp": dlcp.PAPER,
    "goat": goat.PAPER,
}

HOW_TO_READ = (
    "A figure agrees when all of its interval is where the table says: within a fifth of the "
    "paper's, and for a ratio (x) besides with at least 1/1.5 and at most 1.5 times its effect. "
    "It differs when none is, and else cannot tell."
)

DESCRIPTION = """\
The figures of a paper, again, beside what the paper says. atp and switchml: in the simulator;
scenarios are written, and each is played with several seeds; a run that was stopped goes on where
it was. byteps: by the planner, in the simulator, and measured in several rounds on shaped links
of this machine, which needs root. dlcp: by training small networks here, with packets of their
gradients lost, and in the simulator. goat: by the planner, by training, and in the simulator. In
the folder of --out: README.md (the table), results.json, a plot for each figure, and the scenarios
and results of all runs; fanin sim plays a scenario again."""

EXAMPLES = """\
examples:
  fanin reproduce atp                     all figures, in an hour
  fanin reproduce atp --quick             coarser, in a minute
  fanin reproduce atp --why               and the scenarios that explain where ours differs
  fanin reproduce atp --only loss sharing --out /tmp/atp
  sudo $(which fanin) reproduce byteps --quick
  fanin reproduce byteps --only communication spares scalability    Table 1, Figures 13, 15 and 16
  fanin reproduce dlcp                    what a training forgives, and completion times
  fanin reproduce goat                    who sums what, and whom a training waits for
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="fanin reproduce",
        usage="fanin reproduce PAPER [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("paper", type=_paper, help=f"whose figures: {', '.join(PAPERS)}")
    made.add_argument(
        "--quick",
        action="store_true",
        help="one seed or round, fewer points, smaller models and tensors",
    )
    made.add_argument(
        "--why",
        action="store_true",
        help="also play, for what differs from the paper, scenarios with one thing changed",
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
        "--report",
        type=Path,
        metavar="OUT.html",
        help="also write findings, plots and all simulations as one file for a browser",
    )
    made.add_argument(
        "--seed", type=int, default=1, metavar="S", help="the first one (default: %(default)s)"
    )
    made.add_argument(
        "--jobs",
        type=units.positive_number,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="simulations at a time (default: cores, %(default)s here)",
    )
    return made


def _paper(text: str) -> str:
    if text not in PAPERS:
        raise argparse.ArgumentTypeError(
            f"there is no {text}{nearest(text, PAPERS)} ({', '.join(PAPERS)})"
        )
    return text


def main(argv: list[str]) -> int:
    """Run `fanin reproduce ARGV` and return its exit status."""
    options = parser()
    args = options.parse_args(argv)
    names = _names(PAPERS[args.paper])
    if unknown := [name for name in args.only or () if name not in names]:
        near = nearest(unknown[0], names)
        options.error(f"{args.paper} has no {', '.join(unknown)}{near} ({', '.join(names)})")
    command = ["fanin", "reproduce", *argv]
    return commands.status("fanin reproduce", lambda: _run(args, command))


def _run(args: argparse.Namespace, command: list[str]) -> int:
    commands.require(ReproduceError, "matplotlib", "numpy", "rich")
    from fanin_lab.bench import machine

    began = time.monotonic()
    paper = PAPERS[args.paper]
    if args.report is not None:
        commands.require_report(ReproduceError, args.report)
    chosen = [e for e in paper.experiments if args.only is None or e.name in args.only]
    seeds = range(args.seed, args.seed + (1 if args.quick else paper.repetitions))
    with _signals.as_exit(), progress() as bar:
        lab = Lab(args.out, seeds, args.jobs, args.quick, bar)
        outcomes, reasons_of = _run_all(chosen, lab, why=args.why)
    for experiment, outcome in zip(chosen, outcomes, strict=True):
        plot.save(experiment, outcome, args.out / f"{experiment.name}.png")
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    reasons = None if reasons_of is None else [one for of_one in reasons_of for one in of_one]
    assert {reason.of for reason in reasons or ()} <= {finding.what for finding in findings}
    document = {
        "format": FORMAT,
        "command": shlex.join(command),
        "commit": machine.commit(),
        "version": fanin.__version__,
        "seeds": list(seeds),
        "quick": args.quick,
        "doubts": sorted(lab.doubts),
        "experiments": {
            experiment.name: {
                "title": experiment.title,
                "findings": [
                    {**finding.as_json(), "verdict": finding.verdict(reasons)}
                    for finding in outcome.findings
                ],
                "series": outcome.series,
            }
            for experiment, outcome in zip(chosen, outcomes, strict=True)
        },
        "reasons": None if reasons is None else [asdict(reason) for reason in reasons],
    }
    text = json.dumps(_finite(document), indent=1, allow_nan=False)
    (args.out / "results.json").write_text(text + "\n")
    page = _page(document, paper, chosen, outcomes, reasons_of)
    (args.out / "README.md").write_text(page)
    print(table(findings, reasons))
    print(summary(findings, reasons))
    if args.report is not None:
        shown = (args.paper, shlex.join(command), chosen, outcomes)
        report.save(args.report, args.out, lab.played, shown, reasons)
    print(_doubtful(document["doubts"]), end="")
    print(f"{time.monotonic() - began:.0f} s; plots, scenarios and results are in {args.out}")
    return 0


def _run_all(
    chosen: Sequence[Experiment], lab: Lab, *, why: bool
) -> tuple[list[Outcome], list[Sequence[Reason]] | None]:
    """Run all experiments at once: the simulations of one fill the cores while another thinks.

    But those that measure, afterwards, and one after the other, and their reasons behind them.
    With ``why``, play reasons, too.
    """
    with ThreadPoolExecutor(2 * len(chosen)) as threads:
        thinking = {e.name: threads.submit(e.run, lab) for e in chosen if not e.measures}
        few = lab.with_seeds(lab.seeds[:SEEDS_OF_REASONS]) if why else lab
        alone = [e for e in chosen if e.measures]
        reasons = {e.name: threads.submit(e.why, few) for e in chosen if why and not e.measures}
        try:
            running: list[Future[Any]] = [*thinking.values(), *reasons.values()]
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()  # the failure, if there is one
            found = {name: outcome.result() for name, outcome in thinking.items()}
            played = {name: of_one.result() for name, of_one in reasons.items()}
            found |= {e.name: e.run(lab) for e in alone}
            played |= {e.name: e.why(few) for e in alone if why}
        finally:
            lab.stop()
    return [found[e.name] for e in chosen], [played[e.name] for e in chosen] if why else None


def _names(paper: Paper) -> list[str]:
    return [experiment.name for experiment in paper.experiments]


def _finite(value: Any) -> Any:
    """Return it with null for every number that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _page(
    document: Mapping[str, Any],
    paper: Paper,
    chosen: Sequence[Experiment],
    outcomes: Sequence[Outcome],
    reasons_of: Sequence[Sequence[Reason]] | None,
) -> str:
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    reasons = None if reasons_of is None else [one for of_one in reasons_of for one in of_one]
    plots = "\n".join(f"![{e.title}]({e.name}.png)\n" for e in chosen)
    seeds = document["seeds"]
    page = (
        f"`{document['command']}`, commit {document['commit']}, {paper.repeated} {seeds[0]} to "
        f"{seeds[-1]}, fewer where a row is over settings or its runs are long; medians, "
        f"{in_brackets(len(seeds))} in brackets, of rows over settings the spread of all. "
        f"{HOW_TO_READ}\n\n"
        f"{summary(findings, reasons)}\n\n{table(findings, reasons)}\n"
    )
    if reasons_of is not None:
        few = seeds[:SEEDS_OF_REASONS]
        played = [(o.findings, of_one) for o, of_one in zip(outcomes, reasons_of, strict=True)]
        page += (
            "Each line here is a scenario as the one above, but for what is changed; "
            f"{paper.repeated} {few[0]} to {few[-1]} at most, least and most in brackets.\n\n"
            f"{table_of_reasons(played)}\n"
        )
    if document["doubts"]:
        page += _doubtful(document["doubts"]) + "\n"
    if paper.missing:
        page += "Not made again:\n\n" + "".join(f"- {line}\n" for line in paper.missing) + "\n"
    return page + plots


def _doubtful(doubts: Sequence[str]) -> str:
    if not doubts:
        return ""
    lines = "".join(f"- {doubt}\n" for doubt in doubts)
    return f"Runs with too little completed for a throughput, which then is none:\n\n{lines}"
