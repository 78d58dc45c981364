"""§6.1, Figure 3: elements summed a second as workers become more."""

from __future__ import annotations

from functools import partial
from typing import Any

from fanin_lab.papers.finding import at_least, at_most
from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import Level, Line, Panel, Picture
from fanin_lab.papers.simulated import At, Case, Cases, Change, Row, Simulated, computed, ratio
from fanin_lab.papers.switchml import setting

WORKERS = [4, 8, 16]
RATES = [10, 100]
SYSTEMS = {
    "switchml": "SwitchML",
    "ps-n-to-n": "a server beside each worker (colocated PS)",
    "ring": "ring",
}
TENSOR_MB = 100
"""§6.1: "we report results for 100 MB tensors only"."""
SHORT = 64
SLOTS_OF_SHORT = [1, 2, 4]
"""Times the slots that packets of 256 elements have: the paper does not give these packets'. Four
times as many carry as much."""
SHORT_BY_LONG = 0.77 / 0.93
"""§5: "a 64-element configuration with 77% goodput, and a 256-element one with 93%"."""
SWITCHML: dict[str, Any] = {"system": "switchml", "workers": 8}
MARKERS = {1: "v", 2: "s", 4: "^"}


def scenario(
    system: str,
    gbps: int,
    workers: int,
    elements: int = setting.ELEMENTS,
    slots: int = 1,
    cost: bool = False,
    tensor_mb: int = TENSOR_MB,
    mtu: int = 1500,
) -> Scenario:
    """Return tensors that are summed continuously; of a ring a single tensor's sum.

    `slots`: times as many as the paper's. `cost`: whether packets cost hosts what ATP's do.
    """
    hosts = setting.HOSTS_OF_ATP if cost else {}
    scenario: dict[str, Any] = {
        "title": f"Figure 3: {SYSTEMS[system]}, {workers} workers at {gbps} Gbit/s",
        "interval": "1ms",
        "network": {**setting.rack(workers, gbps, **hosts), "mtu": mtu},
    }
    if system == "ring":
        # Its steps wait for each other: of one tensor, from its beginning to its end.
        work: dict[str, Any] = {"tensor": f"{tensor_mb}MB", "tensors": 1}
        scenario |= {"until": "1s", "payload": "sample"}
    else:
        # Slots are filled as they are emptied: a tensor of 100 MB is as a stream of short ones.
        work = {"tensor": "500kB", "in_flight": 6}
        if system == "switchml":
            work |= {"elements": elements, "slots": slots * setting.SLOTS[gbps]}
        time_ms = (200 if elements == setting.ELEMENTS else 400) / gbps + 2
        scenario |= {"until": setting.ms(time_ms), "warm_up": setting.ms(time_ms / 4)}
    return {**scenario, "job": [setting.job(system, workers, gbps, **work)]}


def _goodput_gbps(report: Report) -> float:
    """Return what was summed a second; a ring's is of one tensor, from its beginning to its end."""
    job = report["jobs"][0]
    if job["system"] == "ring":
        return float(job["aggregation_gbps"])
    return setting.goodput_gbps(report)


def of_link(at: At, gbps: int, more: Case) -> list[float]:
    """Return SwitchML's goodput with 8 workers, in percent of what headers leave of the link."""
    share = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
    found = at.samples(_goodput_gbps, **SWITCHML, gbps=gbps, **more)
    return [100 * goodput / (gbps * share) for goodput in found]


def of_short(at: At, gbps: int) -> Spread:
    """Return the goodput of short packets by that of long ones, over their slots."""
    long = {**SWITCHML, "gbps": gbps}
    shorts = [{**long, "elements": SHORT, "slots": slots} for slots in SLOTS_OF_SHORT]
    return Spread.over([Spread.of(at.by(_goodput_gbps, short, long)) for short in shorts])


def by_ring(at: At) -> Spread:
    """Return SwitchML's goodput by a ring's, with as many workers as make it the most."""
    of_workers = [{"gbps": 100, "workers": workers} for workers in WORKERS]
    rings = [
        Spread.of(at.by(_goodput_gbps, {"system": "switchml", **of}, {"system": "ring", **of}))
        for of in of_workers
    ]
    return max(rings, key=lambda spread: spread.median)


def picture(at: At) -> Picture:
    """Show elements a second by workers, a panel for each rate."""

    def elements(**case: Any) -> float:
        return at.spread(_goodput_gbps, **case).median / 32

    def panel(gbps: int) -> Panel:
        systems = [
            Line(
                WORKERS,
                [elements(system=system, gbps=gbps, workers=workers) for workers in WORKERS],
                f"C{number}o-",
                name,
            )
            for number, (system, name) in enumerate(SYSTEMS.items())
        ]
        short = {**SWITCHML, "gbps": gbps, "elements": SHORT}
        shorts = [
            Line(
                [8],
                [elements(**short, slots=slots)],
                f"C0{MARKERS[slots]}",
                f"SwitchML, {SHORT} elements, {slots * setting.SLOTS[gbps]} slots",
            )
            for slots in SLOTS_OF_SHORT
        ]
        limit = gbps * setting.PAYLOAD_BYTES / setting.WIRE_BYTES / 32
        link = Level(limit, "the link, less headers", {"color": "grey", "linestyle": ":"})
        return Panel(
            [*systems, *shorts, link],
            "workers",
            "billion elements a second",
            f"{gbps} Gbit/s",
            ticks=WORKERS,
            least_y=0,
            most_y=1.9 * limit,  # room for the names
        )

    return Picture([panel(gbps) for gbps in RATES])


def _rows(gbps: int) -> list[Row]:
    four, sixteen = (
        {"system": "switchml", "gbps": gbps, "workers": workers} for workers in (4, 16)
    )
    return [
        Row(
            "Fig. 3",
            f"{gbps} Gbit/s: SwitchML with 16 workers by with 4",
            1.0,
            ratio(_goodput_gbps, sixteen, four),
            "x",
            cannot_fail="the pool fills the links, whoever shares the switch",
        ),
        Row(
            "§6.1",
            f"{gbps} Gbit/s, 8 workers: SwitchML by what headers leave of the link",
            "98 % at least",
            computed(of_link, gbps, {}),
            "%",
            at_least(98),
            "links have the delay with which the pool fills them",
        ),
        Row(
            "Fig. 3",
            f"{gbps} Gbit/s, 16 workers: SwitchML by a server beside each worker, which has half "
            "of what servers of their own have",
            2.0,
            ratio(_goodput_gbps, sixteen, {**sixteen, "system": "ps-n-to-n"}),
            "x",
            cannot_fail="2 (n - 1) / n of every tensor pass a link: arithmetic",
        ),
        Row(
            "§5, Fig. 3",
            f"{gbps} Gbit/s, 8 workers: packets of {SHORT} elements by such of 256",
            SHORT_BY_LONG,
            computed(of_short, gbps),
            "x",
            swept="once, twice and 4 times as many slots",
        ),
    ]


RING = Row(
    "§1", "100 Gbit/s: SwitchML by a ring, the most with 4, 8 and 16 workers", 2.9, by_ring, "x"
)
ON_CORES: dict[str, Any] = {"slots": 2, "cost": True}
OF_REASONS = Cases(
    {"system": ["switchml", "ring"], "gbps": 100, "workers": WORKERS}, seeds=1, throughputs=False
)
OF_RING = partial(Change, of=[RING], where={"system": ["ring"]}, cases=[OF_REASONS])
SHORTS = {**SWITCHML, "gbps": RATES, "elements": SHORT, "slots": SLOTS_OF_SHORT}
EXPERIMENT = Simulated(
    "scaling",
    "Elements summed as workers become more (Figure 3)",
    scenario,
    # Nothing in it is random: every seed would give the same.
    [
        Cases({"system": ["switchml", "ps-n-to-n"], "gbps": RATES, "workers": WORKERS}, seeds=1),
        Cases(SHORTS, seeds=1),
        Cases({**SWITCHML, "gbps": 100, **ON_CORES}, seeds=1),
        Cases({"system": "ring", "gbps": RATES, "workers": WORKERS}, seeds=1, throughputs=False),
    ],
    [
        *(row for gbps in RATES for row in _rows(gbps)),
        Row(
            "§6.1",
            "100 Gbit/s, 8 workers, hosts that take 17.5 ns a packet and 0.076 ns a byte (fitted "
            "to ATP's, for DPDK): by what headers leave of the link",
            "not the full link: less than 98 %",
            computed(of_link, 100, ON_CORES),
            "%",
            at_most(98),
            "it is the line fitted to ATP's hosts at the length of a frame",
        ),
        RING,
    ],
    picture,
    changes=[
        OF_RING("a ring whose hosts take 17.5 ns a packet and 0.076 ns a byte", {"cost": True}),
        OF_RING("a ring with packets of 1,024 bytes, RoCE's in Ethernet's 1,500", {"mtu": 1064}),
        OF_RING(
            "a ring with tensors of 8 MB",
            {"tensor_mb": 8},
            '§6.1: "results for 100 MB tensors only"',
        ),
    ],
).experiment()
