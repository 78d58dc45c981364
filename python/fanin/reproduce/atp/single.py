"""§5.2.1, Figure 8: one job of eight workers, every model, every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ["alexnet", "vgg11", "vgg16", "vgg19", "resnet50", "resnet101", "resnet152"]
MODELS_QUICK = ["vgg16", "resnet50"]
SCALE = 200.0
SCALE_QUICK = 400.0
SYSTEMS = {
    "atp": "ATP",
    "switchml": "SwitchML",
    "ring": "ring (Horovod)",
    "ps-n-to-n": "a server beside each worker (BytePS NtoN)",
}
PAPER_MAX = {"switchml": 1.5, "ring": 1.24, "ps-n-to-n": 1.5}
PAPER_BY_MODEL = {"resnet50": 1.02, "resnet101": 1.01, "vgg16": 1.25, "vgg19": 1.2, "alexnet": 2.39}
"""ATP by BytePS NtoN over RDMA: §5.3.1 and §D.3 (AlexNet's is more than the most of §5.2.1)."""
MOST = "ATP by {}, the most of all models"
COMPUTES = "at the published speed it computes for longer than it sends, on any system"
OF_MODEL = "ATP by a server beside each worker: {}"


def run(lab: Lab) -> Outcome:
    """Train every model on every system."""
    models = MODELS_QUICK if lab.quick else MODELS
    scale = SCALE_QUICK if lab.quick else SCALE
    reports = {
        name: runs.reports[0]
        for name, runs in lab.play(
            {
                _name(model, system): _scenario(model, system, scale)
                for model in models
                for system in SYSTEMS
            },
            # Systems differ by far more than seeds do.
            once=True,
        ).items()
    }
    images = {
        system: {model: setting.images_per_s(reports[_name(model, system)]) for model in models}
        for system in SYSTEMS
    }

    def gain(model: str, system: str) -> float:
        return images["atp"][model] / images[system][model]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        width = 0.8 / len(SYSTEMS)
        for at, (system, name) in enumerate(SYSTEMS.items()):
            places = [model + (at - 1.5) * width for model in range(len(models))]
            axes.bar(places, list(images[system].values()), width, label=name)
        axes.set_xticks(range(len(models)), models)
        finish(axes, "", "images/s and worker")

    return Outcome(
        [
            *(
                Finding(
                    "§5.2.1, Fig. 8",
                    MOST.format(SYSTEMS[system]),
                    paper,
                    Spread.of([max(gain(model, system) for model in models)]),
                    unit="x",
                )
                for system, paper in PAPER_MAX.items()
            ),
            *(
                Finding(
                    "§5.3.1, §D.3",
                    OF_MODEL.format(model),
                    paper,
                    Spread.of([gain(model, "ps-n-to-n")]),
                    unit="x",
                    cannot_fail=COMPUTES if model in ("resnet50", "resnet101") else "",
                )
                for model, paper in PAPER_BY_MODEL.items()
                if model in models
            ),
        ],
        draw,
        {"models": models, "images_per_s": images},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Give each transport what the paper's has and ours has not, or take it away."""
    models = MODELS_QUICK if lab.quick else ["alexnet", "vgg16"]
    scale = SCALE_QUICK if lab.quick else SCALE
    reasons = []
    for system, change, cost, more in (
        ("switchml", "hosts that count bytes alone", LINKS_ALONE, {}),
        ("ps-n-to-n", RDMA, setting.HOSTS_FREE, {"elements": 336, "window": 256}),
        ("ring", "hosts that RDMA costs nothing", setting.HOSTS_FREE, {}),
    ):
        of = {
            model: {
                f"{_name(model, 'atp')}-why": _scenario(model, "atp", scale),
                f"{_name(model, system)}-why": _scenario(model, system, scale, cost, **more),
            }
            for model in models
        }
        runs = lab.play({name: s for pair in of.values() for name, s in pair.items()}, once=True)
        gains = {}
        for model, pair in of.items():
            ours, theirs = (setting.images_per_s(runs[name].reports[0]) for name in pair)
            gains[model] = ours / theirs
        reasons.append(
            Reason(MOST.format(SYSTEMS[system]), change, Spread.of([max(gains.values())]))
        )
        if system == "ps-n-to-n":
            for model, gain in gains.items():
                reasons.append(Reason(OF_MODEL.format(model), change, Spread.of([gain])))
    return reasons


LINKS_ALONE = {"host_byte_cost": "0.114ns"}
"""60 Gbit/s of whatever packets: 0.133 ns for each of 180 bytes, where ours has 210."""
RDMA = "RDMA: packets of 1,344 bytes that cost hosts nothing"


def _scenario(
    model: str, system: str, scale: float, cost: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    usual = setting.HOSTS_OF_SWITCHML if system == "switchml" else setting.HOSTS
    return {
        "title": f"Figure 8: {model}, {SYSTEMS[system]}",
        "until": setting.ms(2_000 / scale),
        "warm_up": setting.ms(300 / scale),
        "network": setting.rack(9, usual if cost is None else cost),
        "job": [setting.training(model, scale, system=system, **more)],
    }


def _name(model: str, system: str) -> str:
    return f"single-{model}-{system}"


EXPERIMENT = Experiment("single", "One job of 8 workers (Figure 8)", run, why)
