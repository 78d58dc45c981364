"""§4.1.1, Eq. 7: how many times faster than a ring, and than parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fanin_lab.papers.byteps import equations
from fanin_lab.papers.byteps.plans import plans
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Line, Panel, Picture, outcome

MACHINES, SPARES = 32, 16
"""The paper's example."""
BY_RING, BY_SERVERS = 1.46, 1.52
"""What the paper prints for it. 1 + 16 / 32 - 32 / 1024 is 1.469."""
PRINTED = 0.01
"""What a number with two decimals may hide, where it was cut and not rounded."""
EQUAL = 256
"""As many machines that train as that only sum."""
STEPS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
STEPS_QUICK = [1, 8, 16, 32]
BIG = {"markersize": 12}
Of = Callable[[int, int], float]
"""A formula of n and k."""


def run(lab: Lab) -> Outcome:
    """Plan with all services, and with those of machines that only sum alone."""
    steps = STEPS_QUICK if lab.quick else STEPS
    clusters = [(MACHINES, k) for k in steps]
    best = plans(lab, clusters)
    servers = plans(lab, clusters, own=False)
    by_ring = {k: best[MACHINES, k].ring_s / best[MACHINES, k].time_s for k in steps}
    by_servers = {k: servers[MACHINES, k].time_s / best[MACHINES, k].time_s for k in steps}
    equal = plans(lab, [(EQUAL, EQUAL)])[EQUAL, EQUAL]
    limit = equal.ring_s / equal.time_s

    def marks(
        colour: str, of: Of, found: Mapping[int, float], name: str, printed: float
    ) -> list[Line]:
        ks = range(1, MACHINES + 1)
        return [
            Line(ks, [of(MACHINES, k) for k in ks], look={"color": colour}),
            Line(steps, [found[k] for k in steps], f"{colour}o", f"by {name}"),
            Line([SPARES], [printed], "kx", "paper" if name == "a ring" else None, BIG),
        ]

    servers_of = equations.by_parameter_server
    panel = Panel(
        [
            *marks("C0", equations.by_ring, by_ring, "a ring", BY_RING),
            *marks("C1", servers_of, by_servers, "k parameter servers", BY_SERVERS),
        ],
        "k",
        "times faster",
        "Eq. 7 (lines) and fanin plan (dots)",
        log_y=2,
        y_ticks={2**power: f"{2**power}" for power in range(5)},
    )

    def example(name: str, printed: float, value: float) -> Finding:
        what = f"n = {MACHINES}, k = {SPARES}: {name}"
        holds = Range(printed - PRINTED, printed + PRINTED)
        return Finding("§4.1.1", what, f"{printed}", Spread.of([value]), holds=holds, unit="x")

    return outcome(
        [
            example("times as fast as a ring (gamma_a)", BY_RING, by_ring[SPARES]),
            example("times as fast as servers (gamma_p)", BY_SERVERS, by_servers[SPARES]),
            Finding(
                "§4.1.1",
                f"k = n = {EQUAL}: times as fast as a ring (Eq. 7)",
                "tends to 2",
                Spread.of([limit]),
                holds=Range(1.99, 2),
                unit="x",
            ),
        ],
        Picture([panel]),
    )


EXPERIMENT = Experiment(
    "acceleration", f"Times faster, {MACHINES} machines that train (Eq. 7)", run
)
