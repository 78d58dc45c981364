"""§7.2, Figure 13: two models on 64 GPUs, with none to as many machines that only sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING

from fanin.reproduce.byteps.cluster import NIC_GBPS
from fanin.reproduce.byteps.training import (
    COMPUTINGS,
    MODELS,
    OVER_COMPUTING,
    OVER_OVERLAP,
    OVER_RING,
    USUAL,
    Case,
    Trained,
    rates,
)
from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MACHINES = 8
SPARES, SPARES_QUICK = [0, 2, 4, 6, 8], [0, 8]
MOST = MACHINES
KINDS = {"nvlink": "NVLink", "pcie-only": "PCIe-only"}
PAIR = ["ugatit", "gpt2"]
Setting = tuple[int, bool, bool]
"""Computing, whether BytePS's passes overlap, and whether the inside of a machine limits
all-reduce."""


def run(lab: Lab) -> Outcome:
    """Train both models on both kinds of machines."""
    spares = SPARES_QUICK if lab.quick else SPARES
    computings = [USUAL] if lab.quick else list(COMPUTINGS)
    settings: list[Setting] = list(product(computings, (False, True), (True, False)))
    of_kinds = {kind: rates(lab, kind, [(MACHINES, k) for k in spares]) for kind in KINDS}
    places = list(product(KINDS, PAIR))

    def byteps(kind: str, model: str, k: int, of: Setting) -> Case:
        computing, overlap, _ = of
        gbps = of_kinds[kind][MACHINES, k].byteps
        return Case(model, "byteps", MACHINES, k, gbps, computing, overlap)

    def ring(kind: str, model: str, of: Setting) -> Case:
        computing, _, limited = of
        gbps = of_kinds[kind][MACHINES, 0].ring if limited else NIC_GBPS
        return Case(model, "ring", MACHINES, gbps=gbps, computing=computing)

    def cases() -> Iterator[Case]:
        usual = (USUAL, False, True)
        for kind, model in places:
            for of in settings:
                yield from (byteps(kind, model, k, of) for k in (0, MOST))
                yield ring(kind, model, of)
            yield from (byteps(kind, model, k, usual) for k in spares)

    trained = Trained(lab, "spares", cases())

    def over(figure: Callable[[Setting], float]) -> Spread:
        return Spread.over([Spread.of([figure(of)]) for of in settings])

    def by_none(kind: str, model: str, of: Setting) -> float:
        return trained.gain(byteps(kind, model, MOST, of), byteps(kind, model, 0, of))

    def by_ring(kind: str, model: str, k: int, of: Setting) -> float:
        return trained.gain(byteps(kind, model, k, of), ring(kind, model, of))

    def draw(figure: Figure) -> None:
        usual = (USUAL, False, True)
        for at, model in enumerate(PAIR):
            axes = figure.add_subplot(1, len(PAIR), at + 1)
            for colour, (kind, name) in enumerate(KINDS.items()):
                percents = [trained.efficiency(byteps(kind, model, k, usual)) for k in spares]
                axes.plot(spares, percents, f"C{colour}o-", label=f"BytePS, {name}")
                rival = trained.efficiency(ring(kind, model, usual))
                axes.axhline(rival, color=f"C{colour}", linestyle=":", label=f"all-reduce, {name}")
            axes.set_ylim(0, 105)
            axes.set_xticks(spares)
            title = f"{MODELS[model].name}, 10 TFLOP/s a GPU"
            finish(axes, "machines that only sum, k", "% of linear scaling", title)

    with_ring = f"{OVER_COMPUTING}, {OVER_OVERLAP}, {OVER_RING}"
    alone = f"{OVER_COMPUTING}, {OVER_OVERLAP}"
    of_all = "of UGATIT and GPT-2, on both kinds of machines"
    rows = [
        Finding(
            "Fig. 13",
            f"k = {MOST} by k = 0, the most {of_all}",
            1.20,
            over(lambda of: max(by_none(*place, of) for place in places)),
            unit="x",
            swept=alone,
        ),
        Finding(
            "Fig. 13",
            f"k = {MOST} by k = 0, UGATIT, the most of both kinds of machines",
            1.20,
            over(lambda of: max(by_none(kind, "ugatit", of) for kind in KINDS)),
            unit="x",
            swept=alone,
        ),
        Finding(
            "Fig. 13",
            f"BytePS by all-reduce, the most {of_all}",
            1.45,
            over(lambda of: max(by_ring(*place, MOST, of) for place in places)),
            unit="x",
            swept=with_ring,
        ),
        Finding(
            "Fig. 13",
            "BytePS by all-reduce, UGATIT, the most of both kinds of machines",
            1.45,
            over(lambda of: max(by_ring(kind, "ugatit", MOST, of) for kind in KINDS)),
            unit="x",
            swept=with_ring,
        ),
        Finding(
            "Fig. 13",
            f"BytePS by all-reduce, k = 0, the least {of_all}",
            "consistently faster in any cases",
            over(lambda of: min(by_ring(*place, 0, of) for place in places)),
            holds=MORE,
            unit="x",
            swept=with_ring,
        ),
        Finding(
            "§7.2",
            f"UGATIT: what k = {MOST} gains by k = 0 on NVLink machines, by that on PCIe-only ones",
            "higher: there the network is the bottleneck",
            over(lambda of: by_none("nvlink", "ugatit", of) / by_none("pcie-only", "ugatit", of)),
            holds=MORE,
            unit="x",
            swept=alone,
        ),
        Finding(
            "§7.2",
            GAN,
            "larger: GAN is more communication intensive",
            over(lambda of: by_none("nvlink", "ugatit", of) / by_none("nvlink", "gpt2", of)),
            holds=MORE,
            unit="x",
            swept=alone,
        ),
    ]
    series = {
        f"{model}, {kind}": {
            "k": spares,
            "byteps": [
                trained.efficiency(byteps(kind, model, k, (USUAL, False, True))) for k in spares
            ],
            "all-reduce": trained.efficiency(ring(kind, model, (USUAL, False, True))),
        }
        for kind, model in places
    }
    return Outcome(rows, draw, {"percent_of_linear": series})


GAN = f"NVLink: what k = {MOST} gains UGATIT by k = 0, by what it gains GPT-2"
EXPERIMENT = Experiment("spares", "64 GPUs, by the number of CPU machines (Figure 13)", run)
