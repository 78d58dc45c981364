"""§7.4, Figures 15 and 16: six models on 8 to 256 GPUs, with and without machines that only sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from fanin.reproduce.byteps.cluster import NIC_GBPS
from fanin.reproduce.byteps.inside import GPUS
from fanin.reproduce.byteps.training import (
    BASELINE_GBPS,
    COMPUTINGS,
    MODELS,
    OVER_COMPUTING,
    OVER_OVERLAP,
    OVER_RING,
    USUAL,
    Case,
    Model,
    Trained,
    rates,
)
from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, Range, at_least
from fanin.reproduce.lab import Lab, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MACHINES, MACHINES_QUICK = [2, 8, 32], [2, 8]
MODELS_QUICK = ["vgg16", "ugatit"]
NO_SLOWER = at_least(0.99)
SCALES = at_least(91.6)
SYSTEMS = {
    "with": "BytePS, k = n",
    "without": "BytePS, k = 0",
    "ring": "all-reduce",
    "servers": "native PS, k = n",
}
OVER_SERVERS = (
    f"native PS's NIC with {BASELINE_GBPS:g} Gbit/s (Table 2's baseline) or as its GPUs leave it"
)
Setting = tuple[int, bool, bool]
"""Computing, whether BytePS's passes overlap, and whether the rival is limited as the paper has it
(all-reduce inside the machine, native PS by Table 2) or by its NIC alone."""


def run(lab: Lab) -> Outcome:
    """Train every model on every system."""
    models = [MODELS[key] for key in (MODELS_QUICK if lab.quick else MODELS)]
    counts = MACHINES_QUICK if lab.quick else MACHINES
    most = counts[-1]
    settings: list[Setting] = list(product(COMPUTINGS, (False, True), (True, False)))
    of_clusters = rates(lab, "nvlink", [(n, k) for n in counts for k in (0, n)])

    def byteps(model: str, n: int, k: int, of: Setting) -> Case:
        computing, overlap, _ = of
        gbps = of_clusters[n, k].byteps
        return Case(model, "byteps", n, k, gbps, computing, overlap)

    def ring(model: str, n: int, of: Setting) -> Case:
        computing, _, limited = of
        gbps = of_clusters[n, 0].ring if limited else NIC_GBPS
        return Case(model, "ring", n, gbps=gbps, computing=computing)

    def servers(model: str, n: int, of: Setting) -> Case:
        computing, _, limited = of
        gbps = BASELINE_GBPS if limited else of_clusters[n, n].servers
        return Case(model, "servers", n, n, gbps, computing)

    def cases() -> Iterator[Case]:
        usual = (USUAL, False, True)
        for model in models:
            for n, of in [(most, of) for of in settings] + [(n, usual) for n in counts]:
                yield from (byteps(model.key, n, n, of), byteps(model.key, n, 0, of))
                yield ring(model.key, n, of)
                if model.has_servers:
                    yield servers(model.key, n, of)

    trained = Trained(lab, "scalability", cases())
    with_servers = [model for model in models if model.has_servers]
    keys = [model.key for model in models]

    def over(figure: Callable[[Setting], float], of: Sequence[Setting] = settings) -> Spread:
        return Spread.over([Spread.of([figure(setting)]) for setting in of])

    def gain(model: str, k: int, of: Setting) -> float:
        return trained.gain(byteps(model, most, k, of), ring(model, most, of))

    def gain_over_servers(model: str, of: Setting) -> float:
        return trained.gain(byteps(model, most, most, of), servers(model, most, of))

    def efficiency(model: str, of: Setting) -> float:
        return trained.efficiency(byteps(model, most, most, of))

    def growth(usual: Setting = (USUAL, False, True)) -> float:
        first = byteps("ugatit", counts[0], counts[0], usual), ring("ugatit", counts[0], usual)
        return gain("ugatit", most, usual) / trained.gain(*first)

    def speeds(model: Model, usual: Setting = (USUAL, False, True)) -> dict[str, list[float]]:
        found = {
            "with": [trained.efficiency(byteps(model.key, n, n, usual)) for n in counts],
            "without": [trained.efficiency(byteps(model.key, n, 0, usual)) for n in counts],
            "ring": [trained.efficiency(ring(model.key, n, usual)) for n in counts],
        }
        if model.has_servers:
            of = [trained.efficiency(servers(model.key, n, usual)) for n in counts]
            found["servers"] = of
        return found

    def draw(figure: Figure) -> None:
        rows = 2 if len(models) > 3 else 1
        for at, model in enumerate(models):
            axes = figure.add_subplot(rows, len(models) // rows, at + 1)
            for line, (system, percents) in enumerate(speeds(model).items()):
                axes.plot(counts, percents, f"C{line}o-", label=None if at else SYSTEMS[system])
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(n * GPUS) for n in counts])
            axes.set_ylim(0, 105)
            axes.set_title(model.name, fontsize=9)
            if not at:
                axes.legend(fontsize=6)
        figure.supxlabel("GPUs", fontsize=9)
        title = "10 TFLOP/s a GPU, % of linear scaling; passes that do not overlap"
        figure.supylabel(title, fontsize=7)

    gpus = f"{most * GPUS} GPUs: "
    by_ring = gpus + "BytePS {} CPU machines by all-reduce, {}"
    by_servers = gpus + "BytePS with CPU machines by native PS, {}"
    of_scaling = gpus + "{}, of linear scaling"
    computing, overlap = OVER_COMPUTING, OVER_OVERLAP
    ranged = {
        "ring": f"{computing}, {overlap}, {OVER_RING}",
        "servers": f"{computing}, {overlap}, {OVER_SERVERS}",
        "byteps": f"{computing}, {overlap}",
    }
    others = [key for key in keys if key not in ("ugatit", "gpt2")]
    rows: list[tuple[str, str, float | str, Range | None, str, str, Spread]] = [
        (
            "§7.4, abstract",
            by_ring.format("with", "UGATIT, the paper's most"),
            1.84,
            None,
            "x",
            "ring",
            over(lambda of: gain("ugatit", most, of)),
        ),
    ]
    for (with_, k), (least, largest) in {
        ("with", most): (1.10, 1.84),
        ("without", 0): (1.09, 1.53),
    }.items():
        for which, end, paper in (("most", max, largest), ("least", min, least)):
            rows.append(
                (
                    "§7.4",
                    by_ring.format(with_, f"the {which} of all models"),
                    paper,
                    None,
                    "x",
                    "ring",
                    over(lambda of, k=k, end=end: end(gain(key, k, of) for key in keys)),
                )
            )
    rows += [
        (
            "Figs. 15, 16",
            gpus + "BytePS with CPU machines by BytePS without, the least of all models",
            "with is always the best",
            NO_SLOWER,
            "x",
            "byteps",
            over(
                lambda of: min(
                    trained.gain(byteps(key, most, most, of), byteps(key, most, 0, of))
                    for key in keys
                )
            ),
        ),
        (
            "Figs. 15, 16",
            gpus + "all-reduce by native PS, the least of all models that have it",
            "always a clear advantage",
            MORE,
            "x",
            "servers",
            over(
                lambda of: min(
                    trained.gain(ring(model.key, most, of), servers(model.key, most, of))
                    for model in with_servers
                )
            ),
        ),
        (
            "§7.4",
            by_servers.format("VGG-16"),
            1.52,
            None,
            "x",
            "servers",
            over(lambda of: gain_over_servers("vgg16", of)),
        ),
        (
            "abstract",
            by_servers.format("the most of all models that have it"),
            3.45,
            None,
            "x",
            "servers",
            over(lambda of: max(gain_over_servers(model.key, of) for model in with_servers)),
        ),
        (
            "§7.4",
            f"UGATIT: BytePS's gain over all-reduce on {gpus[:-2]} by that on "
            f"{counts[0] * GPUS} GPUs",
            "the speedup becomes larger",
            at_least(1.0),
            "x",
            "",
            Spread.of([growth()]),
        ),
        (
            "§7.4",
            of_scaling.format("UGATIT, BytePS with CPU machines"),
            74.0,
            None,
            "%",
            "byteps",
            over(lambda of: efficiency("ugatit", of)),
        ),
    ]
    if not lab.quick:
        rows += [
            (
                "§7.4",
                of_scaling.format("ResNet-50, BytePS with CPU machines"),
                97.5,
                None,
                "%",
                "byteps",
                over(lambda of: efficiency("resnet50", of)),
            ),
            (
                "§7.4",
                of_scaling.format("ResNet-50, all-reduce"),
                88.0,
                None,
                "%",
                "ring",
                over(lambda of: trained.efficiency(ring("resnet50", most, of))),
            ),
            (
                "§7.4",
                of_scaling.format("GPT-2, BytePS with CPU machines"),
                "at least 91.6 %, of all but UGATIT",
                SCALES,
                "%",
                "byteps",
                over(lambda of: efficiency("gpt2", of)),
            ),
        ]
    rows.append(
        (
            "§7.4",
            of_scaling.format("BytePS with CPU machines, the least of all but UGATIT and GPT-2"),
            "at least 91.6 %, of all but UGATIT",
            SCALES,
            "%",
            "byteps",
            over(lambda of: min(efficiency(key, of) for key in others)),
        )
    )
    findings = [
        Finding(figure, what, paper, ours, holds, unit, ranged.get(swept, ""))
        for figure, what, paper, holds, unit, swept, ours in rows
    ]
    series = {model.key: speeds(model) for model in models}
    return Outcome(findings, draw, {"machines": counts, "percent_of_linear": series})


EXPERIMENT = Experiment("scalability", "Six models on up to 256 GPUs (Figures 15 and 16)", run)
