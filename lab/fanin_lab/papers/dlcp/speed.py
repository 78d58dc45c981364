"""§5.1, Figures 11, 13 and 15(b): how fast ten machines train, beside ByteScheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fanin_lab.papers.finding import MORE, NONE, Range
from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import Panel, Picture, Whiskers
from fanin_lab.papers.simulated import (
    At,
    Cases,
    Change,
    Either,
    Read,
    Row,
    Simulated,
    by,
    computed,
    figure,
    ratio,
)

BATCHES = {"resnet50": 32, "vgg16": 16, "inception-v3": 32, "transformer": 10}
MODELS = Either(["vgg16", "resnet50", "inception-v3", "transformer"], quick=["resnet50"])
"""The longest first, so that none is alone at the end."""
NAMES = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG16",
    "inception-v3": "Inception-v3",
    "transformer": "Transformer",
}
SYSTEMS = {"baseline": "TensorFlow", "bytescheduler": "ByteScheduler", "dlcp": "DLCP"}
RING_GAINS = {"resnet50": 1.11, "vgg16": 1.07}
"""Of DLCP in a ring, by ByteScheduler there (§5.1.2, Figure 13)."""
BOUNDS = ["1%", "30%"]
"""Figure 15's, besides 10 %."""
MANY, FEW = 10, 2
"""Workers."""
ITERATIONS = 4
SEEDS = 3
SCALE = Either(1.0, quick=16.0)
"""Usually nothing is scaled down: how long a flow is beside a timeout is what counts."""
SWEPT: list[dict[str, Any]] = [
    {"flops": 5e12},
    {"flops": 2e13},
    {"partition": "1MB"},
    {"threshold": "100kB"},
    {"threshold": "400kB"},
    {"threshold": "900kB"},
    {"step": 0.1},
    {"divide_above": "100kB"},
]
"""What the paper does not give, at ten workers and ResNet-50."""
OVER = (
    "5, 10 or 20 TFLOP/s a GPU, ByteScheduler's pieces of 4 or 1 MB and four of them on their way, "
    "DLCP's first threshold at 30 to 900 kB and the next ones 0.5 or 0.1 of it apart, tensors "
    "divided among its servers above 4 MB or 100 kB"
)
OUR_BYTES, PAPER_BYTES = 1400, 1456
"""Of gradients in a packet. Our header has 72 bytes. The paper's has a tensor, a length, an offset
and a number (§4.1): 16 bytes, if each has four."""
QUIET = "1600us"
"""As long as a queue that has half of a switch's memory takes to drain: signals overtake it."""


def scenario(
    system: str,
    model: str,
    workers: int,
    scale: float,
    flops: float = 1e13,
    partition: str = "4MB",
    threshold: str = "30kB",
    step: float = 0.5,
    divide_above: str | None = None,
    loss_bound: str = "10%",
    faster: float = 1.0,
) -> Scenario:
    """Return a training whose servers are beside the workers, half of them on each rack.

    `faster`: times as fast links as the paper's.
    """
    network: dict[str, Any] = {
        "topology": "leaf-spine",
        "leaves": 2,
        "spines": 2,
        "hosts": 5,
        "rate": f"{10 * faster:g}Gbit",
        "core_rate": f"{25 * faster:g}Gbit",
        "shared_buffer": "4MB",
        "queue": "4MB",
    }
    job: dict[str, Any] = {
        "workers": [f"h{rack * 5 + at}" for rack in range(2) for at in range(workers // 2)],
        "model": model,
        "batch": BATCHES[model],
        "flops": flops,
        "jitter": "2%",
        "iterations": ITERATIONS,
        "scale": scale,
    }
    transport = {"rto_min": "5ms"}
    match system:
        case "baseline":
            job |= {"system": "tcp-ps", "transport": transport}
        case "bytescheduler":
            credit = f"{4 * int(partition.removesuffix('MB'))}MB"
            job |= {"system": "tcp-ps", "transport": transport, "overlap": True}
            job |= {"partition": partition, "credit": credit}
        case "ring":
            job |= {"system": "ring", "overlap": True}
        case _:
            way = {"way": "ring"} if system == "dlcp-ring" else {"servers": workers}
            job |= {"system": "dlcp", "overlap": True, "spray": True, "quiet": QUIET, **way}
            job |= {"loss_bound": loss_bound, "finish": "bound-met"}
            if divide_above:
                job["divide_above"] = divide_above
            network["selective_dropping"] = {"threshold": threshold, "step": step}
    return {
        "title": f"Figure 11: {system}, {model}, {workers} workers",
        "until": "60s",
        # VGG16's largest variable keeps its server's link busy for 3 s, in which nothing returns.
        "stall": "20s",
        "interval": "1s",
        "payload": "sample",
        "network": network,
        "job": [job],
    }


def speed(model: str) -> Read:
    """Return what reads samples a second and worker."""
    return lambda report: ITERATIONS * BATCHES[model] / float(report["jobs"][0]["finished_s"])


def _lost(report: Report) -> float:
    """Return what queues dropped, in percent of what hosts sent."""
    dropped = sum(int(drop["count"]) for drop in report["drops"])
    return 100 * dropped / int(report["jobs"][0]["packets_sent"])


def by_system(at: At, model: str, one: str, other: str, workers: int = MANY) -> list[float]:
    """Return one system's speed by another's."""
    case = {"model": model, "workers": workers}
    return at.by(speed(model), {"system": one, **case}, {"system": other, **case})


def gain(at: At, model: str, workers: int, system: str) -> list[float]:
    """Return DLCP's speed by a system's."""
    return by_system(at, model, "dlcp", system, workers)


def gain_grows(at: At) -> list[float]:
    """Return how much larger ResNet-50's gain is with more workers."""
    return by(*(gain(at, "resnet50", workers, "bytescheduler") for workers in (MANY, FEW)))


def end_of_models(at: At, choose: Choose, workers: int, system: str) -> Spread:
    """Return the least or the most of all models' gains."""
    return end(choose, [gain(at, model, workers, system) for model in BATCHES])


def slowest_bound(at: At) -> Spread:
    """Return DLCP's speed by ByteScheduler's, with the bound with which it is slowest."""
    bounds = [{**OF_DLCP, "loss_bound": bound} for bound in ("1%", "10%", "30%")]
    rival = {**OF_RESNET, "system": "bytescheduler"}
    return end(min, [at.by(speed("resnet50"), bound, rival) for bound in bounds])


Choose = Callable[..., Spread]


def end(choose: Choose, samples: Sequence[Sequence[float]]) -> Spread:
    """Return the spread whose median is the least or the most."""
    return choose(map(Spread.of, samples), key=lambda spread: spread.median)


OF_RESNET: dict[str, Any] = {"model": "resnet50", "workers": MANY}
OF_DLCP = {"system": "dlcp", **OF_RESNET}


def picture(at: At) -> Picture:
    """Show each model's speeds by the workers."""
    models = [model for model in BATCHES if model in at.values("model")]

    def line(model: str, system: str) -> Whiskers:
        case = {"model": model, "system": system}
        speeds = [at.spread(speed(model), **case, workers=workers) for workers in (FEW, MANY)]
        return Whiskers([FEW, MANY], speeds, SYSTEMS[system])

    panels = [
        Panel(
            [line(model, system) for system in SYSTEMS],
            "workers",
            "samples a second and worker",
            NAMES[model],
            least_y=0,
        )
        for model in models
    ]
    return Picture(panels, (3.4 * len(models) + 2.6, 4.2))


def _cases(
    systems: Sequence[str], models: Any, workers: Sequence[int], settings: Any = ({},), **more: Any
) -> Cases:
    axes = {"workers": workers, "model": models, "system": systems, **more}
    return Cases(axes, settings, seeds=SEEDS, throughputs=False)


AS_USUAL = [
    _cases(list(SYSTEMS), MODELS, [MANY, FEW]),
    _cases(["ring", "dlcp-ring"], Either(list(RING_GAINS), quick=[]), [MANY]),
    _cases(["dlcp"], ["resnet50"], [MANY], loss_bound=BOUNDS),
]
USUALLY = partial(Row, unit="x", usual_only=True)
EXPERIMENT = Simulated(
    "speed",
    "Training speed (Figures 11, 13 and 15(b))",
    scenario,
    [
        *AS_USUAL,
        _cases(["bytescheduler", "dlcp"], ["resnet50"], [MANY], Either([{}, *SWEPT], quick=[{}])),
    ],
    [
        Row(
            "Fig. 11",
            "ResNet-50, 10 workers: DLCP's speed by ByteScheduler's",
            1.734,
            computed(gain, "resnet50", MANY, "bytescheduler"),
            "x",
        ),
        USUALLY(
            "Fig. 11",
            "ResNet-50: by how much DLCP's gain over ByteScheduler is larger with 10 workers than "
            "with 2",
            "more",
            gain_grows,
            holds=MORE,
        ),
        USUALLY(
            "§5.1.2",
            "packets that queues drop of ByteScheduler's, of all it sends, ResNet-50, 10 workers",
            0.53,
            figure(_lost, system="bytescheduler", **OF_RESNET),
            unit="%",
        ),
        *(
            USUALLY(
                "Fig. 11",
                f"of four models, {workers} workers: {which} of DLCP's speeds by "
                f"{SYSTEMS[system]}'s",
                paper,
                computed(end_of_models, choose, workers, system),
            )
            for workers, which, choose, system, paper in [
                (MANY, "the least", min, "bytescheduler", 1.457),
                (FEW, "the least", min, "bytescheduler", 1.29),
                (FEW, "the most", max, "bytescheduler", 1.362),
                (MANY, "the least", min, "baseline", 2.046),
                (MANY, "the most", max, "baseline", 4.685),
            ]
        ),
        *(
            USUALLY(
                "Fig. 13",
                f"{NAMES[model]}, {MANY} workers: speed of DLCP in a ring by a ring's",
                paper,
                computed(by_system, model, "dlcp-ring", "ring"),
            )
            for model, paper in RING_GAINS.items()
        ),
        USUALLY(
            "Fig. 15(b)",
            "ResNet-50, 10 workers: speed with a bound of 10 % by that with 1 %",
            "almost the same",
            ratio(speed("resnet50"), OF_DLCP, {**OF_DLCP, "loss_bound": BOUNDS[0]}),
            holds=Range(1 - NONE, 1 + NONE),
        ),
        USUALLY(
            "Fig. 15(b)",
            "ResNet-50, 10 workers: speed with the bound of 1 %, 10 % or 30 % that is slowest, by "
            "ByteScheduler's",
            "faster",
            slowest_bound,
            holds=MORE,
        ),
    ],
    picture,
    usual={"scale": SCALE},
    over=OVER,
    changes=[
        Change(
            "links 1.04 times as fast for DLCP: the paper's packets carry 1,456 bytes, ours 1,400",
            {"faster": PAPER_BYTES / OUR_BYTES},
            where={"system": ["dlcp", "dlcp-ring"]},
            cases=AS_USUAL,
        )
    ],
).experiment()
