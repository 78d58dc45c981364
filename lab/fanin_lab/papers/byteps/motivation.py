"""§3.1, Figure 4: VGG-16 on 32 GPUs, by architecture and the number of CPU machines.

ByteScheduler, which the figure has as well, is not played; nor is native PS without CPU machines.
"""

from __future__ import annotations

from collections.abc import Callable

from fanin_lab.papers.byteps.training import (
    MOTIVATION,
    OVER_OVERLAP,
    OVER_RING,
    OVER_SERVERS,
    SHOWN,
    Case,
    Setting,
    Systems,
    Trained,
    of_lab,
)
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Level, Line, Panel, Picture, outcome

MACHINES = 4
SPARES = range(MACHINES + 1)
FAR_FROM_LINEAR = at_most(80.0)
"""§3.1: "far from the linear scaling"."""
OVER_FLOPS = "GPUs of 5, 10, 20 or 40 TFLOP/s"


def run(lab: Lab) -> Outcome:
    """Train it with each number of CPU machines."""
    settings = of_lab(lab)
    systems = Systems(lab, "motivation", "nvlink", [(MACHINES, k) for k in SPARES])

    def byteps(k: int, of: Setting) -> Case:
        return systems.byteps(MOTIVATION, MACHINES, k, of)

    def ring(of: Setting) -> Case:
        return systems.ring(MOTIVATION, MACHINES, of)

    def servers(k: int, of: Setting) -> Case:
        return systems.servers(MOTIVATION, MACHINES, of, k=k)

    with_servers = [k for k in SPARES if k]
    trained = Trained(
        lab,
        "motivation",
        [
            case
            for of in settings
            for case in (
                *(byteps(k, of) for k in SPARES),
                ring(of),
                *(servers(k, of) for k in with_servers),
            )
        ],
    )

    def over(figure: Callable[[Setting], float]) -> Spread:
        return Spread.of_each([figure(of)] for of in settings)

    def percent(case: Case) -> float:
        return 100 * trained.efficiency(case)

    swept = OVER_OVERLAP if lab.quick else f"{OVER_FLOPS}, {OVER_OVERLAP}"
    worst = f"for the worst k of {SPARES[0]} to {SPARES[-1]}"
    rows = [
        Finding(
            "Fig. 4",
            f"BytePS by all-reduce without ByteScheduler, {worst}",
            "outperforms all of above at any given number of CPU machines",
            over(lambda of: min(trained.gain(byteps(k, of), ring(of)) for k in SPARES)),
            MORE,
            "x",
            f"{swept}, {OVER_RING}",
        ),
        Finding(
            "Fig. 4",
            f"BytePS by native PS without ByteScheduler, for the worst k of 1 to {SPARES[-1]}",
            "outperforms all of above at any given number of CPU machines",
            over(lambda of: min(trained.gain(byteps(k, of), servers(k, of)) for k in with_servers)),
            MORE,
            "x",
            f"{swept}, {OVER_SERVERS}",
        ),
        Finding(
            "Fig. 4",
            "all-reduce by native PS, for the best k",
            "PS has the worst performance even with additional CPU machines",
            over(lambda of: min(trained.gain(ring(of), servers(k, of)) for k in with_servers)),
            MORE,
            "x",
            f"{swept}, {OVER_RING}, {OVER_SERVERS}",
        ),
        Finding(
            "Fig. 4",
            "all-reduce's part of linear scaling",
            "far from the linear scaling: our bound is 80 %",
            over(lambda of: percent(ring(of))),
            FAR_FROM_LINEAR,
            "%",
            f"{swept}, {OVER_RING}",
        ),
        Finding(
            "Fig. 4",
            "native PS's part of linear scaling, for the best k",
            "far from the linear scaling: our bound is 80 %",
            over(lambda of: max(percent(servers(k, of)) for k in with_servers)),
            FAR_FROM_LINEAR,
            "%",
            f"{swept}, {OVER_SERVERS}",
        ),
    ]
    panel = Panel(
        [
            Line(SPARES, [percent(byteps(k, SHOWN)) for k in SPARES], "C0o-", "BytePS"),
            Level(percent(ring(SHOWN)), "all-reduce"),
            Line(
                with_servers,
                [percent(servers(k, SHOWN)) for k in with_servers],
                "C3o-",
                "native PS",
            ),
        ],
        "machines that only sum, k",
        "% of linear scaling",
        "VGG-16, 4 machines, GPUs of 10 TFLOP/s",
        ticks=list(SPARES),
        least_y=0,
        most_y=105,
    )
    return outcome(rows, Picture([panel]))


EXPERIMENT = Experiment("motivation", "VGG-16 on 32 GPUs, by architecture (Figure 4)", run)
