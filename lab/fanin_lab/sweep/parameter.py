"""`--sweep PARAMETER=VALUES`: what it says, and the scenarios that come of it."""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin_lab.sweep import SweepError
from fanin_lab.sweep.scenario import Scenario

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_OPENING, _CLOSING = "[{", "]}"
_NAME_MAX = 120


@dataclass(frozen=True)
class Parameter:
    """A key of the scenario file, and the values that it is to have."""

    path: str
    values: Sequence[str]
    """As they were given; of a range, each number."""

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """Read ``job.0.atp.window=64,128``, or ``job.0.workers=1..8``."""
        path, equals, values = text.partition("=")
        if not equals or not all(path.split(".")) or not values:
            raise SweepError(
                f"--sweep {text}: write a key of the scenario file and its values, as in "
                "network.queue=100kB,1MB"
            )
        found = [value for part in _parts(values) for value in _counted(text, part)]
        if "" in found:
            raise SweepError(f"--sweep {text}: a value is empty")
        twice = [value for at, value in enumerate(found) if value in found[:at]]
        if twice:
            raise SweepError(f"--sweep {text}: {twice[0]} is there twice")
        return cls(path, found)


@dataclass(frozen=True)
class Point:
    """A combination of values."""

    values: Mapping[str, str]
    """By the parameters' paths, as they were given."""
    scenario: Scenario

    @property
    def name(self) -> str:
        """The name of its files: as legible as files' names can be, and no other point's."""
        exact = ",".join(f"{path}={value}" for path, value in self.values.items()) or "as-it-is"
        legible = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", exact)[:_NAME_MAX]
        return legible if legible == exact else f"{legible}-{_short_digest(exact)}"


def points(scenario: Scenario, parameters: Sequence[Parameter]) -> list[Point]:
    """Return every combination of the parameters' values; the last one changes fastest."""
    paths = [parameter.path for parameter in parameters]
    for path in paths:
        if paths.count(path) > 1:
            raise SweepError(f"--sweep {path}: it is swept twice; give all its values at once")
    found = []
    for chosen in itertools.product(*(parameter.values for parameter in parameters)):
        changed: Any = copy.deepcopy(scenario)
        values = dict(zip(paths, chosen, strict=True))
        for path, value in values.items():
            _set(changed, path, _value(value))
        found.append(Point(values, changed))
    return found


def _parts(text: str) -> list[str]:
    """Split at commas, but for those within brackets and quotes."""
    parts, depth, quoted = [""], 0, ""
    for letter in text:
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "\"'":
            quoted = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        if letter == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _counted(sweep: str, part: str) -> list[str]:
    ends = _RANGE.fullmatch(part)
    if ends is None:
        return [part]
    first, last = map(int, ends.groups())
    if first > last:
        raise SweepError(f"--sweep {sweep}: {part} counts upwards, from the least to the most")
    return [str(number) for number in range(first, last + 1)]


def _value(text: str) -> Any:
    """Read a value as the file would have it; what is none there is a string without quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    # A date is no value of a scenario, and perhaps a name.
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def _set(scenario: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    tables: list[Any] = [scenario]
    within = ""
    for key in above:
        tables = [inner for table in tables for inner in _below(table, key, path, within)]
        within = f"{within}.{key}" if within else key
    for table in tables:
        if not isinstance(table, dict):
            raise SweepError(f"--sweep {path}: {within} is no table")
        table[last] = value


def _below(table: Any, key: str, path: str, within: str) -> list[Any]:
    """Return what stands under a key: a table, made where there is none, or a list's entries."""
    if isinstance(table, list):
        return _entries(table, key, path, within)
    if not isinstance(table, dict):
        raise SweepError(f"--sweep {path}: {within} is no table")
    if key.isdecimal() or key == "*":
        raise SweepError(f"--sweep {path}: the file has no [[{within}]]")
    return [table.setdefault(key, {})]


def _entries(entries: list[Any], key: str, path: str, within: str) -> list[Any]:
    if key == "*":
        return entries
    if key.isdecimal():
        if int(key) < len(entries):
            return [entries[int(key)]]
        count = f"{len(entries)} of [[{within}]], numbered from 0"
        raise SweepError(f"--sweep {path}: the file has {count}")
    names = [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]
    if key in names:
        return [e for e in entries if isinstance(e, dict) and str(e.get("name")) == key]
    near = difflib.get_close_matches(key, names, 1)
    hint = f"did you mean {near[0]}?" if near else "give its number, from 0"
    raise SweepError(f"--sweep {path}: no [[{within}]] is called {key}; {hint}")


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
