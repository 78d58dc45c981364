"""§7.4, Figures 15 and 16: six models on 8 to 256 GPUs, with and without machines that only sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fanin_lab.papers.byteps.inside import GPUS
from fanin_lab.papers.byteps.training import (
    COMPUTINGS,
    LAUNCH_S,
    MODELS,
    OVER_BATCHES,
    OVER_COMPUTING,
    OVER_LAUNCHES,
    OVER_OVERLAP,
    OVER_RING,
    OVER_SERVERS,
    SETTINGS,
    SHOWN,
    Case,
    Setting,
    Systems,
    Trained,
    computing_in_words,
    computing_s,
    of_lab,
    unhidden_s,
)
from fanin_lab.papers.finding import (
    MORE,
    Experiment,
    Finding,
    Outcome,
    Range,
    Reason,
    at_least,
    at_most,
)
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Line, Panel, Picture, outcome

MACHINES, MACHINES_QUICK = [2, 8, 32], [2, 8]
MODELS_QUICK = ["vgg16", "ugatit"]
NO_SLOWER = at_least(0.99)
LOST_MOST = at_most(100 - 91.6)
PAPERS_PERCENT = {"resnet50": [97.5, 88.0], "ugatit": [74.0]}
"""BytePS's with as many CPU machines, and all-reduce's, as far as §7.4 says them in words."""
BAR: dict[str, Any] = {"linewidth": 3, "solid_capstyle": "butt"}


@dataclass(frozen=True)
class Curve:
    """A system's percents of linear scaling."""

    percents: Sequence[float]
    """By the number of machines."""
    least: float
    """Of all settings, with most machines."""
    most: float


def every(
    systems: Systems, models: Sequence[str], counts: Sequence[int], settings: Sequence[Setting]
) -> Iterator[Case]:
    """Return all cases: the largest number of machines in all settings."""
    wanted = [(counts[-1], of) for of in settings] + [(n, SHOWN) for n in counts]
    for model in models:
        for n, of in wanted:
            yield systems.byteps(model, n, n, of)
            yield systems.byteps(model, n, 0, of)
            yield systems.ring(model, n, of)
            if MODELS[model].has_servers:
                yield systems.servers(model, n, of)


def run(lab: Lab) -> Outcome:
    """Train every model on every system."""
    models = MODELS_QUICK if lab.quick else list(MODELS)
    counts = MACHINES_QUICK if lab.quick else MACHINES
    settings = of_lab(lab)
    n = counts[-1]
    cases = Systems(lab, "scalability", "nvlink", [(n, k) for n in counts for k in (0, n)])
    trained = Trained(lab, "scalability", every(cases, models, counts, settings))

    def gain(model: str, k: int, of: Setting) -> float:
        return trained.gain(cases.byteps(model, n, k, of), cases.ring(model, n, of))

    def by_servers(model: str, of: Setting) -> float:
        return trained.gain(cases.byteps(model, n, n, of), cases.servers(model, n, of))

    def lost(model: str, of: Setting) -> float:
        return 100 * (1 - trained.efficiency(cases.byteps(model, n, n, of)))

    def lost_by_ring(of: Setting) -> float:
        return 100 * (1 - trained.efficiency(cases.ring("resnet50", n, of)))

    def grows() -> float:
        few = counts[0]
        first = cases.byteps("ugatit", few, few, SHOWN), cases.ring("ugatit", few, SHOWN)
        return gain("ugatit", n, SHOWN) / trained.gain(*first)

    with_servers = [model for model in models if MODELS[model].has_servers]
    others = [model for model in models if model not in ("ugatit", "gpt2")]
    computing = "" if lab.quick else f"{OVER_COMPUTING}, "
    byteps = f"{computing}{OVER_OVERLAP}"
    ring, servers = f"{byteps}, {OVER_RING}", f"{byteps}, {OVER_SERVERS}"
    launches = "" if lab.quick else f", {OVER_LAUNCHES}"
    gpus = f"{n * GPUS} GPUs"

    def ratio(
        figure: str,
        what: str,
        paper: float | str,
        of_setting: Callable[[Setting], float],
        swept: str,
        holds: Range | None = None,
    ) -> Finding:
        ours = _over(of_setting, settings)
        return Finding(figure, f"{gpus}: {what}", paper, ours, holds, "x", swept)

    def loss(
        what: str,
        paper: float | str,
        of_setting: Callable[[Setting], float],
        swept: str = byteps,
        holds: Range | None = None,
    ) -> Finding:
        ours = _over(of_setting, settings)
        return Finding("§7.4", LOST.format(gpus, what), paper, ours, holds, "%", swept)

    findings = [
        ratio(
            "§7.4, abstract",
            BY_RING.format("with", "UGATIT, of which the paper has the most"),
            1.84,
            lambda of: gain("ugatit", n, of),
            ring,
        )
    ]
    for words, k, least, most in (("with", n, 1.10, 1.84), ("without", 0, 1.09, 1.53)):
        for which, end, paper in (("most", max, most), ("least", min, least)):

            def of_all(of: Setting, k: int = k, end: Callable[..., float] = end) -> float:
                return end(gain(model, k, of) for model in models)

            what = BY_RING.format(words, f"the {which} of all models")
            findings.append(ratio("§7.4", what, paper, of_all, ring + launches))
    findings += [
        ratio(
            "Figs. 15, 16",
            "BytePS with CPU machines by BytePS without, the least of all models",
            "with is always the best",
            lambda of: min(
                trained.gain(cases.byteps(model, n, n, of), cases.byteps(model, n, 0, of))
                for model in models
            ),
            byteps + launches,
            NO_SLOWER,
        ),
        ratio(
            "Figs. 15, 16",
            "all-reduce by native PS, the least of all models that have it",
            "always a clear advantage",
            lambda of: min(
                trained.gain(cases.ring(model, n, of), cases.servers(model, n, of))
                for model in with_servers
            ),
            f"{computing}{OVER_RING}, {OVER_SERVERS}",
            MORE,
        ),
        ratio("§7.4", VGG, 1.52, lambda of: by_servers("vgg16", of), servers),
        ratio(
            "abstract",
            "BytePS with CPU machines by native PS, the most of all models that have it",
            3.45,
            lambda of: max(by_servers(model, of) for model in with_servers),
            servers,
        ),
        Finding(
            "§7.4",
            f"UGATIT: BytePS's gain over all-reduce on {gpus} by that on {counts[0] * GPUS}, "
            "10 TFLOP/s a GPU",
            "the speedup becomes larger",
            Spread.of([grows()]),
            at_least(1.0),
            "x",
        ),
        loss("UGATIT, BytePS with CPU machines", 26.0, lambda of: lost("ugatit", of)),
        loss(
            "BytePS with CPU machines, the most of all but UGATIT and GPT-2",
            "8.4 % at most, of all but UGATIT",
            lambda of: max(lost(model, of) for model in others),
            holds=LOST_MOST,
        ),
    ]
    if not lab.quick:
        findings += [
            loss(
                GPT2,
                "8.4 % at most, of all but UGATIT",
                lambda of: lost("gpt2", of),
                OVER_LAUNCHES,
                LOST_MOST,
            ),
            loss(
                RESNET.format("BytePS with CPU machines"),
                2.5,
                lambda of: lost("resnet50", of),
                f"{OVER_BATCHES}, {OVER_OVERLAP}",
            ),
            loss(RESNET.format("all-reduce"), 12.0, lost_by_ring, f"{OVER_BATCHES}, {OVER_RING}"),
        ]
    of_systems: dict[str, Callable[[str, int, Setting], Case]] = {
        "BytePS, k = n": lambda model, m, of: cases.byteps(model, m, m, of),
        "BytePS, k = 0": lambda model, m, of: cases.byteps(model, m, 0, of),
        "all-reduce": cases.ring,
        "native PS, k = n": cases.servers,
    }

    def curve(model: str, case: Callable[[str, int, Setting], Case]) -> Curve:
        swept = [100 * trained.efficiency(case(model, n, of)) for of in settings]
        percents = [100 * trained.efficiency(case(model, m, SHOWN)) for m in counts]
        return Curve(percents, min(swept), max(swept))

    def marks(model: str) -> list[Line]:
        curves = {
            system: curve(model, case)
            for system, case in of_systems.items()
            if case != cases.servers or model in with_servers
        }
        lines = []
        for colour, (system, of) in enumerate(curves.items()):
            lines.append(Line(counts, of.percents, f"C{colour}o-", system, {"markersize": 4}))
            place = n * 1.15 ** (colour + 1)
            lines.append(Line([place, place], [of.least, of.most], f"C{colour}", look=BAR))
        papers = PAPERS_PERCENT.get(model, [])
        paper = Line([n] * len(papers), papers, "kx", look={"markersize": 9})
        return [*lines, paper, Line([], [], "kx", "paper")]

    panels = [
        Panel(
            marks(model),
            f"GPUs, {computing_in_words(model)}",
            "",
            MODELS[model].name,
            log_x=2,
            ticks={count: str(count * GPUS) for count in counts},
            least_y=0,
            most_y=105,
        )
        for model in models
    ]
    rows = 2 if len(models) > 3 else 1
    y = "% of linear scaling (bars: all settings)"
    return outcome(findings, Picture(panels, rows=rows, y=y))


def why(lab: Lab) -> Sequence[Reason]:
    """Let nothing of the communication be hidden, or all-reduce wait for Horovod's cycles."""
    if lab.quick:
        return []
    n = MACHINES[-1]
    gpus = f"{n * GPUS} GPUs"
    cases = Systems(lab, "scalability-why", "nvlink", [(n, 0), (n, n)])
    assert len(COMPUTINGS) == len(LAUNCH_S)
    alone = [(model, computing) for model in MODELS for computing in COMPUTINGS]
    computed = computing_s(lab, "scalability-why", alone)

    def unhidden(case: Case) -> float:
        return unhidden_s(computed[case.model, case.computing], case)

    def gain(model: str, k: int, of: Setting) -> float:
        ours, theirs = cases.byteps(model, n, k, of), cases.ring(model, n, of)
        return unhidden(theirs) / unhidden(ours)

    def lost(case: Case) -> float:
        return 100 * (1 - computed[case.model, case.computing] / unhidden(case))

    def reason(what: str, of_setting: Callable[[Setting], float]) -> Reason:
        return Reason(what, "nothing of it is hidden by computing", _over(of_setting), HIDDEN)

    def least(words: str, k: int) -> Reason:
        what = f"{gpus}: " + BY_RING.format(words, "the least of all models")
        return reason(what, lambda of: min(gain(model, k, of) for model in MODELS))

    reasons = [least("with", n), least("without", 0)]
    reasons += [
        reason(
            LOST.format(gpus, RESNET.format("BytePS with CPU machines")),
            lambda of: lost(cases.byteps("resnet50", n, n, of)),
        ),
        reason(
            LOST.format(gpus, RESNET.format("all-reduce")),
            lambda of: lost(cases.ring("resnet50", n, of)),
        ),
    ]
    # `run` plays at the same time, so that no name may be its.
    trained = Trained(
        lab,
        "scalability-why",
        (
            case
            for model, of in product(MODELS, SETTINGS)
            for case in (*(cases.byteps(model, n, k, of) for k in (n, 0)), cases.ring(model, n, of))
        ),
    )

    def waited(case: Case) -> float:
        return CYCLE_S / computed[case.model, case.computing]

    def gain_of_waiting(model: str, k: int, of: Setting) -> float:
        ours, theirs = cases.byteps(model, n, k, of), cases.ring(model, n, of)
        return trained.gain(ours, theirs) + waited(ours) * trained.efficiency(ours)

    def lost_by_waiting(of: Setting) -> float:
        case = cases.ring("resnet50", n, of)
        return 100 * (1 - 1 / (1 / trained.efficiency(case) + waited(case)))

    def least_of_waiting(words: str, k: int) -> Reason:
        what = f"{gpus}: " + BY_RING.format(words, "the least of all models")
        ours = _over(lambda of: min(gain_of_waiting(model, k, of) for model in MODELS))
        return Reason(what, CYCLE, ours)

    reasons += [
        least_of_waiting("with", n),
        least_of_waiting("without", 0),
        Reason(LOST.format(gpus, RESNET.format("all-reduce")), CYCLE, _over(lost_by_waiting)),
    ]
    return reasons


VGG = "BytePS with CPU machines by native PS, VGG-16"
BY_RING = "BytePS {} CPU machines by all-reduce, {}"
LOST = "{}: what is lost of linear scaling, {}"
RESNET = "ResNet-50, {}"
GPT2 = "GPT-2, BytePS with CPU machines"
CYCLE_S = 5e-3
"""Horovod's HOROVOD_CYCLE_TIME unless it is set."""
CYCLE = (
    "all-reduce waits for one of Horovod's cycles of 5 ms after the last gradient "
    "(§8: out-of-band synchronization)"
)
HIDDEN = '§7: frameworks "can overlap the DNN computation and communication"'


def _over(of_setting: Callable[[Setting], float], settings: Sequence[Setting] = SETTINGS) -> Spread:
    return Spread.of_each([of_setting(of)] for of in settings)


EXPERIMENT = Experiment("scalability", "Six models on up to 256 GPUs (Figures 15 and 16)", run, why)
