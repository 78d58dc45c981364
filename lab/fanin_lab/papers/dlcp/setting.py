"""What the simulated experiments share: figures of a report."""

from __future__ import annotations

from fanin_lab.papers.lab import Report
from fanin_lab.papers.simulated import Read


def flow_time_s(of: str) -> Read:
    """Return what reads a figure of the times of flows: "mean_s" or "p99_s"."""

    def read(report: Report) -> float:
        (servers,) = report["parameter_servers"]
        return float(servers["flow_times"][of])

    return read


def flow_time_ms(of: str) -> Read:
    """Return what reads the same in milliseconds."""
    return lambda report: 1e3 * flow_time_s(of)(report)
