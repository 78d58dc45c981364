"""§4.1.1, Eq. 7: how many times faster than a ring, and than parameter servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers.byteps import equations
from fanin_lab.papers.byteps.plans import plans
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ks = range(1, MACHINES + 1)
        for at, (name, of, found, printed) in enumerate(
            (
                ("a ring", equations.by_ring, by_ring, BY_RING),
                ("k parameter servers", equations.by_parameter_server, by_servers, BY_SERVERS),
            )
        ):
            axes.plot(ks, [of(MACHINES, k) for k in ks], color=f"C{at}")
            axes.plot(steps, [found[k] for k in steps], f"C{at}o", label=f"by {name}")
            axes.plot([SPARES], [printed], "kx", markersize=12, label=None if at else "paper")
        axes.set_yscale("log", base=2)
        axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        finish(axes, "k", "times faster", "Eq. 7 (lines) and fanin plan (dots)")

    def example(name: str, printed: float, value: float) -> Finding:
        what = f"n = {MACHINES}, k = {SPARES}: {name}"
        holds = Range(printed - PRINTED, printed + PRINTED)
        return Finding("§4.1.1", what, f"{printed}", Spread.of([value]), holds=holds, unit="x")

    return Outcome(
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
        draw,
        {"by_ring": by_ring, "by_parameter_servers": by_servers},
    )


EXPERIMENT = Experiment(
    "acceleration", f"Times faster, {MACHINES} machines that train (Eq. 7)", run
)
