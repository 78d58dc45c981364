"""§2, Table 1, and §4.1.1: how long the sum of one tensor takes, packet by packet."""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.byteps import equations
from fanin_lab.papers.byteps.cluster import (
    NIC_GBPS,
    PAYLOAD,
    PAYLOAD_TCP,
    RING,
    Cluster,
    finished_s,
    listed,
)
from fanin_lab.papers.byteps.plans import plans
from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Scenario, Spread
from fanin_lab.papers.plot import Line, Panel, Picture, outcome

MACHINES, MACHINES_QUICK = 8, 4
"""As in the paper's Figure 12."""
EXAMPLE, EXAMPLE_QUICK = (32, 16), (8, 4)
"""Machines that train, and more, of Eq. 7: the paper's example."""
TENSOR_MB, TENSOR_QUICK_MB = 64, 16
PIECES, PIECES_QUICK = 2000, 500
"""Into which it is cut for parameter servers: "much larger than the partition size" of 4 MB
(§4.1.1), or "large tensors" (§7.1)."""
SYSTEMS = {
    "split": "BytePS: the split (Eq. 6)",
    "ring": "all-reduce",
    "servers": "non-colocated PS",
}
Case = tuple[str, int, int]
"""A system, machines that train, and more that only sum."""


def run(lab: Lab) -> Outcome:
    """Sum one tensor in each way, with each number of machines more."""
    n = MACHINES_QUICK if lab.quick else MACHINES
    many, some = EXAMPLE_QUICK if lab.quick else EXAMPLE
    size_mb = TENSOR_QUICK_MB if lab.quick else TENSOR_MB
    ks = range(n + 1)
    cases: list[Case] = [("split", n, k) for k in ks] + [("servers", n, k) for k in ks if k]
    cases += [(system, many, some) for system in ("split", "servers")]
    cases += [("ring", count, 0) for count in (n, many)]
    shares = plans(lab, [(count, k) for system, count, k in cases if system == "split"])

    def scenario(case: Case) -> Scenario:
        system, count, k = case
        cluster, tensor_bytes = Cluster(count, k), size_mb * 10**6
        job: dict[str, Any] = {"tensor": f"{tensor_bytes}B", "tensors": 1, "in_flight": 1}
        piece = tensor_bytes / (PIECES_QUICK if lab.quick else PIECES)
        if system == "ring":
            job |= RING
        elif system == "servers":
            job |= cluster.servers(piece)
        else:
            of = shares[count, k].shares
            job |= cluster.byteps(of["w0"], of.get("s0", 0.0))
        return cluster.play(f"Table 1: {SYSTEMS[system]}, n = {count}, k = {k}", job)

    # Nothing in it is random: every seed would give the same.
    runs = lab.play({_name(case): scenario(case) for case in cases}, once=True, throughputs=False)

    def units(case: Case) -> Spread:
        payload = PAYLOAD if case[0] == "split" else PAYLOAD_TCP
        unit_s = 8e-3 * size_mb / (NIC_GBPS * payload)
        return runs[_name(case)].spread(lambda report: finished_s(report) / unit_s)

    times = {case: units(case) for case in cases}

    def off(system: str, of: list[int]) -> Spread:
        """Return the ratio to the formula that is farthest from 1."""
        found = [times[system, n, k].median / _formula(system, n, k) for k in of]
        return Spread.of([max(found, key=lambda ratio: abs(ratio - 1))])

    def by(system: str) -> Spread:
        k = 0 if system == "ring" else some
        return Spread.of([times[system, many, k].median / times["split", many, some].median])

    between = [k for k in ks if 0 < k < n]
    example = f"n = {many}, k = {some}, played: "

    def marks(at: int, system: str) -> list[Line]:
        there = [k for k in ks if k or system != "servers"]
        # All-reduce takes as long with whatever more machines.
        played = [times[system, n, 0 if system == "ring" else k].median for k in there]
        formula = [_formula(system, n, k) for k in there]
        look = {"color": f"C{at}"}
        return [Line(there, formula, look=look), Line(there, played, f"C{at}o", SYSTEMS[system])]

    panel = Panel(
        [mark for at, system in enumerate(SYSTEMS) for mark in marks(at, system)],
        "machines that only sum, k",
        "time (M / B)",
        f"Table 1 and Eq. 6 (lines), played (dots); n = {n}",
        ticks=list(ks),
        least_y=0,
        most_y=1.2 * n / 2,
    )

    def row(figure: str, what: str, ours: Spread, paper: float = 1.0) -> Finding:
        return Finding(figure, what, paper, ours, unit="x")

    of_formula = "time played by the formula's, B less headers"
    return outcome(
        [
            row("Table 1", f"all-reduce, n = {n}: {of_formula}", off("ring", [0])),
            row(
                "Table 1",
                f"non-colocated PS, n = {n}, k = {listed([k for k in ks if k])}: {of_formula}, for "
                "the worst k",
                off("servers", [k for k in ks if k]),
            ),
            row("Table 1", f"colocated PS, n = {n}: {of_formula}", off("split", [0])),
            row(
                "Eq. 6",
                f"the split, n = {n}, k = {listed(between)}: {of_formula}, for the worst k",
                off("split", between),
            ),
            row(
                "Table 1, Eq. 6",
                f"k = n = {n}: the split by non-colocated PS, which it then is",
                Spread.of([times["split", n, n].median / times["servers", n, n].median]),
            ),
            row(
                "§4.1.1, Eq. 7",
                f"{example}times as fast as all-reduce (gamma_a)",
                by("ring"),
                round(equations.by_ring(many, some), 2),
            ),
            row(
                "§4.1.1, Eq. 7",
                f"{example}times as fast as non-colocated PS (gamma_p)",
                by("servers"),
                round(equations.by_parameter_server(many, some), 2),
            ),
        ],
        Picture([panel]),
    )


def _formula(system: str, n: int, k: int) -> float:
    if system == "ring":
        return equations.ring(n)
    return equations.parameter_server(n, k) if system == "servers" else equations.optimal(n, k)


def _name(case: Case) -> str:
    system, n, k = case
    return f"communication-{system}-{n}-{k}"


EXPERIMENT = Experiment(
    "communication", "The sum of one tensor, by architecture (Table 1, Eq. 6)", run
)
