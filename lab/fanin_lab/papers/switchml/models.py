"""§3, Table 2: a batch with in-network aggregation, by one with a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason
from fanin_lab.papers.lab import Lab, Runs, Spread
from fanin_lab.papers.plot import PAPER, finish
from fanin_lab.papers.switchml import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Profile:
    """A line of Table 1: what is not communication, or hidden by it, is computing."""

    model: str
    batch: int
    computing_s: float
    """The time of a batch at 100 Gbit/s less the part of communicating that nothing hides."""
    multiply_adds: float
    """Of a sample."""
    speedups: dict[int, float]
    """Table 2's, by Gbit/s."""

    @property
    def flops(self) -> float:
        """Operations a second with which a batch takes that long: six times each multiply-add."""
        return 6 * self.batch * self.multiply_adds / self.computing_s


PROFILES = [
    Profile("vgg19", 64, 0.499 * (1 - 0.10 * 0.01), 19.63e9, {10: 1.60}),
    Profile("resnet50", 64, 0.270 * (1 - 0.03 * 0.06), 4.09e9, {10: 1.05}),
    # Of sequences of 128 tokens, as the simulator's; the time is what counts.
    Profile("bert-large", 4, 0.668 * (1 - 0.17 * 0.65), 39.5e9, {10: 1.54, 100: 1.14}),
]
SHORT = PROFILES[1], 10
"""Of which a batch has the least to communicate."""
WORKERS = 8
SCALE, SCALE_QUICK = 100.0, 400.0
WHAT = "{} at {} Gbit/s: a batch with SwitchML, times as fast as with a ring"


def run(lab: Lab) -> Outcome:
    """Train each model on both, at both rates."""
    scale = SCALE_QUICK if lab.quick else SCALE
    cases = [(profile, gbps) for profile in PROFILES for gbps in profile.speedups]
    runs = lab.play(
        {
            _name(profile, gbps, system): _scenario(profile, gbps, system, scale)
            for profile, gbps in cases
            for system in ("switchml", "ring")
        },
        throughputs=False,
    )
    found = {(p.model, gbps): _speedup(runs, p, gbps) for p, gbps in cases}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        labels = [f"{p.model}\n{gbps} Gbit/s" for p, gbps in cases]
        axes.bar(labels, [spread.median for spread in found.values()], color="C0")
        for at, (profile, gbps) in enumerate(cases):
            printed = profile.speedups[gbps]
            label = None if at else "paper (Table 2)"
            axes.plot([at - 0.4, at + 0.4], [printed, printed], **PAPER, label=label)
        finish(axes, "", "SwitchML by ring")

    return Outcome(
        [
            Finding(
                "Table 2",
                WHAT.format(profile.model, gbps),
                profile.speedups[gbps],
                found[profile.model, gbps],
                unit="x",
            )
            for profile, gbps in cases
        ],
        draw,
        {"speedups": {f"{model} at {gbps}": s.median for (model, gbps), s in found.items()}},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let the ring's steps, and the round trips between them, be of less weight."""
    change = "parameters and times divided by a quarter of the scale"
    scale = (SCALE_QUICK if lab.quick else SCALE) / 4
    profile, gbps = SHORT
    runs = lab.play(
        {
            f"{_name(profile, gbps, system)}-why": _scenario(profile, gbps, system, scale)
            for system in ("switchml", "ring")
        },
        throughputs=False,
    )
    found = _speedup(runs, profile, gbps, "-why")
    return [Reason(WHAT.format(profile.model, gbps), change, found)]


def _scenario(profile: Profile, gbps: int, system: str, scale: float) -> dict[str, Any]:
    iterations = 6
    return {
        "title": f"Table 2: {profile.model} at {gbps} Gbit/s, {system}",
        "until": setting.ms(1000 * 4 * iterations / scale),
        "network": setting.rack(WORKERS, gbps),
        "job": [
            setting.job(
                system,
                WORKERS,
                gbps,
                model=profile.model,
                batch=profile.batch,
                flops=profile.flops,
                scale=scale,
                iterations=iterations,
                jitter="2%",
            )
        ],
    }


def _name(profile: Profile, gbps: int, system: str) -> str:
    return f"models-{profile.model}-{gbps}-{system}"


def _speedup(runs: dict[str, Runs], profile: Profile, gbps: int, tag: str = "") -> Spread:
    ours, theirs = (
        runs[_name(profile, gbps, system) + tag].samples(
            lambda report: float(report["jobs"][0]["finished_s"])
        )
        for system in ("switchml", "ring")
    )
    return Spread.of([ring / switchml for switchml, ring in zip(ours, theirs, strict=True)])


EXPERIMENT = Experiment("models", "A batch, SwitchML by a ring (Table 2)", run, why)
