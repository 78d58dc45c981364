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
    runs: list[tuple[str, Path]] = []
    points = []
    for one, point in zip(played, document["points"], strict=True):
        values = " ".join(f"{name}={value}" for name, value in one.point.values.items())
        places = []
        for run in (of_one.run for of_one in one.runs):
            place = len(runs) if run.has_result else None
            places.append({"seed": run.seed, "wrong": run.wrong or None, "run": place})
            if run.has_result:
                runs.append((values or run.scenario.stem, run.result))
        points.append({"values": point["values"], "rows": _rows(point), "runs": places})
    sweep = {
        "seeds": document["seeds"],
        "sweep": document["sweep"],
        "figures": [{"name": name, "label": label} for name, label in COLUMNS.items()],
        "points": points,
    }
    commands.write_report(SweepError, path, command, runs, sweep=sweep)


def _rows(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": row["name"],
            "enough": row["enough"],
            "figures": {key: figure for key, figure in row.items() if key in COLUMNS},
        }
        for row in point["rows"]
    ]
