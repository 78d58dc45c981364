"""Holds what `run.py` wrote about fanin against what it wrote about Gloo.

    python tests/torch_suite/compare.py fanin.json gloo.json

What passes under Gloo must pass under fanin, except what ``exceptions.toml`` names with its
reason. Skipped tests are listed by name, as they prove nothing. Ends with status 1 if fanin falls
short, and if an exception is named that is none, because the test passes, or does not under Gloo
either: the file says what is, not what was.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")

Tests = dict[str, dict[str, Any]]


def compare(fanin: Tests, gloo: Tests, exceptions: dict[str, str]) -> int:
    """Print all differences; return the exit status."""
    behind = [n for n in fanin if _passed(gloo, n) and not _passed(fanin, n)]
    unknown = [n for n in behind if n not in exceptions]
    stale = [n for n in exceptions if n in fanin and n not in behind]
    _list("passed under Gloo, not under fanin, and no exception", unknown, fanin)
    if behind != unknown:
        print(f"\nexceptions ({len(behind) - len(unknown)}):")
        for name in sorted(set(behind) - set(unknown)):
            print(f"  {name}: {fanin[name]['outcome']}, because {exceptions[name]}")
    _list("named in exceptions.toml, and no exception", stale, fanin)
    _list("failed under both", [n for n in fanin if _failed(fanin, n) and _failed(gloo, n)], gloo)
    _list("passed under fanin alone", [n for n in fanin if _ahead(fanin, gloo, n)], gloo)
    _list_skips(fanin)
    return 1 if unknown or stale else 0


def _passed(tests: Tests, name: str) -> bool:
    return name in tests and bool(tests[name]["outcome"] == "passed")


def _failed(tests: Tests, name: str) -> bool:
    return bool(tests[name]["outcome"] == "failed")


def _ahead(fanin: Tests, gloo: Tests, name: str) -> bool:
    return _passed(fanin, name) and not _passed(gloo, name)


def _list(title: str, names: list[str], tests: Tests) -> None:
    if names:
        print(f"\n{title} ({len(names)}):")
        for name in names:
            print(f"  {name}: {tests[name]['outcome']}: {tests[name]['reason']}")


def _list_skips(tests: Tests) -> None:
    reasons: dict[str, list[str]] = {}
    for name, test in tests.items():
        if test["outcome"] == "skipped":
            reasons.setdefault(test["reason"], []).append(name)
    print(f"\nskipped under fanin ({sum(map(len, reasons.values()))}):")
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"  {reason} ({len(names)})")
        print(textwrap.fill(" ".join(names), 100, initial_indent="    ", subsequent_indent="    "))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fanin", type=Path)
    parser.add_argument("gloo", type=Path)
    given = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in (given.fanin, given.gloo)]
    if [run["backend"] for run in runs] != ["fanin", "gloo"]:
        parser.error("give a run of fanin first, then one of gloo")
    if len({(run["world_size"], run["torch"], *run["tests"]) for run in runs}) != 1:
        parser.error("the runs differ in world size, in torch, or in the tests that were run")
    for run in runs:
        counts = Counter(test["outcome"] for test in run["tests"].values())
        print(
            f"{run['backend']:5}  torch {run['torch']}, {run['world_size']} ranks: "
            + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        )
    exceptions = {
        name: entry["reason"] for name, entry in tomllib.loads(EXCEPTIONS.read_text()).items()
    }
    return compare(runs[0]["tests"], runs[1]["tests"], exceptions)


if __name__ == "__main__":
    sys.exit(main())
