"""A sweep's figures, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin_lab.sweep.figures import COLUMNS, Played, spreads
from fanin_lab.sweep.parameter import Point
from fanin_lab.sweep.spread import Spread, in_brackets


@dataclass(frozen=True)
class PointPlayed:
    """A point, and its run with each seed."""

    point: Point
    runs: Sequence[Played]

    @property
    def names(self) -> list[str]:
        """The names of the rows: jobs, then background flows."""
        return [row.name for row in self._rows[0]] if self._rows else []

    @property
    def spreads(self) -> list[dict[str, Spread]]:
        """The figures of each row, over the runs that came to their end."""
        return spreads(self._rows)

    @property
    def enough(self) -> list[bool]:
        """Whether the throughputs of each row were measured for long enough with every seed."""
        return [all(row.enough for row in of_one) for of_one in zip(*self._rows, strict=True)]

    @property
    def failed(self) -> int:
        """How many runs failed."""
        return sum(bool(played.run.wrong) for played in self.runs)

    @property
    def _rows(self) -> list[Sequence[Any]]:
        return [played.rows for played in self.runs if played.run.has_result]

    def as_json(self) -> dict[str, Any]:
        """Return everything that is known of it."""
        return {
            "values": dict(self.point.values),
            "rows": [
                {
                    "name": name,
                    "enough": enough,
                    **{
                        key: {"median": spread.median, "interval": list(spread.interval)}
                        for key, spread in of_one.items()
                    },
                }
                for name, enough, of_one in zip(self.names, self.enough, self.spreads, strict=True)
            ],
            "runs": [
                {
                    "seed": played.run.seed,
                    "scenario": str(played.run.scenario),
                    "result": str(played.run.result) if played.run.has_result else None,
                    "wrong": played.run.wrong or None,
                    "digest": played.digest or None,
                    "rows": [{"name": row.name, **row.figures} for row in played.rows],
                }
                for played in self.runs
            ],
        }


def table(played: Sequence[PointPlayed]) -> str:
    """Return a line for each point and each job or entry of flows in it."""
    paths = list(played[0].point.values)
    keys = [key for key in COLUMNS if any(key in row for one in played for row in one.spreads)]
    has_failed = any(one.failed for one in played)
    rows = [[*paths, "of", *(COLUMNS[key] for key in keys), *(["failed"] if has_failed else [])]]
    for one in played:
        failed = [f"{one.failed} of {len(one.runs)}"] if has_failed else []
        values = list(one.point.values.values())
        for name, enough, of_one in zip(one.names, one.enough, one.spreads, strict=True):
            figures = [_shown(of_one.get(key), key, enough=enough) for key in keys]
            rows.append([*values, name, *figures, *failed])
        if not one.names:
            rows.append([*values, "", *("-" for _ in keys), *failed])
    lines = _aligned(rows, left=len(paths) + 1)
    seeds = len(played[0].runs)
    if seeds > 1:
        lines.append(f"medians of {seeds} seeds, {in_brackets(seeds)} in brackets")
    if not all(enough for one in played for enough in one.enough):
        lines.append(
            "~: measured for too short a time to say much; a later until, more work or less warm_up"
        )
    return "\n".join(lines)


def failures(played: Sequence[PointPlayed]) -> str:
    """Return the runs that failed, why, and how each is played again."""
    lines = []
    for one in played:
        for run in (of_one.run for of_one in one.runs if of_one.run.wrong):
            values = [f"{path}={value}" for path, value in one.point.values.items()]
            lines.append(f"{' '.join([*values, f'seed {run.seed}'])}: {run.wrong}")
            lines.append(f"replay: {run.replay}")
    return "\n".join(lines)


def _shown(spread: Spread | None, key: str, *, enough: bool) -> str:
    if spread is None:
        return "-"
    about = "~" if not enough and key in ("gbps", "samples_per_s") else ""
    text = f"{about}{_short(spread.median)}"
    least, most = map(_short, spread.interval)
    return text if least == most else f"{text} [{least}, {most}]"


def _short(figure: float) -> str:
    return f"{figure:.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def document(
    command: str, seeds: Sequence[int], values: Mapping[str, Sequence[str]], played: Any
) -> dict[str, Any]:
    """Return what sweep.json has."""
    programs = [of_one.program for one in played for of_one in one.runs if of_one.program]
    return {
        "format": FORMAT,
        "command": command,
        "fanin": programs[0] if programs else None,
        "seeds": list(seeds),
        "sweep": {path: list(of_one) for path, of_one in values.items()},
        "points": [one.as_json() for one in played],
    }


FORMAT = 1
"""The JSON's version. A field may be added without a new number."""
