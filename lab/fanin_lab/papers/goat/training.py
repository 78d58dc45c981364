"""§VII-B, Exp 1 and 2, Figures 5 to 9: gradients on the testbed, packet by packet, scaled.

How long its GPUs compute, and what a byte costs its hosts, is not known. The cost is fitted on
Geryon's communication with ResNet-18, and an epoch's rest on GOAT's epoch. All else is played with
these, over how late workers are, and over what else the paper does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanin_lab.papers.finding import MORE
from fanin_lab.papers.goat import testbed
from fanin_lab.papers.goat.drawn import COLOURS, SCHEMES
from fanin_lab.papers.goat.packets import DEVIATION, PACKET, systems
from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import Bars, Line, Mark, Panel, Picture, Whiskers
from fanin_lab.papers.simulated import (
    At,
    Cases,
    Either,
    Formula,
    Row,
    Simulated,
    by,
    computed,
    each,
    figure,
)

SIZES_MB = {
    "ResNet-18": 44,
    "ResNet-34": 87,
    "ResNet-50": 98,
    "DenseNet-121": 32,
    "DenseNet-169": 57,
    "DenseNet-201": 80,
}
WORKERS = [4, 8, 12, 16]
MOST = WORKERS[-1]
RIVALS = ("esa", "atp", "geryon")
EPOCH_S = {"goat": 2.2, "esa": 3.5, "atp": 4.0, "geryon": 4.65}
"""Of ResNet-18 with 16 workers (Figure 8(a))."""
COMMUNICATION_S = {"goat": 0.36, "esa": 1.34, "atp": 1.64, "geryon": 1.95}
"""The same of Figure 9(a)."""
REST_S = EPOCH_S["goat"] - COMMUNICATION_S["goat"]
"""The rest of GOAT's epoch."""
DEEPER = 2.27
"""How many times as many operations an image takes with ResNet-50 as with ResNet-18, at most."""
TO_ACCURACY_S = {"goat": 802.4, "esa": 1208.48, "atp": 1312.6, "geryon": 1416.9}
"""Of ResNet-50 with 16 workers (Figure 7(b)): epochs of unlike schemes are alike."""
FIGURE_5 = 8
"""Workers."""
IMAGES = {"goat": 276, "esa": 240, "atp": 219, "geryon": 180}
"""A second, of DenseNet-121 with 8 workers (Figure 5)."""
BATCHES = (64, 128)
"""A worker's images in an epoch. The paper says 64. But 16 workers have 931 images a second, and an
epoch takes 2.2 s, which are 128 for each."""
STEPS = 3
TIMEOUT = "25us"
"""A millisecond at least, as ATP has it here, by the scale."""
SCALE = 40
BYTE_COST = "1.75ns"
LATE_S = 1.0
"""The paper's of §VII-C: a ratio of this, normally distributed. With 16 workers the server's first
and last gradients are up to 1.83 s apart (§VII-B), so others are played, too."""
LATER = [0.3, 1.83, 3.0]
WINDOW = 64
"""Packets, as in `packets.py`."""
OVER = (
    "workers late by a normally distributed part of 0.3, 1, 1.83 or 3 s, memories of 20 MB "
    f"(§VII-B) or 16,384 registers (§VI), windows of the model or of {WINDOW} packets"
)
FITTED = "it was fitted"


def scenario(
    scheme: str,
    model: str,
    workers: int,
    late_s: float = LATE_S,
    memory: int = testbed.MEMORY,
    window: int = 0,
) -> Scenario:
    """Return gradients of a model on the testbed; sizes, memories and times have one factor."""
    names = [f"w{worker}" for worker in range(1, workers + 1)]
    halves = zip(names, ["s1"] * (workers // 2) + ["s2"] * (workers // 2), strict=True)
    links = [*halves, ("ps", "s3"), ("s1", "s2"), ("s1", "s3"), ("s2", "s3")]
    size = SIZES_MB[model] * 1_000_000
    room = int(memory / SCALE / PACKET)
    packets = size // (SCALE * PACKET)
    plan = {"planner": "krgs", "sub_models": size // testbed.SUB_MODEL}
    job: dict[str, Any] = {
        "workers": names,
        "server": "ps",
        "tensor": f"{packets * PACKET}B",
        "tensors": STEPS,
        "in_flight": 1,
        "elements": PACKET // 4,
        "congestion_control": False,
        "timeout": TIMEOUT,
        # Usually a whole model is on its way.
        "window": window or packets,
        **systems(None)[scheme],
        **(plan if scheme == "goat" else {}),
    }
    if late_s:
        job["late"] = {"most": f"{1e6 * late_s / SCALE:.3f}us", "deviation": DEVIATION}
    return {
        "title": f"{SCHEMES[scheme]}, {model} on the testbed, {workers} workers",
        "until": "60s",
        "interval": "1s",
        "payload": "sample",
        "network": {
            "topology": "own",
            "rate": "100Gbit",
            "queue": "256MB",
            "host_byte_cost": BYTE_COST,
        },
        "switch": {"aggregators": room, "ways": 1},
        "node": [
            *({"kind": "switch", "name": switch} for switch in testbed.SWITCHES),
            *({"kind": "host", "name": host} for host in [*names, "ps"]),
        ],
        "link": [{"link": list(ends)} for ends in links],
        "job": [job],
    }


def communication_s(report: Report) -> float:
    """Read how long a gradient takes, from a worker's sending to the model's return."""
    return SCALE * float(report["jobs"][0]["tensor_times"]["mean_s"])


def epoch_s(at: At, scheme: str, rest_s: float = REST_S, **case: Any) -> list[float]:
    """Return epochs whose rest is so long."""
    return [rest_s + one for one in at.samples(communication_s, scheme=scheme, **case)]


def by_goat(at: At, rival: str, rest_s: float = REST_S, **case: Any) -> list[float]:
    """Return a rival's epoch by GOAT's."""
    return by(epoch_s(at, rival, rest_s, **case), epoch_s(at, "goat", rest_s, **case))


def resnet_18(at: At, rival: str) -> list[float]:
    """Return a rival's epoch of ResNet-18 by GOAT's."""
    return by_goat(at, rival, model="ResNet-18", workers=MOST)


def to_accuracy(at: At, rival: str) -> Spread:
    """Return the same of ResNet-50, whatever the rest of an epoch is."""
    rests = (REST_S, DEEPER * REST_S)
    case = {"model": "ResNet-50", "workers": MOST}
    return Spread.of_each(by_goat(at, rival, rest_s, **case) for rest_s in rests)


def images_a_second(at: At, scheme: str) -> Spread:
    """Return DenseNet-121's, with the rest of an epoch with which GOAT has the paper's."""
    case = {"model": "DenseNet-121", "workers": FIGURE_5}
    goat_s = at.spread(communication_s, scheme="goat", **case).median

    def of(batch: int) -> list[float]:
        images = FIGURE_5 * batch
        rest_s = images / IMAGES["goat"] - goat_s
        return [images / one for one in epoch_s(at, scheme, rest_s, **case)]

    return Spread.of_each(map(of, BATCHES))


def ahead(at: At, models: Sequence[str], workers: Sequence[int]) -> list[float]:
    """Return the best of the others' communication by GOAT's, where that is least."""
    best = [
        each(min, [by_goat(at, rival, 0, model=model, workers=n) for rival in RIVALS])
        for model in models
        for n in workers
    ]
    return each(min, best)


def picture(at: At) -> Picture:
    """Show communication by the workers and by the models."""
    models = at.values("model")

    def by_workers() -> Panel:
        played = sorted(at.played("workers", scheme="goat", model="ResNet-18"))
        marks: list[Mark] = []
        for scheme, name in SCHEMES.items():
            case = {"scheme": scheme, "model": "ResNet-18"}
            spreads = [at.spread(communication_s, **case, workers=n) for n in played]
            marks.append(Whiskers(played, spreads, name, look={"color": COLOURS[scheme]}))
            paper = {"color": COLOURS[scheme], "markersize": 11}
            marks.append(Line([MOST], [COMMUNICATION_S[scheme]], "x", look=paper))
        marks.append(Line([], [], "kx", "paper"))
        return Panel(marks, "workers", "communication (s)", "ResNet-18", ticks=played, least_y=0)

    def by_model() -> Panel:
        marks: list[Mark] = []
        for place, (scheme, name) in enumerate(SCHEMES.items()):
            case = {"scheme": scheme, "workers": FIGURE_5}
            spreads = [at.spread(communication_s, model=model, **case) for model in models]
            places = [n + 0.2 * (place - 1.5) for n in range(len(models))]
            marks.append(Bars(places, spreads, name, 0.2, {"color": COLOURS[scheme]}))
        ticks = {at: model.replace("-", "\n") for at, model in enumerate(models)}
        title = f"{FIGURE_5} workers"
        return Panel(marks, "", "communication (s)", title, ticks=ticks, least_y=0)

    return Picture([by_workers(), by_model()], (12, 4.6))


def _cases(models: Any, workers: Any, settings: Any = ({},)) -> Cases:
    axes = {"workers": workers, "scheme": list(SCHEMES), "model": models}
    return Cases(axes, settings, seeds=SEEDS, throughputs=False)


def _row(
    place: str, what: str, paper: float | str, ours: Formula, unit: str = "x", **more: Any
) -> Row:
    return Row(place, f"played: {what}", paper, ours, unit, **more)


SEEDS = 3
SWEPT = Either(
    [
        {},
        *({"late_s": late_s} for late_s in LATER),
        {"memory": testbed.REGISTERS},
        {"window": WINDOW},
    ],
    quick=[{}],
)
EXPERIMENT = Simulated(
    "training",
    "Epochs on the testbed (Figures 5 to 9)",
    scenario,
    [
        _cases("ResNet-18", MOST, SWEPT),
        _cases("ResNet-18", FIGURE_5),
        _cases(Either(["ResNet-50"], quick=[]), MOST, SWEPT),
        _cases(Either(["DenseNet-121"], quick=[]), FIGURE_5, SWEPT),
        _cases(Either(list(SIZES_MB), quick=[]), FIGURE_5),
        _cases(Either(["ResNet-18", "ResNet-50"], quick=[]), WORKERS),
    ],
    [
        *(
            _row(
                "Fig. 9(a)",
                f"ResNet-18, 16 workers: {name}'s communication",
                COMMUNICATION_S[scheme],
                figure(communication_s, scheme=scheme, model="ResNet-18", workers=MOST),
                "s",
                cannot_fail=FITTED if scheme == "geryon" else "",
            )
            for scheme, name in SCHEMES.items()
        ),
        *(
            _row(
                "Fig. 8(a)",
                f"ResNet-18, 16 workers: {SCHEMES[rival]}'s epoch, by GOAT's",
                round(EPOCH_S[rival] / EPOCH_S["goat"], 2),
                computed(resnet_18, rival),
            )
            for rival in RIVALS
        ),
        *(
            _row(
                "Fig. 7(b)",
                f"ResNet-50, 16 workers: {SCHEMES[rival]}'s epoch, by GOAT's",
                round(TO_ACCURACY_S[rival] / TO_ACCURACY_S["goat"], 2),
                computed(to_accuracy, rival),
                swept=f"{OVER}, an epoch's rest as with ResNet-18 or {DEEPER} times that",
            )
            for rival in RIVALS
        ),
        *(
            _row(
                "Fig. 5",
                f"DenseNet-121, 8 workers: {SCHEMES[rival]}'s images a second",
                IMAGES[rival],
                computed(images_a_second, rival),
                "",
                swept=f"{OVER}, batches of 64 or 128",
            )
            for rival in RIVALS
        ),
        _row(
            "Fig. 5",
            "six models, 8 workers: the best of the others' communication by GOAT's, for the model "
            "where that is least",
            "GOAT has the most throughput",
            computed(ahead, list(SIZES_MB), [FIGURE_5]),
            holds=MORE,
            usual_only=True,
        ),
        _row(
            "Fig. 6",
            "ResNet-18 and ResNet-50, 4 to 16 workers: the best of the others' communication by "
            "GOAT's, where that is least",
            "GOAT has the most throughput",
            computed(ahead, ["ResNet-18", "ResNet-50"], WORKERS),
            holds=MORE,
            usual_only=True,
        ),
    ],
    picture,
    over=OVER,
).experiment()
