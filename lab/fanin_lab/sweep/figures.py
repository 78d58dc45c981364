"""The few figures of a run that a sweep's table and plot show, and their spreads over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin_lab.sweep.runs import Report, Run
from fanin_lab.sweep.spread import Spread

COLUMNS = {
    "gbps": "Gbit/s",
    "samples_per_s": "samples/s",
    "time_mean_ms": "mean ms",
    "time_p99_ms": "99 % ms",
    "sent_again": "sent again",
    "dropped": "dropped",
    "ended_ms": "ended ms",
}
"""Each figure, and the head of its column."""


@dataclass(frozen=True)
class Row:
    """A job in a run, the flows of parameter servers, or the background flows of one entry."""

    name: str
    figures: Mapping[str, float]
    enough: bool
    """Whether its throughputs were measured for long enough."""


@dataclass(frozen=True)
class Played:
    """A run, and what was found in it."""

    run: Run
    program: Mapping[str, str]
    """Version and commit."""
    digest: str
    """Of everything that happened in it; empty where there is no result."""
    rows: Sequence[Row]


def figures_of(run: Run) -> Played:
    """Read a run's result; all but its figures is left in the file."""
    if not run.has_result:
        return Played(run, {}, "", [])
    document = run.document()
    report = document["result"]
    return Played(run, document["fanin"], report["digest"], rows(report))


def rows(report: Report) -> list[Row]:
    """Return the figures of each job, of parameter servers, and of each entry of flows."""
    dropped = sum(drop["count"] for drop in report["drops"])
    return [
        *(_of_job(job, dropped) for job in report["jobs"]),
        *(_of_servers(job, dropped) for job in report["parameter_servers"]),
        *(_of_flows(flows, dropped, report["ended_s"]) for flows in report["background"]),
    ]


def spreads(played: Sequence[Sequence[Row]]) -> list[dict[str, Spread]]:
    """Return, for each of the rows that all runs have, each figure over the runs that have it."""
    return [
        {
            key: Spread.of([row.figures[key] for row in of_one if key in row.figures])
            for key in COLUMNS
            if any(key in row.figures for row in of_one)
        }
        for of_one in zip(*played, strict=True)
    ]


def _of_job(job: Mapping[str, Any], dropped: int) -> Row:
    training, ended_s = job["training"], job["finished_s"] if job["finished"] else None
    figures = {
        "gbps": job["aggregation_gbps"],
        "samples_per_s": None if training is None else training["samples_per_s"],
        **_times(job["tensor_times"]),
        "sent_again": job["retransmissions"],
        "dropped": dropped,
        "ended_ms": None if ended_s is None else 1e3 * ended_s,
    }
    # What a system does not count is none, and no zero.
    known = {key: figure for key, figure in figures.items() if figure is not None}
    return Row(job["name"], known, job["measurement"]["enough"])


def _of_servers(job: Mapping[str, Any], dropped: int) -> Row:
    last_s, times = job["last_arrived_s"], job["flow_times"]
    # What the end cut off has a part in the bytes, and none in the time.
    ended = last_s > 0 and not times["unfinished"] and not job["unopened"]
    figures = _times(times)
    figures |= {"sent_again": job["retransmissions"], "dropped": dropped}
    if ended:
        figures["gbps"] = 8e-9 * job["delivered_bytes"] / last_s / job["workers"]
    return Row(job["name"], figures, enough=ended)


def _of_flows(flows: Mapping[str, Any], dropped: int, ended_s: float) -> Row:
    figures = {"gbps": 8e-9 * flows["delivered_bytes"] / ended_s if ended_s else 0.0}
    figures |= _times(flows["times"])
    figures |= {"sent_again": flows["retransmissions"], "dropped": dropped}
    return Row(f"{flows['from']} to {flows['to']}", figures, enough=True)


def _times(times: Mapping[str, float] | None) -> dict[str, float]:
    if not times or not times["count"]:
        return {}
    return {"time_mean_ms": 1e3 * times["mean_s"], "time_p99_ms": 1e3 * times["p99_s"]}
