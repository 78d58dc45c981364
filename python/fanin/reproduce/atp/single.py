"""§5.2.1, Figure 8: one job of eight workers, every model, every system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ["alexnet", "vgg11", "vgg16", "vgg19", "resnet50", "resnet101", "resnet152"]
MODELS_QUICK = ["vgg16", "resnet50"]
SCALE = 400.0
RING_SCALE = 50.0
"""A ring's steps wait for each other: of a tensor with little in it, they are all delay."""
PACKETS = {"elements": 256, "window": 256}
"""As long as SwitchML's shortest."""
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "atp": ("ATP", PACKETS),
    "switchml": ("SwitchML", {"elements": 256, "window": 128}),
    "ring": ("ring (Horovod)", {"scale": RING_SCALE}),
    "ps-n-to-n": ("a server beside each worker (BytePS NtoN)", PACKETS),
    "ps": ("one server (BytePS Nto1)", PACKETS),
}
PAPER_MAX = {"switchml": 1.5, "ring": 1.24, "ps-n-to-n": 1.5, "ps": 8.7}


def run(lab: Lab) -> Outcome:
    """Train every model on every system."""
    models = MODELS_QUICK if lab.quick else MODELS
    runs = lab.play(
        {
            f"single-{model}-{system}": {
                "title": f"Figure 8: {model}, {name}",
                "until": setting.ms((12_000 if system == "ps" else 2_500) / scale),
                "warm_up": setting.ms(300 / scale),
                "network": setting.rack(9),
                "job": [
                    {
                        "system": system,
                        "workers": 8,
                        "model": model,
                        "batch": setting.BATCH,
                        "flops": setting.FLOPS,
                        "scale": SCALE,
                        "jitter": setting.JITTER,
                        **more,
                    }
                ],
            }
            for model in models
            for system, (name, more) in SYSTEMS.items()
            for scale in [more.get("scale", SCALE)]
        },
        # Systems differ by far more than seeds do.
        once=True,
    )
    images = {
        system: [runs[f"single-{model}-{system}"].spread(setting.images_per_s) for model in models]
        for system in SYSTEMS
    }
    gains = {
        system: [
            Spread.of(
                [
                    setting.images_per_s(atp) / setting.images_per_s(other)
                    for atp, other in zip(
                        runs[f"single-{model}-atp"].reports,
                        runs[f"single-{model}-{system}"].reports,
                        strict=True,
                    )
                ]
            )
            for model in models
        ]
        for system in PAPER_MAX
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        width = 0.8 / len(SYSTEMS)
        for at, (system, (name, _)) in enumerate(SYSTEMS.items()):
            places = [model + (at - 2) * width for model in range(len(models))]
            axes.bar(places, [s.median for s in images[system]], width, label=name)
        axes.set_xticks(range(len(models)), models)
        finish(axes, "", "images/s and worker")

    return Outcome(
        [
            Finding(
                "§5.2.1, Fig. 8",
                f"ATP by {SYSTEMS[system][0]}, the most of all models",
                paper,
                max(gains[system], key=lambda spread: spread.median),
                unit="x",
                why=WHY[system],
            )
            for system, paper in PAPER_MAX.items()
        ],
        draw,
        {"models": models, "images_per_s": {k: [s.median for s in v] for k, v in images.items()}},
    )


WHY = {
    "switchml": (
        "packets are alike here and links count bytes; the paper's carry 32 values (SwitchML) and "
        "62 (ATP), and its hosts count packets"
    ),
    "ring": "ours is over TCP; the paper's is 1.24 over RDMA and 4.2 over TCP",
    "ps-n-to-n": "between the paper's 1.5 over RDMA and 2.5 over TCP",
    "ps": (
        "the paper's server is bound by the CPU time of TCP, ours by its link alone: a bound of 8, "
        "less what computing hides"
    ),
}

EXPERIMENT = Experiment("single", "One job of 8 workers (Figure 8)", run)
