"""§5.2.3, Figure 10: throughput while one worker loses packets, beside SwitchML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import MORE, Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Lab, Report, Runs, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = [0.0, 1e-5, 1e-4, 1e-3, 1e-2]
LOSSES_QUICK = [0.0, 1e-3, 1e-2]
WORST = 1e-2
LITTLE = 1e-4
ELEMENTS = 256
"""The shortest packet that both have, so that a lost one is as much."""
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    # Without congestion control, as in the paper: an adversary's losses tell of no congestion.
    "atp": ("ATP", {"window": 1024, "congestion_control": False}),
    # Its paper's way to notice a loss.
    "switchml": ("SwitchML (timeouts of 1 ms)", {"timeouts_only": True}),
    "overtaken": ("SwitchML as fanin's workers do it", {}),
}
USUAL = (512, 8)
SWEPT = [USUAL, (128, 8), (512, 4)]
"""SwitchML's slots, and how many tensors of 1 MB are under way at once. SwitchML's paper has 128
slots at 10 and 512 at 100 Gbit/s; ATP's says neither: its tensors are of 4 MB."""
TENSORS = 24
"""What is timed."""
SCALE = 400.0
TIME_MS = 9.0
"""Of VGG16's training."""
PAPER_GAIN = 1.34
MICRO = "micro-benchmark at 1 % loss, normalised, ATP by SwitchML"
VGG = "VGG16 at 1 % loss, normalised, ATP by SwitchML"


def run(lab: Lab) -> Outcome:
    """Measure the micro-benchmark and VGG16 at every loss."""
    losses = LOSSES_QUICK if lab.quick else LOSSES
    swept = [USUAL] if lab.quick else SWEPT
    curves = lab.play(
        {
            _name("micro", system, loss): _scenario("micro", system, loss)
            for system in SYSTEMS
            for loss in losses
        },
        once=True,
        throughputs=False,
    )
    # Settings differ by more than seeds do.
    runs = lab.play(_at_worst(USUAL), throughputs=False)
    for pair in swept[1:]:
        runs = lab.play(_at_worst(pair), once=True, throughputs=False) | runs
    if not lab.quick:
        runs |= lab.play(
            {
                _name("vgg16", system, loss): _scenario("vgg16", system, loss)
                for system in ("atp", "switchml")
                for loss in (0.0, LITTLE, WORST)
            }
        )
    gain = Spread.over([_gain(runs, "micro", pair) for pair in swept])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        shown = [100 * loss for loss in losses]
        for at, (system, (name, _)) in enumerate(SYSTEMS.items()):
            points = [_normalised(curves, "micro", system, loss)[0] for loss in losses]
            axes.plot(shown, points, f"C{at}o-", label=name)
        for pair in swept:
            worst = Spread.of(_normalised(runs, "micro", "switchml", WORST, pair)).median
            slots, ahead = pair
            reached = PAPER_GAIN * worst
            label = f"paper: 1.34 times SwitchML with {slots} slots, {ahead} MB ahead"
            axes.plot(100 * WORST, reached, "*", markersize=10, label=label)
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_xticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
        axes.minorticks_off()
        axes.set_ylim(0, 1.3)
        x, y = "packets that one worker loses (%)", "throughput by that without loss"
        finish(axes, x, y, "micro-benchmark")

    over = "128 or 512 slots, 4 or 8 MB ahead" if len(swept) > 1 else ""
    findings = [
        Finding("abstract, Fig. 10", MICRO, PAPER_GAIN, gain, unit="x", swept=over),
    ]
    if not lab.quick:
        vgg = _gain(runs, "vgg16", None)
        findings += [
            Finding("Fig. 10", VGG, "more than 1", vgg, holds=MORE, unit="x"),
            Finding(
                "§3.8",
                "VGG16 on ATP at 0.01 % loss, normalised (no deterioration below 0.1 %)",
                1.0,
                Spread.of(_normalised(runs, "vgg16", "atp", LITTLE)),
                cannot_fail="VGG16 computes for longer than it sends: few losses hide behind that",
            ),
        ]
    curve = {
        system: [_normalised(curves, "micro", system, loss)[0] for loss in losses]
        for system in SYSTEMS
    }
    return Outcome(findings, draw, {"losses": losses, "normalised": curve})


def why(lab: Lab) -> Sequence[Reason]:
    """Let what a lost packet holds up cost less, or more."""
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "timeouts of 0.5 ms": {"switchml": {"timeout": "0.5ms"}},
        "SwitchML's workers noticing what is overtaken": {"switchml": {"timeouts_only": False}},
        "a window of 256 packets for ATP": {"atp": {"window": 256}},
        "packets of 64 elements for ATP": {"atp": {"elements": 64}},
    }
    reasons = []
    for number, (change, more) in enumerate(changes.items()):
        pair = (*USUAL, number)
        runs = lab.play(
            {
                _name("micro", system, loss, pair): _scenario(
                    "micro", system, loss, USUAL, **more.get(system, {})
                )
                for system in ("atp", "switchml")
                for loss in (0.0, WORST)
            },
            once=True,
            throughputs=False,
        )
        reasons.append(Reason(MICRO, change, _gain(runs, "micro", pair)))
    return reasons


def _at_worst(pair: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return {
        _name("micro", system, loss, pair): _scenario("micro", system, loss, pair)
        for system in ("atp", "switchml")
        for loss in (0.0, WORST)
    }


def _scenario(
    work: str, system: str, loss: float, pair: tuple[int, int] = USUAL, **more: Any
) -> dict[str, Any]:
    slots, ahead = pair
    name, keys = SYSTEMS[system]
    keys = {"elements": ELEMENTS, "timeout": "1ms", **keys}
    if system != "atp":
        keys["slots"] = slots
    if work == "micro":
        keys |= {"tensor": "1MB", "tensors": TENSORS, "in_flight": ahead}
    else:
        keys |= setting.work("vgg16", SCALE)
    time_ms = TIME_MS if work == "vgg16" else 500.0
    return {
        "title": f"Figure 10: {work}, {name}, loss {loss:.3%}",
        "until": setting.ms(time_ms),
        "warm_up": setting.ms(TIME_MS / 5 if work == "vgg16" else 0),
        "network": setting.rack(9),
        "switch": {"aggregators": 8192},
        "job": [setting.job("atp" if system == "atp" else "switchml", **keys | more)],
        "loss": [{"link": ["h0", "s0"], "from": "h0", "loss": loss}],
    }


def _name(work: str, system: str, loss: float, swept: Sequence[int] | None = None) -> str:
    if swept is not None and system == "atp":
        swept = swept[1:]  # it has no slots
    tag = "" if swept is None else "-" + "-".join(map(str, swept))
    return f"loss-{work}-{system}-{loss:g}{tag}"


def _normalised(
    runs: dict[str, Runs], work: str, system: str, loss: float, swept: Sequence[int] | None = None
) -> list[float]:
    figure: Callable[[Report], float] = _pace if work == "micro" else setting.images_per_s
    lossy, lossless = (runs[_name(work, system, at, swept)].samples(figure) for at in (loss, 0.0))
    return [one / other for one, other in zip(lossy, lossless, strict=True)]


def _pace(report: Report) -> float:
    return 1 / float(report["jobs"][0]["finished_s"])


def _gain(runs: dict[str, Runs], work: str, swept: Sequence[int] | None) -> Spread:
    ours, theirs = (_normalised(runs, work, s, WORST, swept) for s in ("atp", "switchml"))
    # Of a setting that was played once there is one of theirs, and of ours that of the same seed.
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=False)])


EXPERIMENT = Experiment("loss", "One worker loses packets (Figure 10)", run, why)
