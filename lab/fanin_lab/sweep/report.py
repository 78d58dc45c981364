"""Many runs in one file that a browser shows: `fanin sim --sweep .. --report OUT.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fanin_lab import commands
from fanin_lab.sweep import SweepError
from fanin_lab.sweep.figures import COLUMNS
from fanin_lab.sweep.table import PointPlayed


def save(
    path: Path, command: str, document: Mapping[str, Any], played: Sequence[PointPlayed]
) -> None:
    """Write the report of a sweep; ``document`` is what sweep.json has."""
    places: dict[tuple[str, int], int] = {}
    runs: list[tuple[str, Path]] = []
    for one in played:
        for run in (of_one.run for of_one in one.runs if of_one.run.has_result):
            places[str(run.scenario), run.seed] = len(runs)
            values = [f"{name}={value}" for name, value in one.point.values.items()]
            runs.append((" ".join(values) or run.scenario.stem, run.result))
    sweep = {
        "seeds": document["seeds"],
        "sweep": document["sweep"],
        "figures": [{"name": name, "label": label} for name, label in COLUMNS.items()],
        "points": [_point(point, places) for point in document["points"]],
    }
    commands.write_report(SweepError, path, command, runs, sweep=sweep)


def _point(point: Mapping[str, Any], places: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    return {
        "values": point["values"],
        "rows": [
            {
                "name": row["name"],
                "enough": row["enough"],
                "figures": {key: figure for key, figure in row.items() if key in COLUMNS},
            }
            for row in point["rows"]
        ],
        "runs": [
            {
                "seed": run["seed"],
                "wrong": run["wrong"],
                "run": places.get((run["scenario"], run["seed"])),
            }
            for run in point["runs"]
        ],
    }
