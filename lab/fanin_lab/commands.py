"""What all of the laboratory's commands share: how they end, and what they need installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

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
    try:
        _fanin.check_report()
        with path.open("a"):
            pass
    except (OSError, ValueError) as wrong:
        raise error(f"cannot write the report {path}: {wrong}") from None
