"""§VII-B and §VII-D, packet by packet: what the paper counts is played, scaled, by `fanin sim`.

Models and memories are divided by one factor, and packets, rates and links are as they are: how far
a worker is ahead of another, in memories, is the same. Nothing is dropped, and no timeout passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, at_most
from fanin.reproduce.goat import testbed
from fanin.reproduce.goat.aggregation import COLOURS, PARTS
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
"""Of AlexNet."""
ROOM = MEMORY // SUB_MODEL * PART
"""Packets of a switch with 64 MB."""
WORKERS = 30
"""A bitmap of ATP's has 32 children, and the first switch that sums may be next to the server."""
PLAYED = ("goat", "atp", "geryon")
SEEDS = 3
ENTRY: dict[str, Any] = {
    "tensors": 1,
    "in_flight": 1,
    "elements": PACKET // 4,
    "congestion_control": False,
    "timeout": "10s",
}
BED_WORKERS = 16
BED_SCALE = 20
BED_PACKETS = testbed.SIZES["ResNet-18"] // (BED_SCALE * PACKET)
BED_ROOM = testbed.MEMORY // (BED_SCALE * PACKET)
BED_STEP_S = 8 * BED_PACKETS * PACKET / testbed.RATE_BPS
DEVIATION = 0.2
"""Of a worker's lateness, by the most that it may be."""


def _systems(nodes: Sequence[Sequence[str]] | None) -> Mapping[str, dict[str, Any]]:
    # Geryon is GOAT's machines with a plan by which the server sums all.
    return {
        "goat": {"system": "goat", "nodes": nodes} if nodes else {"system": "goat"},
        "atp": {"system": "atp"},
        "geryon": {"system": "goat", "planner": "server"},
    }


def scenario(setting: Setting, drawing: int, scheme: str) -> dict[str, Any]:
    """Return what is drawn of §VII-D, as a scenario, with KRGS's plan."""
    job = drawn(setting, drawing)
    network: dict[str, Any] = {"rate": f"{RATE_BPS / 1e9:g}Gbit", "queue": "64MB"}
    if setting.topology == "leaf-spine":
        network |= {"topology": "leaf-spine", "leaves": 10, "spines": 10, "hosts": 5}
    else:
        network |= {"topology": "fat-tree", "k": 8, "hosts": 6}
    nodes = None
    if scheme == "goat":
        planned = job.workload.plan(setting.planner, drawing)["nodes"]
        nodes = [["server" if node == job.server else node for node in row] for row in planned]
    return {
        "title": f"{SCHEMES[scheme]}, {setting.topology}, {setting.workers} workers",
        "until": "5s",
        "interval": "1s",
        "payload": "sample",
        "network": network,
        "switch": {"programmable": list(job.switches), "aggregators": ROOM, "ways": 1},
        "job": [
            {
                **ENTRY,
                "workers": job.workers,
                "server": job.server,
                "tensor": f"{PACKETS * PACKET}B",
                "window": PACKETS,
                "rates": [f"{rate / 1e6:.3f}Mbit" for rate in job.rates_bps],
                **_systems(nodes)[scheme],
            }
        ],
    }


def on_the_testbed(lateness: float, scheme: str) -> dict[str, Any]:
    """Return Exp 3 as a scenario; workers are late by so much of what a gradient takes."""
    workers = [f"w{worker}" for worker in range(1, BED_WORKERS + 1)]
    halves = zip(workers, ["s1"] * (BED_WORKERS // 2) + ["s2"] * (BED_WORKERS // 2), strict=True)
    links = [*halves, ("ps", "s3"), ("s1", "s2"), ("s1", "s3"), ("s2", "s3")]
    most_s = lateness * BED_STEP_S / DEVIATION
    plan = {"planner": "krgs", "sub_models": testbed.SIZES["ResNet-18"] // testbed.SUB_MODEL}
    return {
        "title": f"{SCHEMES[scheme]} on the testbed, workers late",
        "until": "10s",
        "interval": "1s",
        "payload": "sample",
        "network": {"topology": "own", "rate": "100Gbit", "queue": "64MB"},
        "switch": {"aggregators": BED_ROOM, "ways": 1},
        "node": [
            *({"kind": "switch", "name": switch} for switch in testbed.SWITCHES),
            *({"kind": "host", "name": host} for host in [*workers, "ps"]),
        ],
        "link": [{"link": list(ends)} for ends in links],
        "job": [
            {
                **ENTRY,
                "workers": workers,
                "server": "ps",
                "tensor": f"{BED_PACKETS * PACKET}B",
                "window": BED_PACKETS,
                "late": {"most": f"{1e6 * most_s:.3f}us", "deviation": DEVIATION},
                **_systems(None)[scheme],
                **(plan if scheme == "goat" else {}),
            }
        ],
    }


def run(lab: Lab) -> Outcome:
    """Play what is drawn first for each seed, and compare with what is counted."""
    lab = lab.with_seeds(lab.seeds[:SEEDS])
    topologies = ["leaf-spine"] if lab.quick else ["leaf-spine", "fat-tree"]
    workers = 10 if lab.quick else WORKERS
    settings = [Setting(t, workers, deviation) for t in topologies for deviation in (0.2, 0.0)]
    lateness = testbed.LATENESS[2:3] if lab.quick else testbed.LATENESS
    found = counts(lab, settings)
    asked = [(s, seed, scheme) for s in settings for seed in lab.seeds for scheme in PLAYED]
    bed = [(late, scheme) for late in lateness for scheme in PLAYED]
    runs = lab.play(
        {_name(*one): scenario(one[0], DRAWINGS * one[1], one[2]) for one in asked},
        once=True,
        throughputs=False,
    )
    late_runs = lab.play({_bed_name(*one): on_the_testbed(*one) for one in bed}, throughputs=False)
    played = {one: Played.of(runs[_name(*one)].reports[0]) for one in asked}
    late_played = {
        (*one, seed): Played.of(report)
        for one in bed
        for seed, report in zip(lab.seeds, late_runs[_bed_name(*one)].reports, strict=True)
    }

    def share(scheme: str, setting: Setting) -> list[float]:
        return [
            100 * played[setting, seed, scheme].server / played[setting, seed, "geryon"].server
            for seed in lab.seeds
        ]

    def counted(scheme: str, setting: Setting) -> list[float]:
        each = found[setting][:: 1 if lab.quick else DRAWINGS]
        return [100 * one[scheme].server / (setting.workers * SIZE) for one in each]

    def hops(scheme: str, by: str, setting: Setting) -> Spread:
        return Spread.of(
            [
                played[setting, seed, scheme].hops / played[setting, seed, by].hops
                for seed in lab.seeds
            ]
        )

    def late_share(scheme: str) -> Spread:
        return Spread.over(
            [
                Spread.of(
                    [
                        100
                        * late_played[late, scheme, seed].server
                        / late_played[late, "geryon", seed].server
                        for seed in lab.seeds
                    ]
                )
                for late in lateness
            ]
        )

    findings = [
        Finding(
            "Fig. 10",
            f"testbed, 16 workers, packet by packet: {SCHEMES[scheme]}'s bytes at the server, of "
            "Geryon's",
            round(100 * testbed.SERVER_MB[scheme] / testbed.SERVER_MB["geryon"], 2),
            late_share(scheme),
            unit="%",
            swept="how late workers are",
        )
        for scheme in ("goat", "atp")
    ]
    for setting in settings:
        where = f"{setting.topology}, {setting.workers} workers, packet by packet"
        if setting.deviation:
            findings += [
                Finding(
                    "Figs. 13, 14",
                    f"{where}: {SCHEMES[scheme]}'s bytes at the server, of Geryon's",
                    paper,
                    Spread.of(share(scheme, setting)),
                    unit="%",
                )
                for scheme, paper in PARTS[setting.topology].items()
                if scheme in PLAYED
            ]
            findings += [
                Finding(
                    "Fig. 15",
                    f"{where}: bytes times links, {SCHEMES[scheme]}'s by GOAT's ({LOWER[scheme]} % "
                    "lower)",
                    round(1 / (1 - LOWER[scheme] / 100), 2),
                    hops(scheme, "goat", setting),
                    unit="x",
                )
                for scheme in ("atp", "geryon")
            ]
            again = [100 * played[setting, seed, "goat"].again for seed in lab.seeds]
            findings.append(
                Finding(
                    "none",
                    f"{where}: packets that GOAT's workers send again, of all that they send",
                    "(not the paper's) none, as nothing is lost",
                    Spread.of(again),
                    holds=at_most(1),
                    unit="%",
                    cannot_fail="not the paper's",
                )
            )
        else:
            findings.append(
                Finding(
                    "Fig. 16",
                    f"{where}, rates alike: bytes times links, GOAT's by ATP's",
                    "ATP has less",
                    hops("goat", "atp", setting),
                    holds=MORE,
                    unit="x",
                )
            )

    def draw(figure: Figure) -> None:
        shown = [setting for setting in settings if setting.deviation]
        *row, last = figure.subplots(1, len(shown) + 1)
        figure.set_size_inches(4.6 * (len(shown) + 1), 4.8)
        for axes, setting in zip(row, shown, strict=True):
            for at, scheme in enumerate(PLAYED):
                for place, values, alpha in (
                    (at - 0.2, counted(scheme, setting), 0.45),
                    (at + 0.2, share(scheme, setting), 1.0),
                ):
                    spread = Spread.of(values)
                    axes.bar(
                        [place],
                        [spread.median],
                        0.38,
                        yerr=[[spread.median - spread.least], [spread.most - spread.median]],
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
            finish(axes, "", "at the server, % of Geryon's", title)
        for scheme in PLAYED:
            values = [
                Spread.of([late_played[late, scheme, seed].server for seed in lab.seeds]).median
                * BED_SCALE
                / testbed.MB
                for late in lateness
            ]
            last.plot(lateness, values, "o-", color=COLOURS[scheme], label=SCHEMES[scheme])
        last.set_xscale("log")
        last.set_ylim(0)
        finish(last, "lateness by a gradient's time", "at the server (MB)", "testbed, 16 workers")

    series = {
        **{_name(*one): vars(each) for one, each in played.items()},
        **{
            f"{_bed_name(late, scheme)}, seed {seed}": vars(each)
            for (late, scheme, seed), each in late_played.items()
        },
    }
    return Outcome(findings, draw, series)


@dataclass(frozen=True)
class Played:
    """What of a run is compared: contributions alone, and not what comes back."""

    server: int
    """Bytes at the server."""
    hops: int
    """Bytes times links."""
    again: float
    """Which part of the workers' packets they had sent before."""

    @classmethod
    def of(cls, report: Report) -> Played:
        """Read a report."""
        (job,) = report["jobs"]
        again = job["retransmissions"] / job["packets_sent"]
        return cls(job["server_bytes"], job["gradient_hop_bytes"], again)


def _name(setting: Setting, seed: int, scheme: str) -> str:
    alike = "" if setting.deviation else "-alike"
    return f"packets-{setting.topology}-{setting.workers}{alike}-{scheme}-{seed}"


def _bed_name(lateness: float, scheme: str) -> str:
    return f"packets-testbed-{lateness:g}-{scheme}"


EXPERIMENT = Experiment("packets", "Packet by packet (Figures 13 to 16)", run)
