"""§5.2.1, Figure 8: one job of eight workers, every model, every system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Scenario, Spread
from fanin_lab.papers.plot import Bars, Panel, Picture
from fanin_lab.papers.simulated import (
    At,
    Case,
    Cases,
    Change,
    Either,
    Row,
    Simulated,
    computed,
    ratio,
)
from fanin_lab.sweep import words

MODELS = Either(
    ["alexnet", "vgg11", "vgg16", "vgg19", "resnet50", "resnet101", "resnet152"],
    quick=["vgg16", "resnet50"],
)
MODELS_OF_REASONS = Either(["alexnet", "vgg16"], quick=["vgg16", "resnet50"])
SYSTEMS = {
    "atp": "ATP",
    "switchml": "SwitchML",
    "ring": "ring (Horovod RDMA)",
    "ps-n-to-n": "a server beside each worker (BytePS NtoN RDMA)",
}
RDMA = ["ring", "ps-n-to-n"]
PAPER_MAX = {"switchml": 1.5, "ring": 1.24, "ps-n-to-n": 1.5}
PAPER_BY_MODEL = {"resnet50": 1.02, "resnet101": 1.01, "vgg16": 1.25, "vgg19": 1.2, "alexnet": 2.39}
"""ATP by BytePS NtoN over RDMA: §5.3.1 and §D.3 (AlexNet's is more than the most of §5.2.1)."""
COMPUTES = "at the published speed it computes for longer than it sends, on any system"
SCALE, PACKET = 200.0, "1,344"
SWEPT: Either[list[dict[str, Any]]] = Either(
    [
        {},
        {"packet": "4,096"},
        {"scale": 100.0},
        {"batch": 16},
        {"batch": 64},
        {"byteps": "90Gbit"},
        {"byteps": "41Gbit"},
    ],
    quick=[{"scale": 400.0}],
)
"""The paper gives none of these."""
OVER = (
    "scales of 100 or 200, RDMA packets of 1,344 or 4,096 bytes, batches of 16 to 64, BytePS's "
    "hosts that move 41, 90 or 100 Gbit/s"
)
SEEDS = 3
LINKS_ALONE = {"host_byte_cost": "0.114ns"}
"""60 Gbit/s of whatever packets: 0.133 ns for each of 180 bytes, where ours has 210."""


def scenario(
    model: str,
    system: str,
    scale: float = SCALE,
    packet: str = PACKET,
    batch: int = setting.BATCH,
    byteps: str | None = None,
    cost: Mapping[str, Any] | None = None,
) -> Scenario:
    """Return a training.

    `packet`: the bytes of an RDMA packet. `batch`: the samples of a worker in an iteration.
    `byteps`: what a host of BytePS's moves. `cost`: what packets cost other hosts, if not as usual.
    """
    more: dict[str, Any] = {"system": system, "batch": batch}
    if system in RDMA:
        network = setting.rdma("rack", packet, byteps if system == "ps-n-to-n" else None, hosts=9)
        more |= setting.rdma_keys(system, packet)
    else:
        usual = setting.HOSTS_OF_SWITCHML if system == "switchml" else setting.HOSTS
        network = setting.rack(9, usual if cost is None else cost)
    return {
        "title": f"Figure 8: {model}, {SYSTEMS[system]}",
        "until": setting.ms(2_000 * batch / setting.BATCH / scale),
        "warm_up": setting.ms(300 * batch / setting.BATCH / scale),
        # SwitchML cuts short tensors in another way than long ones.
        "payload": "full" if system == "switchml" else "sample",
        "network": network,
        "switch": setting.switch(),
        "job": [setting.training(model, scale, **more)],
    }


def _cases(model: str, system: str) -> tuple[Case, Case]:
    return {"model": model, "system": "atp"}, {"model": model, "system": system}


def most(at: At, system: str) -> list[float]:
    """Return ATP's images a second by the system's, the most of all models."""
    models = at.values("model")
    gains = [at.by(setting.images_per_s, *_cases(model, system)) for model in models]
    # Not by max(), which loses a NaN: what was not measured.
    return [Spread.of(of_seed).most for of_seed in zip(*gains, strict=True)]


def picture(at: At) -> Picture:
    """Show each model's images a second on each system."""
    models, width = at.values("model"), 0.8 / len(SYSTEMS)

    def images(model: str, system: str) -> float:
        return at.spread(setting.images_per_s, model=model, system=system).median

    bars = [
        Bars(
            [place + (number - 1.5) * width for place in range(len(models))],
            [images(model, system) for model in models],
            name,
            width,
        )
        for number, (system, name) in enumerate(SYSTEMS.items())
    ]
    scale = words.setting("scale", at.setting.get("scale", SCALE))
    title = f"{scale}, RDMA packets of {PACKET} bytes, batches of {setting.BATCH}"
    return Picture([Panel(bars, "", "images/s and worker", title, ticks=dict(enumerate(models)))])


MOST = {
    system: Row(
        "§5.2.1, Fig. 8",
        f"ATP by {SYSTEMS[system]}, the most of all models",
        paper,
        computed(most, system),
        "x",
    )
    for system, paper in PAPER_MAX.items()
}
BY_MODEL = [
    Row(
        "§5.3.1, §D.3",
        f"ATP by a server beside each worker: {model}",
        paper,
        ratio(setting.images_per_s, *_cases(model, "ps-n-to-n")),
        "x",
        cannot_fail=COMPUTES if model in ("resnet50", "resnet101") else "",
    )
    for model, paper in PAPER_BY_MODEL.items()
]


EXPERIMENT = Simulated(
    "single",
    "One job of 8 workers (Figure 8)",
    scenario,
    [Cases({"model": MODELS, "system": SYSTEMS}, SWEPT, seeds=SEEDS)],
    [*MOST.values(), *BY_MODEL],
    picture,
    over=OVER,
    changes=[
        Change(
            "hosts that count bytes alone",
            {"cost": LINKS_ALONE},
            of=[MOST["switchml"]],
            where={"system": ["switchml"]},
            cases=[
                Cases(
                    {"model": MODELS_OF_REASONS, "system": ["atp", "switchml"]}, SWEPT, seeds=SEEDS
                )
            ],
        )
    ],
).experiment()
