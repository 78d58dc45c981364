"""§III-B, Figure 2: three fragments of four workers, and a switch has room for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fanin import _fanin

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, Reason
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Line, Mark, Panel, Picture, outcome

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


LATE = ("w2", "w4")
RETURNING = 7
"""Links that the parameters of a fragment pass."""


def scenario(system: str) -> dict[str, Any]:
    """Return the example, two workers of which have a longer link."""
    workers = {"w1": "s1", "w2": "s1", "w3": "s2", "w4": "s2"}
    own = {"nodes": ["s1", "s2", "s3"]} if system == "goat" else {"window": FRAGMENTS}
    links: list[dict[str, Any]] = [
        {"link": [host, switch], **({"delay": "1ms"} if host in LATE else {})}
        for host, switch in {**workers, "ps": "s3"}.items()
    ]
    links += [{"link": list(ends)} for ends in (("s1", "s2"), ("s1", "s3"), ("s2", "s3"))]
    return {
        "title": f"Figure 2, packet by packet: {system}",
        "network": {"topology": "own", "rate": "10Gbit"},
        "switch": {"aggregators": 1, "ways": 1},
        "node": [
            *({"kind": "switch", "name": switch} for switch in ("s1", "s2", "s3")),
            *({"kind": "host", "name": host} for host in [*workers, "ps"]),
        ],
        "link": links,
        "job": [
            {
                "system": system,
                "workers": list(workers),
                "tensor": f"{256 * FRAGMENTS}B",
                "tensors": 1,
                "in_flight": 1,
                "server": "ps",
                "elements": 64,
                "timeout": "100ms",
                **own,
            }
        ],
    }


def counted(lab: Lab) -> tuple[dict[str, int], dict[str, int]]:
    """Return fragments at the server, and links that fragments of switches pass."""
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
        IN_TURN_NAME: workload.shared_memory(IN_TURN, 1, None, "tree", 0),
        "GOAT": workload.plan("krgs", lab.seeds[0]),
    }
    server = {name: traffic["server_bytes"] for name, traffic in found.items()}
    # The figure counts what switches send, and not what comes to them from workers.
    hops = {name: each["hop_bytes"] - WORKERS * FRAGMENTS for name, each in found.items()}
    return server, hops


def why(lab: Lab) -> Sequence[Reason]:
    """Let a switch sum what has collided before, as the example does and ATP does not."""
    server, hops = counted(lab)
    return [
        Reason(PLAYED.format(IN_TURN_NAME, what), CHANGE, Spread.of([found[IN_TURN_NAME]]))
        for what, found in ((AT_SERVER, server), (PASSED, hops))
    ]


IN_TURN_NAME = "ATP, one after the other"
AT_SERVER = "fragments at the server"
PASSED = "links passed, workers' own left out"
PLAYED = "{}, packet by packet: {}"
BIG = {"markersize": 12}
CHANGE = "S3 sums fragments that collided at S1 and S2, counted as above"


def run(lab: Lab) -> Outcome:
    """Count fragments by the rules of the example, and play it."""
    runs = lab.play(
        {f"example-{system}": scenario(system) for system in ("atp", "goat")},
        once=True,
        throughputs=False,
    )
    reports = {system: runs[f"example-{system}"].reports[0] for system in ("atp", "goat")}
    played = {s: report["jobs"][0]["server_aggregations"] for s, report in reports.items()}
    own = WORKERS * FRAGMENTS + FRAGMENTS * RETURNING
    passed = {system: report["packet_hops"] - own for system, report in reports.items()}
    server, hops = counted(lab)

    def exactly(what: str, paper: int, ours: int, unit: str) -> Finding:
        holds = Range(paper, paper)
        return Finding("Fig. 2", what, str(paper), Spread.of([ours]), holds=holds, unit=unit)

    def panel(
        ours: Mapping[str, int], paper: Mapping[str, int], packets: Mapping[str, int], title: str
    ) -> Panel:
        names = list(ours)
        look = {"color": "black", "fillstyle": "none"}
        marks: list[Mark] = [
            Bars(names, list(ours.values()), "ours, counted", look={"color": ["C1", "C1", "C0"]}),
            Line([names.index(name) for name in paper], list(paper.values()), "kx", "paper", BIG),
            Line([1, 2], [packets["atp"], packets["goat"]], "o", "ours, played", look),
        ]
        lines = [name.replace(", ", ",\n").replace(" after", "\nafter") for name in names]
        return Panel(marks, "", "fragments", title, ticks=dict(enumerate(lines)))

    picture = Picture(
        [
            panel(server, EXAMPLES, played, AT_SERVER),
            panel(hops, HOPS, passed, "links that fragments of switches pass"),
        ]
    )
    return outcome(
        [
            *(
                exactly(f"{name}: {AT_SERVER}", paper, server[name], "fragments")
                for name, paper in EXAMPLES.items()
            ),
            *(
                exactly(f"{name}: {PASSED}", paper, hops[name], "links")
                for name, paper in HOPS.items()
            ),
            *(
                exactly(PLAYED.format(name, what), of[name], found[system], unit)
                for system, name in (("atp", IN_TURN_NAME), ("goat", "GOAT"))
                for what, of, found, unit in (
                    (AT_SERVER, EXAMPLES, played, "fragments"),
                    (PASSED, HOPS, passed, "links"),
                )
            ),
        ],
        picture,
    )


EXPERIMENT = Experiment(
    "example", "Three fragments, three switches of one unit (Figure 2)", run, why
)
