"""§III-B, Figure 2: three fragments of four workers, and a switch has room for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin import _fanin
from fanin.reproduce.finding import Experiment, Finding, Outcome, Range
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS, FRAGMENTS = 4, 3
TOGETHER = [(worker, fragment) for fragment in range(FRAGMENTS) for worker in range(WORKERS)]
"""A1, A2, B1, B2, C1, C2 come to one switch, and those of the other two workers to the other."""
IN_TURN = [
    (worker, fragment)
    for pair in ((0, 2), (1, 3))
    for fragment in range(FRAGMENTS)
    for worker in pair
]
"""A1, B1, C1, A2, B2, C2."""
EXAMPLES = {"ATP, workers together": 3, "ATP, one after the other": 7, "GOAT": 3}
"""Fragments at the server, as the paper has them."""
HOPS = {"ATP, one after the other": 17, "GOAT": 13}


def run(lab: Lab) -> Outcome:
    """Count fragments by the rules of the example."""
    workload = _fanin.Workload(
        "triangle",
        dict.fromkeys(("s1", "s2", "s3"), 1),
        [f"w{worker}" for worker in range(1, WORKERS + 1)],
        "ps",
        FRAGMENTS,
        1,
        1e9,
    )
    found: dict[str, _fanin.Traffic] = {
        "ATP, workers together": workload.shared_memory(TOGETHER, 1, None, "tree", 0),
        "ATP, one after the other": workload.shared_memory(IN_TURN, 1, None, "tree", 0),
        "GOAT": workload.plan("krgs", lab.seeds[0]),
    }
    server = {name: traffic["server_bytes"] for name, traffic in found.items()}
    # The figure counts what switches send, and not what comes to them from workers.
    hops = {name: found[name]["hop_bytes"] - WORKERS * FRAGMENTS for name in found}

    def exactly(what: str, paper: int, ours: int, unit: str) -> Finding:
        holds = Range(paper, paper)
        return Finding("Fig. 2", what, str(paper), Spread.of([ours]), holds=holds, unit=unit)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for axes, counted, paper, title in (
            (left, server, EXAMPLES, "fragments at the server"),
            (right, hops, HOPS, "links that fragments of switches pass"),
        ):
            names = list(counted)
            axes.bar(names, list(counted.values()), color=["C1", "C1", "C0"], label="ours")
            at = [names.index(name) for name in paper]
            axes.plot(at, list(paper.values()), "kx", markersize=12, label="paper")
            axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
            finish(axes, "", "fragments", title)

    return Outcome(
        [
            *(
                exactly(f"{name}: fragments at the server", paper, server[name], "fragments")
                for name, paper in EXAMPLES.items()
            ),
            *(
                exactly(f"{name}: links passed, workers' own left out", paper, hops[name], "links")
                for name, paper in HOPS.items()
            ),
        ],
        draw,
        {"server": server, "hops": hops},
    )


EXPERIMENT = Experiment("example", "Three fragments, three switches of one unit (Figure 2)", run)
