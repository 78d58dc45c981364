"""A reproduction in one file that a browser shows: `fanin reproduce PAPER --report OUT.html`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from fanin_lab import commands
from fanin_lab.papers import ReproduceError
from fanin_lab.papers.finding import Experiment, Outcome, Reason, cells, summary


def save(
    path: Path,
    out: Path,
    runs: Sequence[tuple[str, Path]],
    shown: tuple[str, str, Sequence[Experiment], Sequence[Outcome]],
    reasons: Sequence[Reason] | None,
) -> None:
    """Write the report of a paper: its name, the command, the experiments, what they found.

    The plots are in the folder ``out``.
    """
    paper, command, experiments, outcomes = shown
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    keys = ("figure", "what", "paper", "agrees_from", "ours", "verdict")
    reproduction = {
        "paper": paper,
        "summary": summary(findings, reasons),
        "experiments": [
            {
                "name": experiment.name,
                "title": experiment.title,
                "picture": _picture(out / f"{experiment.name}.png"),
                "findings": [
                    dict(zip(keys, cells(finding, reasons), strict=True))
                    for finding in outcome.findings
                ],
            }
            for experiment, outcome in zip(experiments, outcomes, strict=True)
        ],
    }
    commands.write_report(ReproduceError, path, command, runs, reproduction=reproduction)


def _picture(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
