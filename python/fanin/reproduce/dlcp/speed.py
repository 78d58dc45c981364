"""§5.1, Figures 11, 13 and 15(b): how fast ten machines train, beside ByteScheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import MORE, NONE, Experiment, Finding, Outcome, Range, Reason
from fanin.reproduce.lab import Lab, Report, Runs, Spread
from fanin.reproduce.plot import finish

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
SEEDS = 3
Setting = Mapping[str, Any]
SWEPT: list[Setting] = [
    {"flops": 5e12},
    {"flops": 2e13},
    {"partition": "1MB"},
    {"threshold": "100kB"},
]
"""What the paper does not give: at ten workers and ResNet-50."""
OVER = (
    "10 or 5 or 20 TFLOP/s a GPU, pieces of 4 or 1 MB and four of them on their way, DLCP's first "
    "threshold at 30 or 100 kB"
)
LOSS = "packets that queues drop of ByteScheduler's, ResNet-50, 10 workers"
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
    wanted += [(kind, "resnet50", MANY, more) for kind in KINDS for more in swept]
    wanted += [(kind, model, MANY, {}) for kind in RINGS for model in rings]
    wanted += [("dlcp", "resnet50", MANY, more) for more in bounds]
    speeds = _Speeds(lab, wanted)

    def gain(model: str, workers: int, kind: str, more: Setting | None = None) -> Spread:
        return speeds.ratio(("dlcp", model, workers, more or {}), (kind, model, workers, more or {}))

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
        for what, paper, spread in [
            (f"the least of four models', {MANY} workers: DLCP's speed by ByteScheduler's", 1.457, _end(min, least)),
            (f"the least of four models', {FEW} workers: DLCP's speed by ByteScheduler's", 1.29, _end(min, few)),
            (f"the most of four models', {FEW} workers: DLCP's speed by ByteScheduler's", 1.362, _end(max, few)),
            (f"the least of four models', {MANY} workers: DLCP's speed by TensorFlow's", 2.046, _end(min, base)),
            (f"the most of four models', {MANY} workers: DLCP's speed by TensorFlow's", 4.685, _end(max, base)),
        ]:
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
        figure.set_size_inches(3.4 * len(models) + 1, 4.2)
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
        order = sorted(wanted, key=lambda one: (-one[2], list(BATCHES).index(one[1]) != 1))
        self._runs: dict[str, Runs] = lab.with_seeds(lab.seeds[:SEEDS]).play(
            {_name(*one): _scenario(lab, *one) for one in order}, throughputs=False
        )

    def of(self, kind: str, model: str, workers: int, more: Setting) -> list[float]:
        samples = ITERATIONS * BATCHES[model]

        def speed(report: Report) -> float:
            return samples / float(report["jobs"][0]["finished_s"])

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
            dropped = sum(sum(link["dropped"].values()) for link in report["links"])
            return 100 * dropped / float(report["jobs"][0]["counters"]["packets_sent"])

        return self._runs[_name(kind, model, MANY, {})].spread(share)


def _end(choose: Any, spreads: Sequence[Spread]) -> Spread:
    return choose(spreads, key=lambda spread: spread.median)


def _scenario(lab: Lab, kind: str, model: str, workers: int, more: Setting) -> dict[str, Any]:
    # Nothing smaller than it is: a flow's length, and how long a timeout is beside it, are what counts.
    iterations = ITERATIONS
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
        "iterations": iterations,
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
            bound = more.get("loss_bound", "10%")
            job |= {"system": "dlcp", "overlap": True, "spray": True, "loss_bound": bound, **way}
            network["selective_dropping"] = {
                "threshold": more.get("threshold", "30kB"),
                "step": 0.5,
            }
    return {
        "title": f"Figure 11: {kind}, {model}, {workers} workers",
        "until": "60s",
        "interval": "1s",
        "payload": "sample",
        "network": network,
        "job": [job],
    }


def _hosts(workers: int) -> list[int]:
    """Return which, half of them on each rack of five."""
    return [rack * 5 + at for rack in range(2) for at in range(workers // 2)]


def _name(kind: str, model: str, workers: int, more: Setting) -> str:
    only = {"partition": "bytescheduler", "threshold": "dlcp", "loss_bound": "dlcp"}
    changed = [f"{key}-{value}" for key, value in more.items() if only.get(key, kind) == kind]
    return "-".join(["speed", kind, model, str(workers), *changed])


def why(_: Lab) -> Sequence[Reason]:
    """Nothing yet."""
    return ()


EXPERIMENT = Experiment("speed", "Training speed beside ByteScheduler (Figures 11, 13 and 15(b))", run)
