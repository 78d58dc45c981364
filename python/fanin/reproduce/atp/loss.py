"""§5.2.3, Figure 10: throughput while one worker loses packets, beside SwitchML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome
from fanin.reproduce.lab import Lab, Report, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = [0.0, 1e-5, 1e-4, 1e-3, 1e-2]
LOSSES_QUICK = [0.0, 1e-3, 1e-2]
ELEMENTS = 256
"""The shortest packet that both have, so that a lost one is as much."""
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    # Without congestion control, as in the paper: an adversary's losses tell of no congestion.
    "atp": ("ATP", {"system": "atp", "window": 1024, "congestion_control": False}),
    # As much memory of the switch: a slot takes two aggregators. Its own way to notice a loss.
    "switchml": (
        "SwitchML (timeouts of 1 ms)",
        {"system": "switchml", "window": 512, "timeouts_only": True},
    ),
    "overtaken": (
        "SwitchML as fanin's workers do it",
        {"system": "switchml", "window": 512},
    ),
}
SCALE = 100.0
PAPER_GAIN = 1.34


def run(lab: Lab) -> Outcome:
    """Measure the micro-benchmark and VGG16 at every loss."""
    losses = LOSSES_QUICK if lab.quick else LOSSES
    time_ms = 8.0 if lab.quick else 12.0
    works = {"micro": {"tensor": "1MB", "in_flight": 8}}
    if not lab.quick:
        works["vgg16"] = {
            "model": "vgg16",
            "batch": setting.BATCH,
            "flops": setting.FLOPS,
            "scale": SCALE,
        }
    runs = lab.play(
        {
            _name(work, system, loss): {
                "title": f"Figure 10: {work}, {SYSTEMS[system][0]}, loss {loss:.3%}",
                "until": setting.ms(time_ms * (1.5 if work == "vgg16" else 1)),
                "warm_up": setting.ms(time_ms / 5),
                "network": setting.rack(9),
                "switch": {"aggregators": 8192},
                "job": [{"workers": 8, "elements": ELEMENTS, "timeout": "1ms", **more, **keys}],
                "loss": [{"link": ["h0", "s0"], "from": "h0", "loss": loss}],
            }
            for work, keys in works.items()
            for system, (_, more) in SYSTEMS.items()
            if _is_of(work, system)
            for loss in losses
        }
    )
    normalised: dict[str, dict[str, list[list[float]]]] = {}
    for work in works:
        figure = setting.goodput_gbps if work == "micro" else setting.images_per_s
        normalised[work] = {
            system: [_normalised(runs, work, system, loss, figure) for loss in losses]
            for system in SYSTEMS
            if _is_of(work, system)
        }

    def gain(work: str) -> Spread:
        of_work = normalised[work]
        pairs = zip(of_work["atp"][-1], of_work["switchml"][-1], strict=True)
        return Spread.of([atp / switchml for atp, switchml in pairs])

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, len(works), squeeze=False)[0]
        titles = {"micro": "micro-benchmark", "vgg16": f"VGG16, scale {SCALE:g}"}
        for axes, work in zip(many, works, strict=True):
            for at, (system, (name, _)) in enumerate(SYSTEMS.items()):
                if not _is_of(work, system):
                    continue
                spreads = [Spread.of(samples) for samples in normalised[work][system]]
                shown = [100 * loss for loss in losses]
                axes.plot(shown, [s.median for s in spreads], f"C{at}o-", label=name)
                axes.fill_between(
                    shown,
                    [s.least for s in spreads],
                    [s.most for s in spreads],
                    color=f"C{at}",
                    alpha=0.15,
                    linewidth=0,
                )
            if work == "micro":
                reached = PAPER_GAIN * Spread.of(normalised[work]["switchml"][-1]).median
                axes.plot(
                    100 * losses[-1],
                    reached,
                    "k*",
                    markersize=12,
                    label="paper: 1.34 times SwitchML",
                )
            axes.set_xscale("symlog", linthresh=1e-3)
            axes.set_xticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
            axes.minorticks_off()
            axes.set_ylim(0, 1.1)
            finish(
                axes,
                "packets that one worker loses (%)",
                "throughput by that without loss",
                titles[work],
            )

    findings = [
        Finding(
            "abstract, Fig. 10",
            "micro-benchmark at 1 % loss, normalised, ATP by SwitchML",
            PAPER_GAIN,
            gain("micro"),
            unit="x",
            why=WHY_MICRO,
        )
    ]
    if "vgg16" in works:
        findings.append(
            Finding(
                "Fig. 10",
                "VGG16 at 1 % loss, normalised, ATP by SwitchML",
                "more than 1",
                gain("vgg16"),
                holds=gain("vgg16").median > 1,
                unit="x",
                why=WHY_VGG,
            )
        )
        below = Spread.of(normalised["vgg16"]["atp"][losses.index(1e-4)])
        findings.append(
            Finding(
                "§3.8",
                "VGG16 on ATP at 0.01 % loss, normalised (none is lost below 0.1 %)",
                1.0,
                below,
            )
        )
    return Outcome(findings, draw, {"losses": losses, "normalised": normalised})


def _normalised(runs: Any, work: str, system: str, loss: float, figure: Any) -> list[float]:
    def of(loss: float) -> list[Report]:
        return list(runs[_name(work, system, loss)].reports)

    return [
        figure(report) / figure(without) for report, without in zip(of(loss), of(0.0), strict=True)
    ]


def _is_of(work: str, system: str) -> bool:
    return work == "micro" or system != "overtaken"


def _name(work: str, system: str, loss: float) -> str:
    return f"loss-{work}-{system}-{loss:g}"


WHY_MICRO = (
    "how many slots go on while others wait for their timeouts depends on how many there are, "
    "which the paper does not give: SwitchML keeps 0.35 of its throughput with 128, and "
    "about a half with 512"
)
WHY_VGG = WHY_MICRO

EXPERIMENT = Experiment("loss", "One worker loses packets (Figure 10)", run)
