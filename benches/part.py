"""A part of docs/reproduction-sockets.md that a program measures and writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import document
from fanin import _signals
from fanin.errors import FaninError
from fanin_lab.bench import machine
from performance import ROOT, no_laboratory

TITLE = "Two papers on real sockets"
FORMAT = 1
"""Of the JSON."""

Measure = Callable[[Mapping[str, Any], bool], tuple[str, Mapping[str, Any]]]
"""Told where it runs, and whether quickly, it returns the part's text and what the JSON has."""


def main(what: str, marks: tuple[str, str], raw_name: str, measure: Measure) -> int:
    """Measure, write the part between its marks and the JSON, and say where; what is else stays."""
    args = _arguments(what)
    if why := no_laboratory():
        print(f"skipped: {why}", file=sys.stderr)
        return 1
    into: Path = (args.into or ROOT / ("target/partial" if args.quick else "docs")).resolve()
    path = into / "reproduction-sockets.md"
    before = path.read_text() if path.exists() else None

    def rewritten(text: str) -> str:
        return document.rewritten(before, text, *marks, TITLE)

    try:
        rewritten("")  # now, and not after minutes of measuring
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    into.mkdir(parents=True, exist_ok=True)
    raw = (ROOT / "target" if into == ROOT / "docs" else into) / raw_name
    raw.parent.mkdir(exist_ok=True)
    try:
        with _signals.as_exit():
            text, found = measure(machine.where(), args.quick)
    except FaninError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        return 130
    path.write_text(rewritten(text))
    raw.write_text(json.dumps({"format": FORMAT, **found}, indent=1) + "\n")
    print(f"{path}\n{raw}")
    return 0


def _arguments(what: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--quick", action="store_true", help="tiny, once, to see that it runs")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="for both (default: docs, and target for the JSON; with --quick: target/partial)",
    )
    return parser.parse_args()
