"""§VII-D, Exp 6, Figures 13 and 14: what reaches the server, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome
from fanin_lab.papers.goat.drawn import (
    COLOURS,
    GB,
    OVER,
    SCHEMES,
    SIZE,
    Setting,
    Traffic,
    counts,
    swept,
)
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Line, Mark, Panel, Picture, Whiskers, outcome

SERVER_GB = {"goat": 0.06, "esa": 5.7, "atp": 6.7, "geryon": 8.4}
"""At the server, on the leaf-spine with 35 workers."""
IN_NETWORK_GB = {"goat": 9.6, "esa": 3.2, "atp": 1.9}
"""Summed on the way, on the fat-tree with 40 workers."""
NUMBERS = {"leaf-spine": 35, "fat-tree": 40}
PARTS = {
    "leaf-spine": {
        scheme: round(100 * SERVER_GB[scheme] / SERVER_GB["geryon"], 2)
        for scheme in ("goat", "esa", "atp")
    },
    # GOAT's 9.6 GB are all that the paper's 40 workers send: 240 MB each.
    "fat-tree": {
        scheme: round(100 * (1 - IN_NETWORK_GB[scheme] / IN_NETWORK_GB["goat"]), 2)
        for scheme in ("esa", "atp")
    },
}
"""What is at the server, in per cent of what workers send."""
WORKERS = [5, 10, 15, 20, 25, 30, 35, 40, 45, 49]
"""One of the leaf-spine's 50 hosts serves."""
WORKERS_QUICK = [5, 35, 40]
COUNTED = "what switches send counted or not"
Found = Mapping[Setting, Sequence[Mapping[str, Traffic]]]


def curves(lab: Lab) -> dict[str, list[Setting]]:
    """Return what a figure has a point for, by topology."""
    workers = WORKERS_QUICK if lab.quick else WORKERS
    return {topology: [Setting(topology, count) for count in workers] for topology in NUMBERS}


def run(lab: Lab) -> Outcome:
    """Plan for each number of workers, and sweep where the text has numbers."""
    points = curves(lab)
    at = {topology: Setting(topology, workers) for topology, workers in NUMBERS.items()}
    others = {topology: swept(setting) for topology, setting in at.items()}
    found = counts(lab, chain(*points.values(), *others.values()))

    def part(scheme: str, of: Callable[[Traffic], int]) -> list[Spread]:
        workers = NUMBERS["leaf-spine"]
        return [
            Spread.of([100 * of(each[scheme]) / (workers * SIZE) for each in found[setting]])
            for setting in others["leaf-spine"]
        ]

    def summed(scheme: str) -> Spread:
        workers = NUMBERS["fat-tree"]
        sent = workers * SIZE
        of: list[Callable[[Traffic], int]] = [lambda traffic: traffic.in_network]
        if scheme == "goat":
            of.append(lambda traffic: sent - traffic.direct)
        return Spread.of_each(
            [amount(each[scheme]) / GB for each in found[setting]]
            for setting in others["fat-tree"]
            for amount in of
        )

    server = {scheme: part(scheme, lambda traffic: traffic.server) for scheme in SCHEMES}
    server["goat"] += part("goat", lambda traffic: traffic.direct)
    findings = [
        Finding(
            "Fig. 13",
            f"leaf-spine, 35 workers: {SCHEMES[scheme]}'s bytes at the server, of all that "
            "workers send",
            paper,
            Spread.over(server[scheme]),
            unit="%",
            swept=f"{OVER}, {COUNTED}" if scheme == "goat" else OVER,
        )
        for scheme, paper in PARTS["leaf-spine"].items()
    ]
    findings += [
        Finding(
            "Fig. 14",
            f"fat-tree, 40 workers: what {SCHEMES[scheme]} sums on the way",
            paper,
            summed(scheme),
            unit="GB",
            swept=f"{OVER}, {COUNTED}" if scheme == "goat" else OVER,
        )
        for scheme, paper in IN_NETWORK_GB.items()
    ]
    findings += [
        Finding(
            "Fig. 13",
            f"{topology}: bytes at the server of the best of the others by GOAT's, for the number "
            "of workers where that is least",
            "GOAT has the least",
            worst(found, settings, lambda traffic: traffic.server),
            holds=MORE,
            unit="x",
        )
        for topology, settings in points.items()
    ]

    def panels(topology: str) -> list[Panel]:
        settings, fat = points[topology], topology == "fat-tree"
        server = lines(found, settings, lambda traffic: traffic.server, list(SCHEMES))
        summed = lines(found, settings, lambda traffic: traffic.in_network, list(IN_NETWORK_GB))
        server += mark({} if fat else SERVER_GB, 35)
        summed += mark(IN_NETWORK_GB if fat else {}, 40)
        return [
            Panel(server, "workers", "at the server (GB)", topology, least_y=0),
            Panel(summed, "workers", "summed on the way (GB)", topology, least_y=0),
        ]

    every = [panel for topology in points for panel in panels(topology)]
    return outcome(findings, Picture(every, (10, 8), rows=2))


def worst(
    found: Found, settings: Sequence[Setting], of: Callable[[Traffic], int], other: str = ""
) -> Spread:
    """Return for each drawing the least of the ratios of the best of the others to GOAT."""
    others = [other] if other else ["esa", "atp", "geryon"]

    def ratio(each: Mapping[str, Traffic]) -> float:
        return min(of(each[scheme]) for scheme in others) / of(each["goat"])

    by_drawing = zip(*(found[setting] for setting in settings), strict=True)
    return Spread.of([min(map(ratio, of_one)) for of_one in by_drawing])


def lines(
    found: Found,
    settings: Sequence[Setting],
    of: Callable[[Traffic], int],
    schemes: Sequence[str],
    along: str = "workers",
) -> list[Mark]:
    """Return medians of GB with their intervals, a line for each scheme."""
    return [
        Whiskers(
            [getattr(setting, along) for setting in settings],
            [Spread.of([of(each[scheme]) / GB for each in found[one]]) for one in settings],
            SCHEMES[scheme],
            look={"color": COLOURS[scheme]},
            of_interval=True,
        )
        for scheme in schemes
    ]


def mark(paper: Mapping[str, float], workers: int) -> list[Mark]:
    """Return the paper's numbers, in the schemes' colours."""
    look = {"markersize": 11, "markeredgewidth": 2}
    marks: list[Mark] = [
        Line([workers], [value], "x", look={"color": COLOURS[scheme], **look})
        for scheme, value in paper.items()
    ]
    return [*marks, Line([], [], "kx", "paper")] if paper else []


EXPERIMENT = Experiment(
    "aggregation", "Bytes at the server, and summed on the way (Figures 13 and 14)", run
)
