"""§7.2, Figure 13: two models on 64 GPUs, with none to as many machines that only sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from fanin_lab.papers.byteps.training import (
    OVER_COMPUTING,
    OVER_LAUNCHES,
    OVER_OVERLAP,
    OVER_RING,
    PLAYED,
    SHOWN,
    Case,
    Setting,
    Systems,
    Trained,
    computing_in_words,
    of_lab,
)
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, Range
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Level, Line, Mark, Panel, Picture, outcome

MACHINES = MOST = 8
SPARES, SPARES_QUICK = [0, 2, 4, 6, 8], [0, 8]
KINDS = {"nvlink": "NVLink", "pcie-only": "PCIe-only"}


class Pair:
    """Both models on both kinds of machines."""

    def __init__(self, lab: Lab, prefix: str, models: Sequence[str]):
        self.models = models
        self.spares = SPARES_QUICK if lab.quick else SPARES
        self._settings = of_lab(lab)
        clusters = [(MACHINES, k) for k in self.spares]
        self._of = {kind: Systems(lab, prefix, kind, clusters) for kind in KINDS}
        self._trained = Trained(lab, prefix, self._cases())
        self.places = list(product(KINDS, models))

    def _byteps(self, kind: str, model: str, k: int, of: Setting) -> Case:
        return self._of[kind].byteps(model, MACHINES, k, of)

    def _ring(self, kind: str, model: str, of: Setting) -> Case:
        return self._of[kind].ring(model, MACHINES, of)

    def _cases(self) -> Iterator[Case]:
        for kind, model in product(KINDS, self.models):
            for of in self._settings:
                yield from (self._byteps(kind, model, k, of) for k in (0, MOST))
                yield self._ring(kind, model, of)
            yield from (self._byteps(kind, model, k, SHOWN) for k in self.spares)

    def by_none(self, kind: str, model: str, of: Setting) -> float:
        """Return what as many machines more gain."""
        ours, theirs = (self._byteps(kind, model, k, of) for k in (MOST, 0))
        return self._trained.gain(ours, theirs)

    def by_ring(self, kind: str, model: str, k: int, of: Setting) -> float:
        """Return BytePS's speed by all-reduce's."""
        return self._trained.gain(self._byteps(kind, model, k, of), self._ring(kind, model, of))

    def shown(self, kind: str, model: str) -> tuple[list[float], float]:
        """Return percents of linear scaling: BytePS's with each k, and a ring's."""
        percents = [
            100 * self._trained.efficiency(self._byteps(kind, model, k, SHOWN)) for k in self.spares
        ]
        return percents, 100 * self._trained.efficiency(self._ring(kind, model, SHOWN))

    def over(self, figure: Callable[[Setting], float]) -> Spread:
        """Return its spread over what is swept."""
        return Spread.of_each([figure(of)] for of in self._settings)

    def ratios(self) -> dict[str, Spread]:
        """Return what the paper says something of, by the rows."""
        gan, other = self.models
        return {
            MOST_OF_NONE: self.over(lambda of: max(self.by_none(*at, of) for at in self.places)),
            MOST_OF_NONE_GAN: self.over(lambda of: max(self.by_none(at, gan, of) for at in KINDS)),
            MOST_OF_RING: self.over(
                lambda of: max(self.by_ring(*at, MOST, of) for at in self.places)
            ),
            MOST_OF_RING_GAN: self.over(
                lambda of: max(self.by_ring(at, gan, MOST, of) for at in KINDS)
            ),
            LEAST_OF_RING: self.over(
                lambda of: min(self.by_ring(*at, 0, of) for at in self.places)
            ),
            ON_NVLINK: self.over(
                lambda of: self.by_none("nvlink", gan, of) / self.by_none("pcie-only", gan, of)
            ),
            OF_GAN: self.over(
                lambda of: self.by_none("nvlink", gan, of) / self.by_none("nvlink", other, of)
            ),
        }


def run(lab: Lab) -> Outcome:
    """Train both models on both kinds of machines."""
    pair = Pair(lab, "spares", ["ugatit", "gpt2"])
    alone = OVER_OVERLAP if lab.quick else f"{OVER_COMPUTING}, {OVER_OVERLAP}"
    with_ring = f"{alone}, {OVER_RING}"
    launches = "" if lab.quick else f", {OVER_LAUNCHES}"

    def marks(model: str, colour: str, kind: str) -> list[Mark]:
        percents, rival = pair.shown(kind, model)
        ring = {"color": colour, "linestyle": ":"}
        return [
            Line(pair.spares, percents, f"{colour}o-", f"BytePS, {KINDS[kind]}"),
            Level(rival, f"all-reduce, {KINDS[kind]}", ring),
        ]

    picture = Picture(
        [
            Panel(
                [*marks(model, "C0", "nvlink"), *marks(model, "C1", "pcie-only")],
                "machines that only sum, k",
                "% of linear scaling",
                f"{PLAYED[model].name}, GPUs, {computing_in_words(model)}",
                ticks=pair.spares,
                least_y=0,
                most_y=105,
            )
            for model in pair.models
        ]
    )
    claims: dict[str, tuple[str, float | str, Range | None, str]] = {
        MOST_OF_NONE: ("Fig. 13", 1.20, None, alone + launches),
        MOST_OF_NONE_GAN: ("Fig. 13", 1.20, None, alone),
        MOST_OF_RING: ("Fig. 13", 1.45, None, with_ring + launches),
        MOST_OF_RING_GAN: ("Fig. 13", 1.45, None, with_ring),
        LEAST_OF_RING: ("Fig. 13", "consistently faster in any cases", MORE, with_ring + launches),
        ON_NVLINK: ("§7.2", "higher: there the network is the bottleneck", MORE, alone),
        OF_GAN: ("§7.2", "larger: GAN is more communication intensive", MORE, alone + launches),
    }
    ratios = pair.ratios()
    return outcome(
        [
            Finding(figure, what, paper, ratios[what], holds, "x", swept)
            for what, (figure, paper, holds, swept) in claims.items()
        ],
        picture,
    )


_BOTH = "the most of UGATIT and GPT-2, NVLink and PCIe-only"
MOST_OF_NONE = f"k = {MOST} by k = 0, {_BOTH}"
MOST_OF_NONE_GAN = f"k = {MOST} by k = 0, UGATIT, the most of NVLink and PCIe-only"
MOST_OF_RING = f"k = {MOST}, BytePS by all-reduce, {_BOTH}"
MOST_OF_RING_GAN = f"k = {MOST}, BytePS by all-reduce, UGATIT, the most of NVLink and PCIe-only"
LEAST_OF_RING = "k = 0, BytePS by all-reduce, the least of UGATIT and GPT-2, NVLink and PCIe-only"
ON_NVLINK = f"UGATIT: what k = {MOST} gains by k = 0 on NVLink machines, by that on PCIe-only ones"
OF_GAN = f"NVLink: what k = {MOST} gains UGATIT by k = 0, by what it gains GPT-2"
EXPERIMENT = Experiment("spares", "64 GPUs, by the number of CPU machines (Figure 13)", run)
