"""§5.1, Figures 11, 13 and 15(b): how fast ten machines train, beside ByteScheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import MORE, NONE, Experiment, Finding, Outcome, Range
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = {"resnet50": 32, "vgg16": 16, "inception-v3": 32, "transformer": 10}
NAMES = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG16",
    "inception-v3": "Inception-v3",
    "transformer": "Transformer",
}
KINDS = {"baseline": "TensorFlow", "bytescheduler": "ByteScheduler", "dlcp": "DLCP"}
RINGS = {"ring": "a ring", "dlcp-ring": "DLCP in a ring"}
RING_GAINS = {"resnet50": 1.11, "vgg16": 1.07}
"""Of DLCP in a ring, by ByteScheduler there (§5.1.2, Figure 13)."""
BOUNDS = ["1%", "30%"]
"""Figure 15's, besides 10 %."""
FEW, MANY = 2, 10
"""Workers."""
ITERATIONS = 4
SCALE_QUICK = 16.0
"""Else nothing is scaled down: how long a flow is beside a timeout is what counts."""
SEEDS = 3
Setting = Mapping[str, Any]
SWEPT: list[Setting] = [
    {"flops": 5e12},
    {"flops": 2e13},
    {"partition": "1MB"},
    {"threshold": "100kB"},
    {"divide_above": "100kB"},
]
"""What the paper does not give, at ten workers and ResNet-50."""
OVER = (
    "5, 10 or 20 TFLOP/s a GPU, ByteScheduler's pieces of 4 or 1 MB and four of them on their way, "
    "DLCP's first threshold at 30 or 100 kB, tensors divided among its servers above 4 MB or 100 kB"
)
ONLY = {
    "partition": ["bytescheduler"],
    "threshold": ["dlcp"],
    "divide_above": ["dlcp"],
    "loss_bound": ["dlcp"],
}
"""Whom a setting says something about, where not all."""
QUIET = "1600us"
"""As long as a queue that has half of a switch's memory takes to drain: signals overtake it."""
LOSS = "packets that queues drop of ByteScheduler's, of all it sends, ResNet-50, 10 workers"
GAIN = "{}, {} workers: DLCP's speed by {}'s"
Wanted = tuple[str, str, int, Setting]
"""A kind, a model, workers, and what is not as usual."""


def run(lab: Lab) -> Outcome:
    """Train each model on two and ten machines, whose servers are beside the workers."""
    models = ["resnet50"] if lab.quick else list(BATCHES)
    swept = [] if lab.quick else SWEPT
    rings = [] if lab.quick else list(RING_GAINS)
    bounds: list[Setting] = [{"loss_bound": bound} for bound in BOUNDS]
    wanted: list[Wanted] = [
        (kind, model, workers, {}) for kind in KINDS for model in models for workers in (FEW, MANY)
    ]
    pair = ["bytescheduler", "dlcp"]
    wanted += [(kind, "resnet50", MANY, _of(kind, more)) for kind in pair for more in swept]
    wanted += [(kind, model, MANY, {}) for kind in RINGS for model in rings]
    wanted += [("dlcp", "resnet50", MANY, more) for more in bounds]
    speeds = _Speeds(lab, wanted)

    def gain(model: str, workers: int, kind: str, more: Setting = MappingProxyType({})) -> Spread:
        ours, theirs = _of("dlcp", more), _of(kind, more)
        return speeds.ratio(("dlcp", model, workers, ours), (kind, model, workers, theirs))

    resnet = [gain("resnet50", MANY, "bytescheduler", more) for more in [{}, *swept]]
    findings = [
        Finding(
            "Fig. 11",
            GAIN.format(NAMES["resnet50"], MANY, KINDS["bytescheduler"]),
            1.734,
            Spread.over(resnet),
            unit="x",
            swept=OVER if swept else "",
        ),
        Finding(
            "Fig. 11",
            "ResNet-50: by how much DLCP's gain over ByteScheduler is larger with 10 workers than "
            "with 2",
            "more",
            speeds.gain_grows("resnet50"),
            holds=MORE,
            unit="x",
        ),
        Finding(
            "§5.1.2",
            LOSS,
            0.53,
            speeds.lost("bytescheduler", "resnet50"),
            unit="%",
        ),
    ]
    if not lab.quick:
        least = [gain(model, MANY, "bytescheduler") for model in models]
        few = [gain(model, FEW, "bytescheduler") for model in models]
        base = [gain(model, MANY, "baseline") for model in models]
        of_four = "of four models, {} workers: {} of DLCP's speeds by {}'s"
        for workers, which, kind, paper, spread in [
            (MANY, "the least", "bytescheduler", 1.457, _end(min, least)),
            (FEW, "the least", "bytescheduler", 1.29, _end(min, few)),
            (FEW, "the most", "bytescheduler", 1.362, _end(max, few)),
            (MANY, "the least", "baseline", 2.046, _end(min, base)),
            (MANY, "the most", "baseline", 4.685, _end(max, base)),
        ]:
            what = of_four.format(workers, which, KINDS[kind])
            findings.append(Finding("Fig. 11", what, paper, spread, unit="x"))
    findings += [
        Finding(
            "Fig. 13",
            f"{NAMES[model]}, {MANY} workers: speed of DLCP in a ring by a ring's",
            RING_GAINS[model],
            speeds.ratio(("dlcp-ring", model, MANY, {}), ("ring", model, MANY, {})),
            unit="x",
        )
        for model in rings
    ]
    tight, loose = bounds
    findings += [
        Finding(
            "Fig. 15(b)",
            "ResNet-50, 10 workers: speed with a bound of 10 % by that with 1 %",
            "almost the same",
            speeds.ratio(("dlcp", "resnet50", MANY, {}), ("dlcp", "resnet50", MANY, tight)),
            holds=Range(1 - NONE, 1 + NONE),
            unit="x",
        ),
        Finding(
            "Fig. 15(b)",
            "ResNet-50, 10 workers: speed with the bound of 1 %, 10 % or 30 % that is slowest, by "
            "ByteScheduler's",
            "faster",
            _end(
                min,
                [
                    speeds.ratio(
                        ("dlcp", "resnet50", MANY, bound), ("bytescheduler", "resnet50", MANY, {})
                    )
                    for bound in (tight, {}, loose)
                ],
            ),
            holds=MORE,
            unit="x",
        ),
    ]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        figure.set_size_inches(3.4 * len(models) + 2.6, 4.2)
        for axes, model in zip(panels, models, strict=True):
            for kind, label in KINDS.items():
                found = [Spread.of(speeds.of(kind, model, workers, {})) for workers in (FEW, MANY)]
                axes.errorbar(
                    [FEW, MANY],
                    [spread.median for spread in found],
                    yerr=[
                        [spread.median - spread.least for spread in found],
                        [spread.most - spread.median for spread in found],
                    ],
                    fmt="o-",
                    capsize=3,
                    label=label,
                )
            axes.set_ylim(0)
            finish(axes, "workers", "samples a second and worker", NAMES[model])

    series = {
        f"{kind} {model}": [speeds.of(kind, model, workers, {}) for workers in (FEW, MANY)]
        for kind in KINDS
        for model in models
    }
    return Outcome(findings, draw, {"workers": [FEW, MANY], **series})


class _Speeds:
    """Samples a second and worker: lists, an entry a seed."""

    def __init__(self, lab: Lab, wanted: Sequence[Wanted]) -> None:
        # The longest first, so that none is alone at the end.
        order = sorted(wanted, key=lambda one: (-one[2], one[1] != "vgg16"))
        self._runs: dict[str, Runs] = lab.with_seeds(lab.seeds[:SEEDS]).play(
            {_name(*one): _scenario(lab, *one) for one in order}, throughputs=False
        )

    def of(self, kind: str, model: str, workers: int, more: Setting) -> list[float]:
        def speed(report: Report) -> float:
            return ITERATIONS * BATCHES[model] / float(report["jobs"][0]["finished_s"])

        return self._runs[_name(kind, model, workers, more)].samples(speed)

    def ratio(self, one: Wanted, other: Wanted) -> Spread:
        pairs = zip(self.of(*one), self.of(*other), strict=True)
        return Spread.of([ours / theirs for ours, theirs in pairs])

    def gain_grows(self, model: str) -> Spread:
        many, few = (
            [
                ours / theirs
                for ours, theirs in zip(
                    self.of("dlcp", model, workers, {}),
                    self.of("bytescheduler", model, workers, {}),
                    strict=True,
                )
            ]
            for workers in (MANY, FEW)
        )
        return Spread.of([one / other for one, other in zip(many, few, strict=True)])

    def lost(self, kind: str, model: str) -> Spread:
        """Return what queues dropped, in percent of what hosts sent."""

        def share(report: Report) -> float:
            dropped = sum(int(drop["count"]) for drop in report["drops"])
            return 100 * dropped / int(report["jobs"][0]["packets_sent"])

        return self._runs[_name(kind, model, MANY, {})].spread(share)


def _end(choose: Callable[..., Spread], spreads: Sequence[Spread]) -> Spread:
    return choose(spreads, key=lambda spread: spread.median)


def _of(kind: str, more: Setting) -> Setting:
    return {key: value for key, value in more.items() if kind in ONLY.get(key, [kind])}


def _scenario(lab: Lab, kind: str, model: str, workers: int, more: Setting) -> dict[str, Any]:
    partition = more.get("partition", "4MB")
    network: dict[str, Any] = {
        "topology": "leaf-spine",
        "leaves": 2,
        "spines": 2,
        "hosts": 5,
        "rate": "10Gbit",
        "core_rate": "25Gbit",
        "shared_buffer": "4MB",
        "queue": "4MB",
    }
    job: dict[str, Any] = {
        "workers": [f"h{at}" for at in _hosts(workers)],
        "model": model,
        "batch": BATCHES[model],
        "flops": more.get("flops", 1e13),
        "jitter": "2%",
        "iterations": ITERATIONS,
        "scale": SCALE_QUICK if lab.quick else 1.0,
    }
    transport = {"rto_min": "5ms"}
    match kind:
        case "baseline":
            job |= {"system": "tcp-ps", "transport": transport}
        case "bytescheduler":
            credit = f"{4 * int(partition.removesuffix('MB'))}MB"
            job |= {"system": "tcp-ps", "transport": transport, "overlap": True}
            job |= {"partition": partition, "credit": credit}
        case "ring":
            job |= {"system": "ring", "overlap": True}
        case _:
            way = {"way": "ring"} if kind == "dlcp-ring" else {"servers": workers}
            job |= {"system": "dlcp", "overlap": True, "spray": True, "quiet": QUIET, **way}
            job |= {"loss_bound": more.get("loss_bound", "10%"), "finish": "bound-met"}
            if divide_above := more.get("divide_above"):
                job["divide_above"] = divide_above
            network["selective_dropping"] = {
                "threshold": more.get("threshold", "30kB"),
                "step": 0.5,
            }
    return {
        "title": f"Figure 11: {kind}, {model}, {workers} workers",
        "until": "60s",
        # VGG16's largest variable keeps its server's link busy for 3 s, in which nothing returns.
        "stall": "20s",
        "interval": "1s",
        "payload": "sample",
        "network": network,
        "job": [job],
    }


def _hosts(workers: int) -> list[int]:
    """Return which, half of them on each rack of five."""
    return [rack * 5 + at for rack in range(2) for at in range(workers // 2)]


def _name(kind: str, model: str, workers: int, more: Setting) -> str:
    changed = [f"{key}-{value}" for key, value in more.items()]
    return "-".join(["speed", kind, model, str(workers), *changed])


EXPERIMENT = Experiment("speed", "Training speed (Figures 11, 13 and 15(b))", run)
