"""§5.2.3, Figure 10: throughput while one worker loses packets, beside SwitchML."""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import MORE
from fanin_lab.papers.lab import Scenario
from fanin_lab.papers.plot import Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, by, computed

WORST = 1e-2
LITTLE = 1e-4
LOSSES = Either([1e-3, WORST], quick=[WORST])
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    # Without congestion control, as in the paper: an adversary's losses tell of no congestion.
    "atp": ("ATP", {"system": "atp", "congestion_control": False}),
    # Its paper's way to notice a loss.
    "switchml": ("SwitchML (timeouts of 1 ms)", {"system": "switchml", "timeouts_only": True}),
}
HOSTS = {"atp": setting.HOSTS, "switchml": setting.HOSTS_OF_SWITCHML}
AS_SWITCHML = {"window": setting.SLOTS * setting.ELEMENTS_OF_SWITCHML // setting.ELEMENTS}
WINDOWS: Either[list[dict[str, int]]] = Either([{}, AS_SWITCHML], quick=[{}])
"""Packets that an ATP worker has on the way: what fills a host, as elsewhere; or as many elements
as SwitchML's slots. The paper says of neither."""
OVER = "windows of ATP that fill a host, or have as many elements as SwitchML's slots"
WARM_UP_MS = 3.0
LOSSY_MS = Either(50.0, quick=20.0)
"""Fifty timeouts; without loss one iteration is as the next."""
LOSSLESS_MS = Either(16.0, quick=8.0)
SCALE = 200.0
PAPER_GAIN = 1.34


def scenario(
    work: str,
    system: str,
    loss: float,
    lossy_ms: float,
    lossless_ms: float,
    window: int = setting.WINDOW,
) -> Scenario:
    """Return the micro-benchmark or VGG16, with one worker that loses packets."""
    name, keys = SYSTEMS[system]
    more: dict[str, Any] = {**keys, "timeout": "1ms"}
    if system == "atp":
        more["window"] = window
    if work == "micro":
        # Several: one that waits for what was lost keeps the others from nothing.
        more |= {"tensor": "4MB", "in_flight": 2}
    else:
        more |= setting.work("vgg16", SCALE)
    return {
        "title": f"Figure 10: {work}, {name}, loss {loss:.3%}",
        "until": setting.ms(WARM_UP_MS + (lossy_ms if loss else lossless_ms)),
        "warm_up": setting.ms(WARM_UP_MS),
        # SwitchML cuts short tensors in another way than long ones.
        "payload": "sample" if system == "atp" else "full",
        "network": setting.rack(9, HOSTS[system]),
        "switch": setting.switch(8192),
        "job": [setting.job(**more)],
        "loss": [{"link": ["h0", "s0"], "from": "h0", "loss": loss}],
    }


def normalised(at: At, work: str, system: str, loss: float) -> list[float]:
    """Return throughputs by that without loss."""
    read = setting.goodput_gbps if work == "micro" else setting.images_per_s
    (lossless,) = at.samples(read, work=work, system=system, loss=0.0)
    return [one / lossless for one in at.samples(read, work=work, system=system, loss=loss)]


def gain(at: At, work: str) -> list[float]:
    """Return ATP's by SwitchML's at the worst loss."""
    return by(*(normalised(at, work, system, WORST) for system in SYSTEMS))


def picture(at: At) -> Picture:
    """Show the micro-benchmark by the loss."""
    losses = LOSSES.of(at.quick)
    percent = [100 * loss for loss in (0.0, *losses)]
    shown = {
        system: [1.0, *(normalised(at, "micro", system, loss)[0] for loss in losses)]
        for system in SYSTEMS
    }
    lines = [
        Line(percent, shown[system], f"C{number}o-", name)
        for number, (system, (name, _)) in enumerate(SYSTEMS.items())
    ]
    reached = PAPER_GAIN * shown["switchml"][-1]
    label = "paper: at most 1.34 times SwitchML"
    paper = Line([100 * WORST], [reached], "k*", label, {"markersize": 10})
    panel = Panel(
        [*lines, paper],
        "packets that one worker loses (%)",
        "throughput by that without loss",
        "micro-benchmark",
        linear_to={"x": 1e-1},
        ticks={0: "0", 1e-1: "0.1", 1: "1"},
        least_y=0,
        most_y=1.1,
    )
    return Picture([panel])


EXPERIMENT = Simulated(
    "loss",
    "One worker loses packets (Figure 10)",
    scenario,
    # Nothing is random without loss, and settings differ by more than seeds do.
    [
        Cases({"work": "micro", "system": SYSTEMS, "loss": WORST}, WINDOWS, seeds_swept=1),
        Cases({"work": "micro", "system": SYSTEMS, "loss": 0.0}, WINDOWS, seeds=1),
        Cases({"work": "micro", "system": SYSTEMS, "loss": LOSSES}, seeds=1),
        Cases(
            {"work": "vgg16", "system": SYSTEMS, "loss": WORST},
            WINDOWS,
            seeds_swept=1,
            in_quick=False,
        ),
        Cases({"work": "vgg16", "system": SYSTEMS, "loss": 0.0}, WINDOWS, seeds=1, in_quick=False),
        Cases({"work": "vgg16", "system": "atp", "loss": LITTLE}, seeds=1, in_quick=False),
    ],
    [
        Row(
            "abstract, Fig. 10",
            "micro-benchmark at 1 % loss, normalised, ATP by SwitchML (the loss that has 34 % is "
            "not said)",
            PAPER_GAIN,
            computed(gain, "micro"),
            "x",
        ),
        Row(
            "Fig. 10",
            "VGG16 at 1 % loss, normalised, ATP by SwitchML",
            "more than 1",
            computed(gain, "vgg16"),
            "x",
            MORE,
        ),
        Row(
            "§3.8",
            "VGG16 on ATP at 0.01 % loss, normalised (no deterioration below 0.1 %)",
            1.0,
            computed(normalised, "vgg16", "atp", LITTLE),
            cannot_fail="VGG16 computes for longer than it sends: few losses hide behind that",
            usual_only=True,
        ),
    ],
    picture,
    usual={"lossy_ms": LOSSY_MS, "lossless_ms": LOSSLESS_MS},
    over=OVER,
).experiment()
