"""Scenario files as values: written as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Scenario = Mapping[str, Any]
"""A scenario file's keys; a list of mappings is an array of tables."""


def toml(scenario: Scenario) -> str:
    """Write a scenario file."""
    return "\n".join(_table(scenario, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: str) -> list[str]:
    lines = [f"{key} = {_plain(value)}" for key, value in table.items() if not _is_nested(value)]
    for key, value in table.items():
        if not _is_nested(value):
            continue
        inner = f"{path}{key}"
        if isinstance(value, Mapping):
            lines += ["", f"[{inner}]", *_table(value, f"{inner}.")]
        else:
            for one in value:
                lines += ["", f"[[{inner}]]", *_table(one, f"{inner}.")]
    return lines


def _is_nested(value: Any) -> bool:
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return is_tables or isinstance(value, Mapping)


def _plain(value: Any) -> str:
    # Numbers, strings, booleans and lists of them are written alike in TOML and in JSON.
    return json.dumps(value)
