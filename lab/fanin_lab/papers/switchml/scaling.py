"""§6.1, Figure 3: elements summed a second as workers become more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason, at_least, at_most
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.papers.switchml import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = [4, 8, 16]
RATES = [10, 100]
SYSTEMS = {
    "switchml": "SwitchML",
    "ps-n-to-n": "a server beside each worker (colocated PS)",
    "ring": "ring",
}
MOST = "{} Gbit/s, 8 workers: SwitchML by what headers leave of the link"
RING = "100 Gbit/s: SwitchML by a ring, the most with 4, 8 and 16 workers"
TENSOR_MB = 100
"""§6.1: "we report results for 100 MB tensors only"."""
SHORT = 64
SLOTS_OF_SHORT = [1, 2, 4]
"""Times the slots that packets of 256 elements have: the paper does not give these packets'. Four
times as many carry as much."""
SHORT_BY_LONG = 0.77 / 0.93
"""§5: "a 64-element configuration with 77% goodput, and a 256-element one with 93%"."""


def run(lab: Lab) -> Outcome:
    """Sum tensors continuously on each system."""
    runs = lab.play(
        {
            _name(system, gbps, count): _scenario(system, gbps, count)
            for system in SYSTEMS
            if system != "ring"
            for gbps in RATES
            for count in WORKERS
        }
        | {
            _of_short(gbps, slots): _scenario("switchml", gbps, 8, elements=SHORT, slots=slots)
            for gbps in RATES
            for slots in SLOTS_OF_SHORT
        }
        | {ON_CORES: _scenario("switchml", 100, 8, slots=2, cost=True)},
        # Nothing in it is random: every seed would give the same.
        once=True,
    )
    runs |= lab.play(
        {
            _name("ring", gbps, count): _scenario("ring", gbps, count)
            for gbps in RATES
            for count in WORKERS
        },
        once=True,
        throughputs=False,
    )

    def goodputs(name: str) -> list[float]:
        return runs[name].samples(_goodput_gbps)

    def by(one: str, other: str) -> Spread:
        return _by(runs, one, other)

    def of_link(name: str, gbps: int) -> Spread:
        share = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
        return Spread.of([100 * goodput / (gbps * share) for goodput in goodputs(name)])

    found = {
        (system, gbps): [Spread.of(goodputs(_name(system, gbps, n))).median for n in WORKERS]
        for system in SYSTEMS
        for gbps in RATES
    }
    shorts = {
        gbps: [by(_of_short(gbps, slots), _name("switchml", gbps, 8)) for slots in SLOTS_OF_SHORT]
        for gbps in RATES
    }

    def draw(figure: Figure) -> None:
        for axes, gbps in zip(figure.subplots(1, 2), RATES, strict=True):
            for at, (system, name) in enumerate(SYSTEMS.items()):
                elements = [goodput / 32 for goodput in found[system, gbps]]
                axes.plot(WORKERS, elements, f"C{at}o-", label=name)
            for slots in SLOTS_OF_SHORT:
                goodput = Spread.of(goodputs(_of_short(gbps, slots))).median
                label = f"SwitchML, {SHORT} elements, {slots * setting.SLOTS[gbps]} slots"
                axes.plot([8], [goodput / 32], f"C0{MARKERS[slots]}", label=label)
            limit = gbps * setting.PAYLOAD_BYTES / setting.WIRE_BYTES / 32
            axes.axhline(limit, color="grey", linestyle=":", label="the link, less headers")
            axes.set_ylim(0, 1.9 * limit)  # room for the names
            axes.set_xticks(WORKERS)
            finish(axes, "workers", "billion elements a second", f"{gbps} Gbit/s")

    findings = []
    for gbps in RATES:
        four, eight, sixteen = (_name("switchml", gbps, count) for count in WORKERS)
        reached = of_link(eight, gbps)
        findings += [
            Finding(
                "Fig. 3",
                f"{gbps} Gbit/s: SwitchML with 16 workers by with 4",
                1.0,
                by(sixteen, four),
                unit="x",
                cannot_fail="the pool fills the links, whoever shares the switch",
            ),
            Finding(
                "§6.1",
                MOST.format(gbps),
                "98 % at least",
                reached,
                holds=at_least(98),
                unit="%",
                cannot_fail="links have the delay with which the pool fills them",
            ),
            Finding(
                "Fig. 3",
                f"{gbps} Gbit/s, 16 workers: SwitchML by a server beside each worker, which "
                "has half of what servers of their own have",
                2.0,
                by(sixteen, _name("ps-n-to-n", gbps, 16)),
                unit="x",
                cannot_fail="2 (n - 1) / n of every tensor pass a link: arithmetic",
            ),
            Finding(
                "§5, Fig. 3",
                f"{gbps} Gbit/s, 8 workers: packets of {SHORT} elements by such of 256",
                SHORT_BY_LONG,
                Spread.over(shorts[gbps]),
                unit="x",
                swept="once, twice and 4 times as many slots",
            ),
        ]
    on_cores = of_link(ON_CORES, 100)
    rings = [by(_name("switchml", 100, n), _name("ring", 100, n)) for n in WORKERS]
    findings += [
        Finding(
            "§6.1",
            "100 Gbit/s, 8 workers, hosts that take 17.5 ns a packet and 0.076 ns a byte (fitted "
            "to ATP's, for DPDK): by what headers leave of the link",
            "not the full link: less than 98 %",
            on_cores,
            holds=at_most(98),
            unit="%",
            cannot_fail="it is the line fitted to ATP's hosts at the length of a frame",
        ),
        Finding("§1", RING, 2.9, max(rings, key=lambda spread: spread.median), unit="x"),
    ]
    return Outcome(
        findings,
        draw,
        {
            "workers": WORKERS,
            "goodput_gbps": {f"{s} at {g}": v for (s, g), v in found.items()},
            "packets_of_64_by_256": {gbps: [s.median for s in of] for gbps, of in shorts.items()},
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Give the ring hosts that ATP's are, or tensors of which its steps have little."""
    changes: dict[str, dict[str, Any]] = {
        "a ring whose hosts take 17.5 ns a packet and 0.076 ns a byte": {"cost": True},
        "a ring with tensors of 8 MB": {"tensor_mb": 8},
    }
    runs = lab.play(
        {f"scaling-why-switchml-{n}": _scenario("switchml", 100, n) for n in WORKERS}
        | {
            f"scaling-why-{number}-{n}": _scenario("ring", 100, n, **more)
            for number, more in enumerate(changes.values())
            for n in WORKERS
        },
        once=True,
        throughputs=False,
    )
    return [
        Reason(
            RING,
            change,
            max(
                (
                    _by(runs, f"scaling-why-switchml-{n}", f"scaling-why-{number}-{n}")
                    for n in WORKERS
                ),
                key=lambda spread: spread.median,
            ),
            contradicts='§6.1: "results for 100 MB tensors only"' if "tensor_mb" in more else "",
        )
        for number, (change, more) in enumerate(changes.items())
    ]


def _by(runs: dict[str, Runs], one: str, other: str) -> Spread:
    ours, theirs = (runs[name].samples(_goodput_gbps) for name in (one, other))
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def _goodput_gbps(report: Report) -> float:
    """Return what was summed a second; a ring's is of one tensor, from its beginning to its end."""
    job = report["jobs"][0]
    return (
        float(job["aggregation_gbps"]) if job["system"] == "ring" else setting.goodput_gbps(report)
    )


ON_CORES = "scaling-on-cores"
MARKERS = {1: "v", 2: "s", 4: "^"}


def _of_short(gbps: int, slots: int) -> str:
    return f"scaling-short-{gbps}-{slots}"


def _scenario(
    system: str,
    gbps: int,
    workers: int,
    *,
    elements: int = setting.ELEMENTS,
    slots: int = 1,
    cost: bool = False,
    tensor_mb: int = TENSOR_MB,
) -> dict[str, Any]:
    hosts = setting.HOSTS_OF_ATP if cost else {}
    scenario: dict[str, Any] = {
        "title": f"Figure 3: {SYSTEMS[system]}, {workers} workers at {gbps} Gbit/s",
        "interval": "1ms",
        "network": setting.rack(workers, gbps, **hosts),
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


def _name(system: str, gbps: int, workers: int) -> str:
    return f"scaling-{system}-{gbps}-{workers}"


EXPERIMENT = Experiment("scaling", "Elements summed as workers become more (Figure 3)", run, why)
