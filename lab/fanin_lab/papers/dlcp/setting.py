"""What the simulated experiments share: figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanin_lab.papers.lab import Report
from fanin_lab.papers.simulated import Cases, Change, Read, Row


def flow_time_s(of: str) -> Read:
    """Return what reads a figure of the times of flows: "mean_s" or "p99_s"."""

    def read(report: Report) -> float:
        (servers,) = report["parameter_servers"]
        return float(servers["flow_times"][of])

    return read


def flow_time_ms(of: str) -> Read:
    """Return what reads the same in milliseconds."""
    return lambda report: 1e3 * flow_time_s(of)(report)


def rate_changes(cases: Sequence[Cases], of: Sequence[Row] | None = None) -> list[Change]:
    """Return other settings of DLCP's rate control, as reasons for what differs."""
    says = 'footnote 3: "the period is 200 us, Δ is equal to 2"'
    figure_7 = "Figure 7: each flow has a rate of its own, and starts at that of the link"
    settings: list[tuple[str, dict[str, Any], str]] = [
        ("receivers report every 50 us", {"period": "50us"}, says),
        ("receivers report every 1 ms", {"period": "1ms"}, says),
        ("congestion is 1.1 times as much sent as arrives", {"delta": 1.1}, says),
        ("congestion is 1.5 times as much sent as arrives", {"delta": 1.5}, says),
        ("all flows to a peer together are as fast as the way", {"rates": "way"}, figure_7),
    ]
    return [
        Change(f"DLCP: {words}", keys, contradicts, of, {"system": ["dlcp"]}, cases)
        for words, keys, contradicts in settings
    ]
