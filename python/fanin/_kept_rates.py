"""What was measured of links, kept over processes in a file of the user.

A joining never fails for this file. If it is missing, unreadable or nonsense, links are measured.
Failures are not kept. Several processes may write at once: each puts a whole new file in place of
the old one, and who is last decides. What the others found is then measured again.

Ranks of several machines read different files. `_rates.py` compares what they read.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)

# As long as that a figure counts, in seconds. Cables and shapers rarely change within a day, and a
# second of measuring a day costs nothing.
LIFE: Final = 24 * 3600
# Machines that share a home have clocks that differ by less.
SKEW: Final = 60
# Links that are kept: those of ten of the largest jobs. The oldest leave.
LINKS_MAX: Final = 1000
# A larger file is none of ours.
BYTES_MAX: Final = 1 << 20
# A rate outside of these limits, in bits a second, is nonsense.
RATES: Final = (1_000, 10**13)
FILE: Final = "fanin/rates.json"

_said: set[str] = set()


class Figure(NamedTuple):
    """What a link carries, as it was measured."""

    rate_bps: int | None
    """None of a link that could not be measured."""
    at: int
    """When, in seconds since 1970."""


def read() -> dict[str, Figure]:
    """Return the figures by the names of their links. Those that are too old are left out."""
    file = _file()
    if file is None:
        return {}
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            return {}
        with file.open("rb") as opened:
            text = opened.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"it is larger than {BYTES_MAX} bytes")
        links = json.loads(text)["links"]
        if not isinstance(links, dict):
            raise TypeError("links is no object")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        _say_once(
            f"{file} has no rates of links that can be read ({_cause(error)}), so links are "
            "measured; delete the file if it is not replaced then"
        )
        return {}
    now = time.time()
    figures = {name: _figure(said) for name, said in links.items()}
    return {
        name: figure
        for name, figure in figures.items()
        if figure is not None and -SKEW <= now - figure.at < LIFE
    }


def keep(found: Mapping[str, Figure]) -> None:
    """Add these figures to the file; links without a rate leave it."""
    file = _file()
    if file is None:
        return
    kept = {name: at for name, at in {**read(), **found}.items() if at.rate_bps is not None}
    newest = sorted(kept.items(), key=lambda item: item[1].at)[-LINKS_MAX:]
    links = {name: {"rate_bps": each.rate_bps, "measured_at": each.at} for name, each in newest}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
        try:
            with os.fdopen(number, "w") as opened:
                json.dump({"links": links}, opened, indent=1)
            Path(name).replace(file)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        _say_once(
            f"{file} cannot be written ({_cause(error)}), so the next start measures the links "
            "again; make its folder writable, or name another one (XDG_CACHE_HOME)"
        )


def forget() -> None:
    """Remove all figures, so that ranks measure when they join next."""
    file = _file()
    if file is None:
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _say_once(f"{file} cannot be removed ({_cause(error)}); remove it by hand")


def _file() -> Path | None:
    """Return where figures are kept; None where the user has no home."""
    # By the XDG Base Directory specification a relative path does not count.
    if (named := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(named, FILE)
    try:
        return Path.home() / ".cache" / FILE
    except RuntimeError:
        return None


def _figure(said: Any) -> Figure | None:
    if not isinstance(said, dict):
        return None
    rate, at = said.get("rate_bps"), said.get("measured_at")
    if type(rate) is not int or type(at) is not int or not RATES[0] <= rate <= RATES[1]:
        return None
    return Figure(rate, at)


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:200]


def _say_once(text: str) -> None:
    """Say it once a process: every group of it would."""
    if text not in _said:
        _said.add(text)
        log.warning("[fanin] %s", text)
