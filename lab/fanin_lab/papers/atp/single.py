"""§5.2.1, Figure 8: one job of eight workers, every model, every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason
from fanin_lab.papers.lab import Lab, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ["alexnet", "vgg11", "vgg16", "vgg19", "resnet50", "resnet101", "resnet152"]
MODELS_QUICK = ["vgg16", "resnet50"]
SCALES = [200.0, 100.0]
SCALES_QUICK = [400.0]
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
MOST = "ATP by {}, the most of all models"
COMPUTES = "at the published speed it computes for longer than it sends, on any system"
OF_MODEL = "ATP by a server beside each worker: {}"
Setting = tuple[float, str, int]
"""Scale, the bytes of an RDMA packet, and the samples of a worker in an iteration."""
BATCHES = [16, 64]
"""Besides the usual one: the paper gives none."""
SEEDS = 3


def run(lab: Lab) -> Outcome:
    """Train every model on every system."""
    models = MODELS_QUICK if lab.quick else MODELS
    settings = _settings(lab)
    lab = lab.with_seeds(lab.seeds[:SEEDS])
    runs = lab.play(_scenarios(models, settings))
    swept = _swept(settings)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        width = 0.8 / len(SYSTEMS)
        for at, (system, name) in enumerate(SYSTEMS.items()):
            places = [model + (at - 1.5) * width for model in range(len(models))]
            images = [_images(runs, model, system, settings[0]).median for model in models]
            axes.bar(places, images, width, label=name)
        axes.set_xticks(range(len(models)), models)
        scale, packet, batch = settings[0]
        title = (
            f"{words.setting('scale', scale)}, RDMA packets of {packet} bytes, batches of {batch}"
        )
        finish(axes, "", "images/s and worker", title)

    def of_model(model: str) -> list[Spread]:
        return [_gain(runs, model, "ps-n-to-n", setting) for setting in settings]

    return Outcome(
        [
            *(
                Finding(
                    "§5.2.1, Fig. 8",
                    MOST.format(SYSTEMS[system]),
                    paper,
                    _most(runs, models, system, settings),
                    unit="x",
                    swept=swept,
                )
                for system, paper in PAPER_MAX.items()
            ),
            *(
                Finding(
                    "§5.3.1, §D.3",
                    OF_MODEL.format(model),
                    paper,
                    Spread.over(of_model(model)),
                    unit="x",
                    swept=swept,
                    cannot_fail=COMPUTES if model in ("resnet50", "resnet101") else "",
                )
                for model, paper in PAPER_BY_MODEL.items()
                if model in models
            ),
        ],
        draw,
        {
            "models": models,
            "images_per_s": {
                f"{system}, scale {scale:g}, {packet}, batch {batch}": [
                    _images(runs, model, system, (scale, packet, batch)).median for model in models
                ]
                for system in SYSTEMS
                for scale, packet, batch in settings
            },
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let each transport cost its hosts what another's does."""
    models = MODELS_QUICK if lab.quick else ["alexnet", "vgg16"]
    settings = _settings(lab)
    lab = lab.with_seeds(lab.seeds[:SEEDS])
    reasons = []
    for system, change, cost in (
        ("switchml", "hosts that count bytes alone", LINKS_ALONE),
        ("ring", "hosts that RDMA costs as ATP's packets do", setting.HOSTS),
        ("ps-n-to-n", "hosts that RDMA costs as ATP's packets do", setting.HOSTS),
    ):
        changed = _scenarios(models, settings, {system: cost}, "-why")
        runs = lab.play(changed)
        most = _most(runs, models, system, settings, "-why")
        reasons.append(Reason(MOST.format(SYSTEMS[system]), change, most))
        if system == "ps-n-to-n":
            for model in models:
                gains = [_gain(runs, model, system, setting, "-why") for setting in settings]
                reasons.append(Reason(OF_MODEL.format(model), change, Spread.over(gains)))
    return reasons


LINKS_ALONE = {"host_byte_cost": "0.114ns"}
"""60 Gbit/s of whatever packets: 0.133 ns for each of 180 bytes, where ours has 210."""


def _settings(lab: Lab) -> list[Setting]:
    scales = SCALES_QUICK if lab.quick else SCALES
    packets = list(setting.RDMA_PACKETS)[: 1 if lab.quick else None]
    batches = [] if lab.quick else BATCHES
    return [
        *((scales[0], packet, setting.BATCH) for packet in packets),
        *((scale, packets[0], setting.BATCH) for scale in scales[1:]),
        *((scales[0], packets[0], batch) for batch in batches),
    ]


def _swept(settings: Sequence[Setting]) -> str:
    if len(settings) == 1:
        return ""
    scales, packets, batches = (sorted(set(of)) for of in zip(*settings, strict=True))
    return (
        f"scales of {scales[0]:g} or {scales[-1]:g}, RDMA packets of {' or '.join(packets)} bytes, "
        f"batches of {batches[0]} to {batches[-1]}"
    )


def _most(
    runs: Mapping[str, Runs],
    models: Sequence[str],
    system: str,
    settings: Sequence[Setting],
    tag: str = "",
) -> Spread:
    def of_setting(of: Setting) -> Spread:
        by_model = [_gains(runs, model, system, of, tag) for model in models]
        # Not by max(), which loses a NaN: what was not measured.
        return Spread.of([Spread.of(of_seed).most for of_seed in zip(*by_model, strict=True)])

    return Spread.over([of_setting(of) for of in settings])


def _gains(
    runs: Mapping[str, Runs], model: str, system: str, of: Setting, tag: str = ""
) -> list[float]:
    """Return ATP's images a second by the system's, for each seed."""
    ours, theirs = (
        runs[_name(model, one, of) + tag].samples(setting.images_per_s) for one in ("atp", system)
    )
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _gain(runs: Mapping[str, Runs], model: str, system: str, of: Setting, tag: str = "") -> Spread:
    return Spread.of(_gains(runs, model, system, of, tag))


def _images(runs: Mapping[str, Runs], model: str, system: str, of: Setting) -> Spread:
    return runs[_name(model, system, of)].spread(setting.images_per_s)


def _scenarios(
    models: Sequence[str],
    settings: Sequence[Setting],
    costs: Mapping[str, Mapping[str, Any]] | None = None,
    tag: str = "",
) -> dict[str, dict[str, Any]]:
    """Return those of ATP and of all systems, or of those that have other ``costs``."""
    costs = {} if costs is None else costs
    systems = ["atp", *costs] if costs else list(SYSTEMS)
    return {
        _name(model, system, of) + tag: _scenario(model, system, of, costs.get(system))
        for model in models
        for system in systems
        for of in settings
    }


def _scenario(
    model: str, system: str, of: Setting, cost: Mapping[str, Any] | None
) -> dict[str, Any]:
    scale, packet, batch = of
    more: dict[str, Any] = {"system": system, "batch": batch}
    if system in RDMA:
        network = setting.rdma("rack", packet, hosts=9, **(cost or setting.HOSTS_FREE))
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


def _name(model: str, system: str, of: Setting) -> str:
    # Packets are RDMA's alone, so other systems are played once for all of them.
    scale, packet, batch = of
    name = f"single-{model}-{system}-{scale:g}-{batch}"
    return name + (f"-{packet}" if system in RDMA else "")


EXPERIMENT = Experiment("single", "One job of 8 workers (Figure 8)", run, why)
