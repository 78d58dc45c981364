"""The machine of a benchmark: what a reader needs to judge its figures."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import fanin
from fanin import _fanin


def where() -> dict[str, Any]:
    """Return when a measurement begins, of which commit, and on what."""
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    """Return processor, cores, kernel and load."""
    return {
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what is measured and of what it runs on."""
    return {
        "fanin": fanin.__version__ + (" for tests" if _fanin.assertions else ""),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }


def warn_of_a_build_for_tests() -> None:
    """Say on standard error that what is measured is no release, where it is none."""
    if _fanin.assertions:
        print("this fanin is a build for tests, and slow: `make build` first", file=sys.stderr)


def commit() -> str | None:
    """Return the commit of the checkout that this file is part of, with "-dirty"; None without."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not installed below somebody's checkout
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
