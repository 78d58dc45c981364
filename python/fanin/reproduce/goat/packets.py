"""§VII-D, packet by packet: what the paper computes is played, scaled down, by `fanin sim`.

Model and memories are divided by `SCALE`, and packets, rates and links are as they are: how far a
worker is ahead of another, in gradients by memories, is the same. A worker's rate is its link's.
Nothing is dropped, and no worker sends again before all is over. A switch's plan is KRGS's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, at_most
from fanin.reproduce.goat.aggregation import COLOURS, NUMBERS, PARTS
from fanin.reproduce.goat.drawn import (
    DRAWINGS,
    MEMORY,
    RATE_BPS,
    SCHEMES,
    SIZE,
    Setting,
    counts,
    drawn,
)
from fanin.reproduce.goat.overhead import LOWER
from fanin.reproduce.lab import Lab, Report, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKET = 256
"""Bytes of gradients in a packet: the paper's 64 elements."""
PART = 16
"""Packets of a sub-model."""
SUB_MODEL = Setting("leaf-spine", 1).sub_model
SCALE = SUB_MODEL / (PART * PACKET)
PACKETS = PART * -(-SIZE // SUB_MODEL)
"""Of the model."""
ROOM = MEMORY // SUB_MODEL * PART
"""Packets of a switch."""
PLAYED = ("goat", "atp", "geryon")
SYSTEMS = {"goat": "goat", "atp": "atp", "geryon": "ps"}
SEEDS = 3


def scenario(setting: Setting, drawing: int, scheme: str) -> dict[str, Any]:
    """Return what is drawn, as a scenario."""
    job = drawn(setting, drawing)
    network: dict[str, Any] = {
        "rate": f"{RATE_BPS / 1e9:g}Gbit",
        "queue": "64MB",
    }
    if setting.topology == "leaf-spine":
        network |= {"topology": "leaf-spine", "leaves": 10, "spines": 10, "hosts": 5}
    else:
        network |= {"topology": "fat-tree", "k": 8, "hosts": 6}
    entry: dict[str, Any] = {
        "system": SYSTEMS[scheme],
        "workers": job.workers,
        "tensor": f"{PACKETS * PACKET}B",
        "tensors": 1,
        "in_flight": 1,
        "server": job.server,
        "elements": PACKET // 4,
        "congestion_control": False,
        "timeout": "1s",
        "window": PACKETS,
    }
    if scheme == "goat":
        nodes = job.workload.plan(setting.planner, drawing)["nodes"]
        entry["nodes"] = [["server" if n == job.server else n for n in row] for row in nodes]
    return {
        "title": f"{SCHEMES[scheme]}, {setting.topology}, {setting.workers} workers",
        "until": "10s",
        "interval": "1s",
        "network": network,
        "switch": {"programmable": list(job.switches), "aggregators": ROOM, "ways": 1},
        "link": [
            {"link": [worker, "*"], "rate": f"{rate / 1e6:.3f}Mbit"}
            for worker, rate in zip(job.workers, job.rates_bps, strict=True)
        ],
        "job": [entry],
    }


def run(lab: Lab) -> Outcome:
    """Play what is drawn first for each seed, and compare with what is counted."""
    seeds = lab.seeds[:SEEDS]
    settings = [
        Setting(topology, workers, deviation)
        for topology, workers in NUMBERS.items()
        for deviation in (0.2, 0.0)
    ]
    if lab.quick:
        settings = [Setting("leaf-spine", 10, deviation) for deviation in (0.2, 0.0)]
    found = counts(lab, settings)
    scenarios = {
        (setting, seed, scheme): scenario(setting, DRAWINGS * seed, scheme)
        for setting in settings
        for seed in seeds
        for scheme in PLAYED
    }
    names = {key: _name(*key) for key in scenarios}
    runs = lab.play(
        {names[key]: each for key, each in scenarios.items()}, once=True, throughputs=False
    )
    played = {key: Played.of(runs[name].reports[0]) for key, name in names.items()}

    def spread(of: Callable[[Setting, int], float], setting: Setting) -> Spread:
        return Spread.of([of(setting, seed) for seed in seeds])

    def share(scheme: str) -> Callable[[Setting, int], float]:
        def of(setting: Setting, seed: int) -> float:
            return 100 * played[setting, seed, scheme].added / (setting.workers * PACKETS)

        return of

    def counted(scheme: str, setting: Setting) -> list[float]:
        each = found[setting][:: 1 if lab.quick else DRAWINGS][: len(seeds)]
        return [100 * one[scheme].server / (setting.workers * SIZE) for one in each]

    def hops(scheme: str, by: str) -> Callable[[Setting, int], float]:
        return lambda setting, seed: (
            played[setting, seed, scheme].hops / played[setting, seed, by].hops
        )

    findings = []
    for setting in settings:
        where = f"{setting.topology}, {setting.workers} workers, packet by packet"
        if not setting.deviation:
            findings.append(
                Finding(
                    "Fig. 16",
                    f"{where}, rates alike: packets times links, GOAT's by ATP's",
                    "ATP has less",
                    spread(hops("goat", "atp"), setting),
                    holds=MORE,
                    unit="x",
                )
            )
            continue
        findings += [
            Finding(
                "Figs. 13, 14",
                f"{where}: what {SCHEMES[scheme]}'s server adds, of all that workers send",
                paper,
                spread(share(scheme), setting),
                unit="%",
            )
            for scheme, paper in PARTS[setting.topology].items()
            if scheme in PLAYED
        ]
        findings += [
            Finding(
                "Fig. 15",
                f"{where}: packets times links, {SCHEMES[scheme]}'s by GOAT's ({LOWER[scheme]} % "
                "lower)",
                round(1 / (1 - LOWER[scheme] / 100), 2),
                spread(hops(scheme, "goat"), setting),
                unit="x",
            )
            for scheme in ("atp", "geryon")
        ]
        findings.append(
            Finding(
                "none",
                f"{where}: packets that GOAT's workers send again, of all that they send",
                "(not the paper's) none, as nothing is lost",
                spread(lambda s, seed: 100 * played[s, seed, "goat"].again, setting),
                holds=at_most(1),
                unit="%",
                cannot_fail="not the paper's",
            )
        )

    def draw(figure: Figure) -> None:
        shown = [setting for setting in settings if setting.deviation]
        for axes, setting in zip(
            figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
        ):
            for at, scheme in enumerate(PLAYED):
                for place, of_one, alpha in (
                    (at - 0.2, counted(scheme, setting), 0.45),
                    (at + 0.2, [share(scheme)(setting, seed) for seed in seeds], 1.0),
                ):
                    spread = Spread.of(of_one)
                    error = [[spread.median - spread.least], [spread.most - spread.median]]
                    axes.bar(
                        [place],
                        [spread.median],
                        0.38,
                        yerr=error,
                        capsize=3,
                        color=COLOURS[scheme],
                        alpha=alpha,
                    )
            for scheme, paper in PARTS[setting.topology].items():
                if scheme in PLAYED:
                    axes.plot([PLAYED.index(scheme)], [paper], "kx", markersize=11)
            axes.bar([0], [0], color="grey", alpha=0.45, label="counted by the planner")
            axes.bar([0], [0], color="grey", label="played packet by packet")
            axes.plot([], [], "kx", label="paper, counted")
            axes.set_xticks(range(len(PLAYED)), [SCHEMES[scheme] for scheme in PLAYED])
            title = f"{setting.topology}, {setting.workers} workers"
            finish(axes, "", "added by the server, % of all packets", title)

    series = {
        f"{setting.topology}, {setting.workers} workers, deviation {setting.deviation:g}": {
            scheme: [vars(played[setting, seed, scheme]) for seed in seeds] for scheme in PLAYED
        }
        for setting in settings
    }
    return Outcome(findings, draw, series)


@dataclass(frozen=True)
class Played:
    """What of a run is compared."""

    added: int
    """Packets that the server added."""
    hops: int
    """Links that packets passed, in both directions: contributions and results."""
    again: float
    """Which part of the workers' packets they sent before."""

    @classmethod
    def of(cls, report: Report) -> Played:
        """Read a report."""
        (job,) = report["jobs"]
        again = job["retransmissions"] / job["packets_sent"]
        return cls(job["server_aggregations"], report["packet_hops"], again)


def _name(setting: Setting, seed: int, scheme: str) -> str:
    alike = "" if setting.deviation else "-alike"
    return f"packets-{setting.topology}-{setting.workers}{alike}-{scheme}-{seed}"


EXPERIMENT = Experiment("packets", "Packet by packet (Figures 13 to 16)", run)
