"""§VII-B and §VII-D, packet by packet: what the paper counts is played, scaled, by `fanin sim`.

Models and memories are divided by one factor, and packets, rates and links are as they are: how far
a worker is ahead of another, in memories, is the same. Nothing is dropped, and no timeout passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, at_most, by_lower
from fanin_lab.papers.goat import testbed
from fanin_lab.papers.goat.aggregation import COUNTED, PARTS
from fanin_lab.papers.goat.drawn import (
    COLOURS,
    DRAWINGS,
    MEMORY,
    RATE_BPS,
    SCHEMES,
    SIZE,
    Setting,
    counts,
    drawn,
)
from fanin_lab.papers.goat.overhead import AT, LOWER, OWN
from fanin_lab.papers.lab import Lab, Report, Spread
from fanin_lab.papers.plot import PAPER, Bars, Level, Line, Mark, Panel, Picture, outcome

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


def systems(nodes: Sequence[Sequence[str]] | None) -> Mapping[str, dict[str, Any]]:
    """Return the keys of a job, by scheme: Geryon is a plan by which the server sums all."""
    return {
        "goat": {"system": "goat", "nodes": nodes} if nodes else {"system": "goat"},
        "esa": {"system": "esa"},
        "atp": {"system": "atp"},
        "geryon": {"system": "goat", "planner": "server"},
    }


def scenario(setting: Setting, drawing: int, scheme: str, window: int) -> dict[str, Any]:
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
                "window": window or PACKETS,
                "rates": [f"{rate / 1e6:.3f}Mbit" for rate in job.rates_bps],
                **systems(nodes)[scheme],
            }
        ],
    }


def on_the_testbed(lateness: float, scheme: str, window: int) -> dict[str, Any]:
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
                "window": window or BED_PACKETS,
                "late": {"most": f"{1e6 * most_s:.3f}us", "deviation": DEVIATION},
                **systems(None)[scheme],
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
    lateness = testbed.LATENESS[3:4] if lab.quick else testbed.LATENESS
    changed = [] if lab.quick else CHANGED
    played = _played(lab, settings, changed, lateness)
    found = counts(lab, settings)

    def share(scheme: str, of: Of, window: int) -> list[float]:
        return [
            100 * played[of, seed, scheme, window].server / played[of, seed, "geryon", 0].server
            for seed in lab.seeds
        ]

    def kinds(setting: Setting) -> list[tuple[Setting, int]]:
        each = [replace(setting, **change) for change in ({}, *changed)]
        return [(one, window) for one in each for window in WINDOWS]

    def hops(one: str, other: str, setting: Setting, *, own: Sequence[bool] = (True,)) -> Spread:
        def ratio(of: Setting, window: int, seed: int, *, with_own: bool) -> float:
            # The server gets all of Geryon's packets, once.
            geryon = played[of, seed, "geryon", 0]
            packet = 0 if with_own else geryon.server / geryon.sent
            windows = [0 if scheme == "geryon" else window for scheme in (one, other)]
            ours, theirs = (
                played[of, seed, scheme, each]
                for scheme, each in zip((one, other), windows, strict=True)
            )
            return (ours.hops - packet * ours.sent) / (theirs.hops - packet * theirs.sent)

        return Spread.of_each(
            [ratio(*kind, seed, with_own=with_own) for seed in lab.seeds]
            for kind in kinds(setting)
            for with_own in own
        )

    def shares(scheme: str, setting: Setting) -> Spread:
        if scheme != "goat":
            # KRGS plans for GOAT alone.
            alike = [kind for kind in kinds(setting) if kind[0].planner == setting.planner]
            return Spread.of_each(share(scheme, *kind) for kind in alike)
        each = [share(scheme, *kind) for kind in kinds(setting)]
        unsummed = [of for of, window in kinds(setting) if not window]
        each += [[_direct(of, seed) for seed in lab.seeds] for of in unsummed]
        return Spread.of_each(each)

    def of_rates_alike(setting: Setting, where: str) -> list[Finding]:
        what = f"{where}, rates alike: bytes times links, GOAT's by ATP's"
        ours = hops("goat", "atp", setting)
        return [Finding("Fig. 16", what, "ATP has less", ours, MORE, "x", OVER)]

    def of_links(setting: Setting, where: str, scheme: str) -> Finding:
        of, ours = f"{where}: bytes times links, {SCHEMES[scheme]}'s by GOAT's", (True, False)
        spread, swept = hops(scheme, "goat", setting, own=ours), f"{OVER}, {OWN}"
        if setting.topology != AT.topology:
            # The paper's numbers are of the leaf-spine alone; its figure has both.
            return Finding("Fig. 15", of, "GOAT has the least", spread, MORE, "x", swept)
        percent = LOWER[scheme]
        what = f"{of} ({percent} % lower)"
        return Finding("Fig. 15", what, by_lower(percent), spread, unit="x", swept=swept)

    def of_setting(setting: Setting, where: str) -> list[Finding]:
        parts = PARTS[setting.topology]
        return [
            *(
                Finding(
                    "Figs. 13, 14",
                    f"{where}: {SCHEMES[scheme]}'s bytes at the server, of Geryon's",
                    parts[scheme],
                    shares(scheme, setting),
                    unit="%",
                    swept=f"{OVER}, {COUNTED}" if scheme == "goat" else OVER_SWITCHES,
                )
                for scheme in SHARING
                if scheme in parts
            ),
            *(of_links(setting, where, scheme) for scheme in LOWER),
            *(
                Finding(
                    "none",
                    f"{where}, {NAMES[window]}: packets that GOAT's workers send again, of all "
                    "they send",
                    "(not the paper's) none, as nothing is lost",
                    Spread.of([100 * played[setting, s, "goat", window].again for s in lab.seeds]),
                    at_most(1),
                    "%",
                    cannot_fail="not the paper's",
                )
                for window in WINDOWS
            ),
        ]

    findings = [
        Finding(
            "Fig. 10",
            f"testbed, 16 workers, packet by packet: {SCHEMES[scheme]}'s bytes at the server, of "
            "Geryon's",
            round(100 * testbed.SERVER_MB[scheme] / testbed.SERVER_MB["geryon"], 2),
            Spread.of_each(share(scheme, late, window) for late in lateness for window in WINDOWS),
            unit="%",
            swept=f"how late workers are, {OVER_WINDOWS}",
            cannot_fail=testbed.ARITHMETIC.get(scheme, ""),
        )
        for scheme in SHARING
    ]
    for setting in settings:
        where = f"{setting.topology}, {setting.workers} workers, packet by packet"
        found_there = of_setting if setting.deviation else of_rates_alike
        findings += found_there(setting, where)

    def drawn_panel(setting: Setting) -> Panel:
        marks: list[Mark] = []
        each, of_all = found[setting][:: 1 if lab.quick else DRAWINGS], setting.workers * SIZE
        for at, scheme in enumerate(SHARING):
            counted = [100 * one[scheme].server / of_all for one in each]
            bars = [counted, *(share(scheme, setting, window) for window in WINDOWS)]
            for place, (values, alpha) in enumerate(zip(bars, ALPHAS, strict=True)):
                look = {"color": COLOURS[scheme], "alpha": alpha}
                where = [at + 0.26 * (place - 1)]
                marks.append(Bars(where, [Spread.of(values)], width=0.25, look=look))
            if scheme in PARTS[setting.topology]:
                paper = [PARTS[setting.topology][scheme]]
                marks.append(Line([at - 0.26], paper, "kx", look={"markersize": 11}))
        kinds = ["counted by the planner", *(f"played, {name}" for name in NAMES.values())]
        for kind, alpha in zip(kinds, ALPHAS, strict=True):
            marks.append(Bars([0], [0], kind, look={"color": "grey", "alpha": alpha}))
        marks.append(Line([], [], "kx", "paper, counted"))
        title = f"{setting.topology}, {setting.workers} workers"
        ticks = {at: SCHEMES[scheme] for at, scheme in enumerate(SHARING)}
        return Panel(marks, "", AT_SERVER, title, ticks=ticks, least_y=0)

    def testbed_panel() -> Panel:
        marks: list[Mark] = []
        for scheme in SHARING:
            colour = {"color": COLOURS[scheme]}
            for window, style in zip(WINDOWS, ("o-", "s:"), strict=True):
                values = [Spread.of(share(scheme, late, window)).median for late in lateness]
                label = f"{SCHEMES[scheme]}, {NAMES[window]}"
                marks.append(Line(lateness, values, style, label, colour))
            paper = 100 * testbed.SERVER_MB[scheme] / testbed.SERVER_MB["geryon"]
            marks.append(Level(paper, look={**PAPER, **colour}))
        title = "testbed, 16 workers (dashed: the paper)"
        return Panel(marks, "lateness by a gradient's time", AT_SERVER, title, log_x=10, least_y=0)

    panels = [*(drawn_panel(each) for each in settings if each.deviation), testbed_panel()]
    return outcome(findings, Picture(panels, (4 * len(panels), 4.8)))


AT_SERVER = "at the server, % of Geryon's"
WINDOWS = (0, 64)
"""Packets that a worker has on its way, or 0: the whole model."""
NAMES = {0: "windows of the model", 64: "windows of 64 packets"}
OVER_WINDOWS = "windows of the model or of 64 packets"
CHANGED: Sequence[Mapping[str, Any]] = (
    {"sums": "near"},
    {"sums": "far"},
    {"planner": "krgs-overhead"},
)
"""Those settings of `drawn.SWEPT` that change most."""
OVER_SWITCHES = (
    f"{OVER_WINDOWS}, the switches that sum drawn from all, from those next to hosts or from the "
    "others"
)
OVER = f"{OVER_SWITCHES}, KRGS on Eq. 4 or on Eq. 1"
ALPHAS = (0.3, 1.0, 0.65)
SHARING = ("goat", "esa", "atp")
Of = Setting | float
"""What is played: a drawn setting, or the testbed with workers that are so late."""


def _played(
    lab: Lab,
    settings: Sequence[Setting],
    changed: Sequence[Mapping[str, Any]],
    lateness: Sequence[float],
) -> dict[tuple[Of, int, str, int], Played]:
    kinds = [*((scheme, window) for scheme in SHARING for window in WINDOWS), ("geryon", 0)]
    asked = [
        (replace(setting, **change), *kind)
        for setting in settings
        for change in ({}, *changed)
        for kind in kinds
    ]

    def name(*parts: object) -> str:
        return "-".join(["packets", *(str(part) for part in parts)])

    def of_setting(setting: Setting, scheme: str, window: int, seed: int) -> str:
        planner = [setting.planner] if scheme == "goat" else []
        where = (setting.topology, setting.workers, f"{setting.deviation:g}", setting.sums)
        return name(*where, scheme, *planner, window, seed)

    # Each drawing is a scenario of its own, and on the testbed the seed draws.
    drawings = {
        of_setting(setting, scheme, window, seed): scenario(
            setting, DRAWINGS * seed, scheme, window
        )
        for setting, scheme, window in asked
        for seed in lab.seeds
    }
    beds = {(late, *kind): on_the_testbed(late, *kind) for late in lateness for kind in kinds}
    runs = lab.play(drawings, once=True, throughputs=False)
    late = lab.play({name("testbed", *one): each for one, each in beds.items()}, throughputs=False)
    found: dict[tuple[Of, int, str, int], Played] = {
        (setting, seed, scheme, window): Played.of(
            runs[of_setting(setting, scheme, window, seed)].reports[0]
        )
        for setting, scheme, window in asked
        for seed in lab.seeds
    }
    for one in beds:
        reports = late[name("testbed", *one)].reports
        for seed, report in zip(lab.seeds, reports, strict=True):
            found[one[0], seed, one[1], one[2]] = Played.of(report)
    return found


@dataclass(frozen=True)
class Played:
    """What of a run is compared: contributions alone, and not what comes back."""

    server: int
    """Bytes at the server."""
    hops: int
    """Bytes times links."""
    sent: int
    """Packets that workers sent, each of which passes one link of a worker's own."""
    again: float
    """Which part of the workers' packets they had sent before."""

    @classmethod
    def of(cls, report: Report) -> Played:
        """Read a report."""
        (job,) = report["jobs"]
        again = job["retransmissions"] / job["packets_sent"]
        return cls(job["server_bytes"], job["gradient_hop_bytes"], job["packets_sent"], again)


def _direct(setting: Setting, seed: int) -> float:
    """Return what no switch sums by GOAT's plan, of all that workers send, in per cent."""
    planned = drawn(setting, DRAWINGS * seed).workload.plan(setting.planner, DRAWINGS * seed)
    return 100 * planned["direct_bytes"] / (setting.workers * SIZE)


EXPERIMENT = Experiment("packets", "Packet by packet (Figures 13 to 16)", run)
