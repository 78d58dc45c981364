"""§5.2.3, Figure 10: throughput while one worker loses packets, beside SwitchML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = [1e-3, 1e-2]
LOSSES_QUICK = [1e-2]
WORST = 1e-2
LITTLE = 1e-4
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    # Without congestion control, as in the paper: an adversary's losses tell of no congestion.
    "atp": ("ATP", {"system": "atp", "congestion_control": False}),
    # Its paper's way to notice a loss.
    "switchml": ("SwitchML (timeouts of 1 ms)", {"system": "switchml", "timeouts_only": True}),
}
HOSTS = {"atp": setting.HOSTS, "switchml": setting.HOSTS_OF_SWITCHML}
WINDOWS = [setting.WINDOW, setting.SLOTS * setting.ELEMENTS_OF_SWITCHML // setting.ELEMENTS]
"""Packets that an ATP worker has on the way: what fills a host, as elsewhere; or as many elements
as SwitchML's slots. The paper says of neither."""
OVER = "windows of ATP that fill a host, or have as many elements as SwitchML's slots"
WARM_UP_MS = 3.0
LOSSY_MS = 50.0
"""Fifty timeouts; without loss one iteration is as the next."""
LOSSLESS_MS = 16.0
MEASURED_MS_QUICK = 20.0, 8.0
"""With losses, and without any."""
SCALE = 200.0
PAPER_GAIN = 1.34
MICRO = (
    "micro-benchmark at 1 % loss, normalised, ATP by SwitchML (the loss that has 34 % is not said)"
)
VGG = "VGG16 at 1 % loss, normalised, ATP by SwitchML"


def run(lab: Lab) -> Outcome:
    """Measure the micro-benchmark and VGG16 with losses, and without any."""
    losses = LOSSES_QUICK if lab.quick else LOSSES
    works = ["micro"] if lab.quick else ["micro", "vgg16"]
    windows = WINDOWS[: 1 if lab.quick else None]
    usual = WINDOWS[0]

    def scenario(work: str, system: str, loss: float, window: int) -> dict[str, Any]:
        lossy_ms, lossless_ms = MEASURED_MS_QUICK if lab.quick else (LOSSY_MS, LOSSLESS_MS)
        return _scenario(work, system, loss, window, lossy_ms if loss else lossless_ms)

    lossy = {
        _name(work, system, WORST, usual): scenario(work, system, WORST, usual)
        for work in works
        for system in SYSTEMS
    }
    once = {
        _name(work, system, 0.0, window): scenario(work, system, 0.0, window)
        for work in works
        for system in SYSTEMS
        for window in (windows if system == "atp" else [usual])
    } | {
        _name("micro", system, loss, usual): scenario("micro", system, loss, usual)
        for system in SYSTEMS
        for loss in losses[:-1]
    }
    if not lab.quick:
        once[_name("vgg16", "atp", LITTLE, usual)] = scenario("vgg16", "atp", LITTLE, usual)
    for window in windows[1:]:
        for work in works:
            once[_name(work, "atp", WORST, window)] = scenario(work, "atp", WORST, window)
    # Nothing is random without loss, and settings differ by more than seeds do.
    runs = lab.play(lossy) | lab.play(once, once=True)

    def gain(work: str) -> Spread:
        return Spread.over([_gain(runs, work, window) for window in windows])

    shown = {
        system: [1.0, *(_normalised(runs, "micro", system, at, usual)[0] for at in losses)]
        for system in SYSTEMS
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        percent = [100 * loss for loss in (0.0, *losses)]
        for at, (system, (name, _)) in enumerate(SYSTEMS.items()):
            axes.plot(percent, shown[system], f"C{at}o-", label=name)
        reached = PAPER_GAIN * shown["switchml"][-1]
        label = "paper: at most 1.34 times SwitchML"
        axes.plot(100 * WORST, reached, "k*", markersize=10, label=label)
        axes.set_xscale("symlog", linthresh=1e-1)
        axes.set_xticks([0, 1e-1, 1], ["0", "0.1", "1"])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1)
        x, y = "packets that one worker loses (%)", "throughput by that without loss"
        finish(axes, x, y, "micro-benchmark")

    over = OVER if len(windows) > 1 else ""
    findings = [
        Finding("abstract, Fig. 10", MICRO, PAPER_GAIN, gain("micro"), unit="x", swept=over)
    ]
    if not lab.quick:
        little = Spread.of(_normalised(runs, "vgg16", "atp", LITTLE, usual))
        findings += [
            Finding("Fig. 10", VGG, "more than 1", gain("vgg16"), holds=MORE, unit="x", swept=over),
            Finding(
                "§3.8",
                "VGG16 on ATP at 0.01 % loss, normalised (no deterioration below 0.1 %)",
                1.0,
                little,
                cannot_fail="VGG16 computes for longer than it sends: few losses hide behind that",
            ),
        ]
    return Outcome(findings, draw, {"losses": [0.0, *losses], "normalised": shown})


def _scenario(
    work: str, system: str, loss: float, window: int, measured_ms: float
) -> dict[str, Any]:
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
        "until": setting.ms(WARM_UP_MS + measured_ms),
        "warm_up": setting.ms(WARM_UP_MS),
        # SwitchML cuts short tensors in another way than long ones.
        "payload": "sample" if system == "atp" else "full",
        "network": setting.rack(9, HOSTS[system]),
        "switch": setting.switch(8192),
        "job": [setting.job(**more)],
        "loss": [{"link": ["h0", "s0"], "from": "h0", "loss": loss}],
    }


def _name(work: str, system: str, loss: float, window: int) -> str:
    # Windows are ATP's alone.
    return f"loss-{work}-{system}-{loss:g}" + (f"-{window}" if system == "atp" else "")


def _normalised(
    runs: Mapping[str, Runs], work: str, system: str, loss: float, window: int
) -> list[float]:
    figure: Callable[[Report], float] = (
        setting.goodput_gbps if work == "micro" else setting.images_per_s
    )
    (lossless,) = runs[_name(work, system, 0.0, window)].samples(figure)
    return [one / lossless for one in runs[_name(work, system, loss, window)].samples(figure)]


def _gain(runs: Mapping[str, Runs], work: str, window: int) -> Spread:
    both: Sequence[list[float]] = [
        _normalised(runs, work, system, WORST, window) for system in SYSTEMS
    ]
    # Of a setting that was played once there is one of ATP's, and of SwitchML's that of its seed.
    return Spread.of([one / other for one, other in zip(*both, strict=False)])


EXPERIMENT = Experiment("loss", "One worker loses packets (Figure 10)", run)
