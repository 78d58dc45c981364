"""What all of the laboratory's commands share: how they end, and what they need installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fanin import _fanin
from fanin._cures import to_install
from fanin.errors import FaninError


def status(command: str, run: Callable[[], int], *, stopped: str = "") -> int:
    """Run a command and return its exit status; ``stopped`` is said if somebody stops it."""
    try:
        return run()
    except FaninError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if stopped:
            print(f"{command}: {stopped}", file=sys.stderr)
        return 130


def require(error: type[FaninError], *modules: str) -> None:
    """Raise the error if a module is not installed: now, and not after minutes of work."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise error(f"missing: {', '.join(missing)}; install with: {to_install(*missing)}")


def require_report(error: type[FaninError], path: Path) -> None:
    """Raise the error if no report can be written there: now, and not after minutes of work."""
    was_there = path.exists()
    try:
        _fanin.check_report()
        with path.open("a"):
            pass
    except (OSError, ValueError) as wrong:
        raise error(f"cannot write the report {path}: {wrong}") from None
    if not was_there:
        path.unlink()


def write_report(
    error: type[FaninError],
    path: Path,
    command: str,
    runs: Sequence[tuple[str, Path]],
    **parts: Any,
) -> None:
    """Write the report of these runs, each with a name and the path of its JSON.

    ``parts`` are ``sweep`` or ``reproduction``, as page/src/report/contract.ts has them.
    """
    try:
        texts = {name: json.dumps(part, allow_nan=False) for name, part in parts.items()}
        path.write_text(_fanin.report_page(command, runs, **texts), encoding="utf-8")
    except (OSError, ValueError) as wrong:
        raise error(f"cannot write the report {path}: {wrong}") from None
