"""§6.1, Figure 3: elements summed a second as workers become more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason, at_least
from fanin.reproduce.lab import Lab, Spread
from fanin.reproduce.plot import finish
from fanin.reproduce.switchml import setting

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
RING = "100 Gbit/s: SwitchML by a ring, the most of all"


def run(lab: Lab) -> Outcome:
    """Sum tensors continuously on each system."""
    workers = [4, 16] if lab.quick else WORKERS
    runs = lab.play(
        {
            _name(system, gbps, count): _scenario(system, gbps, count)
            for system in SYSTEMS
            for gbps in RATES
            for count in workers
        },
        # Nothing in it is random but the moment at which it begins.
        once=True,
    )
    found = {
        (system, gbps): [
            setting.goodput_gbps(runs[_name(system, gbps, count)].reports[0]) for count in workers
        ]
        for system in SYSTEMS
        for gbps in RATES
    }

    def draw(figure: Figure) -> None:
        for axes, gbps in zip(figure.subplots(1, 2), RATES, strict=True):
            for at, (system, name) in enumerate(SYSTEMS.items()):
                elements = [goodput / 32 for goodput in found[system, gbps]]
                axes.plot(workers, elements, f"C{at}o-", label=name)
            limit = gbps * setting.PAYLOAD_BYTES / setting.WIRE_BYTES / 32
            axes.axhline(limit, color="grey", linestyle=":", label="the link, less headers")
            axes.set_ylim(0)
            axes.set_xticks(workers)
            finish(axes, "workers", "billion elements a second", f"{gbps} Gbit/s")

    def by(one: str, other: str, gbps: int) -> list[float]:
        return [a / b for a, b in zip(found[one, gbps], found[other, gbps], strict=True)]

    share = setting.PAYLOAD_BYTES / setting.WIRE_BYTES
    findings = []
    for gbps in RATES:
        ours = found["switchml", gbps]
        findings += [
            Finding(
                "Fig. 3",
                f"{gbps} Gbit/s: SwitchML with 16 workers by with 4",
                1.0,
                Spread.of([ours[-1] / ours[0]]),
                unit="x",
            ),
            Finding(
                "§6.1",
                MOST.format(gbps),
                "98 % at least",
                Spread.of([100 * ours[-2] / (gbps * share)]),
                holds=at_least(98),
                unit="%",
            ),
            Finding(
                "Fig. 3",
                f"{gbps} Gbit/s, 16 workers: SwitchML by a server beside each worker, half "
                "of servers of their own",
                2.0,
                Spread.of([by("switchml", "ps-n-to-n", gbps)[-1]]),
                unit="x",
            ),
        ]
    findings.append(
        Finding("abstract", RING, 2.9, Spread.of([max(by("switchml", "ring", 100))]), unit="x")
    )
    return Outcome(
        findings,
        draw,
        {"workers": workers, "goodput_gbps": {f"{s} at {g}": v for (s, g), v in found.items()}},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Give SwitchML twice the slots, and the ring hosts that ATP's are."""
    runs = lab.play(
        {f"scaling-why-{gbps}": _scenario("switchml", gbps, 8, slots=2) for gbps in RATES}
        | {
            "scaling-why-switchml": _scenario("switchml", 100, 8),
            "scaling-why-ring": _scenario("ring", 100, 8, cost=True),
        },
        once=True,
    )
    share = setting.PAYLOAD_BYTES / setting.WIRE_BYTES

    def goodput(name: str) -> float:
        return setting.goodput_gbps(runs[f"scaling-why-{name}"].reports[0])

    reasons = []
    for gbps in RATES:
        reached = goodput(str(gbps)) / (gbps * share)
        shown = Spread.of([100 * reached])
        reasons.append(Reason(MOST.format(gbps), "twice the slots", shown))
    change = "a ring whose hosts take 17.5 ns a packet and 0.076 ns a byte"
    reasons.append(Reason(RING, change, Spread.of([goodput("switchml") / goodput("ring")])))
    return reasons


def _scenario(
    system: str, gbps: int, workers: int, *, slots: int = 1, cost: bool = False
) -> dict[str, Any]:
    # A ring's steps wait for each other: of a tensor with little in it they are all delay.
    work: dict[str, Any] = (
        {"tensor": "8MB", "in_flight": 1}
        if system == "ring"
        else {"tensor": "500kB", "in_flight": 6, "slots": slots * setting.SLOTS[gbps]}
    )
    if system == "ps-n-to-n":
        del work["slots"]
    time_ms = (600 if system == "ring" else 200) / gbps + 2
    hosts = {"host_packet_cost": "17.5ns", "host_byte_cost": "0.076ns"} if cost else {}
    return {
        "title": f"Figure 3: {SYSTEMS[system]}, {workers} workers at {gbps} Gbit/s",
        # A ring waits for the timeouts of TCP.
        "stall": "1s",
        "until": setting.ms(time_ms),
        "warm_up": setting.ms(time_ms / 4),
        "interval": "1ms",
        "network": setting.rack(workers, gbps, **hosts),
        "job": [setting.job(system, workers, gbps, **work)],
    }


def _name(system: str, gbps: int, workers: int) -> str:
    return f"scaling-{system}-{gbps}-{workers}"


EXPERIMENT = Experiment("scaling", "Elements summed as workers become more (Figure 3)", run, why)
