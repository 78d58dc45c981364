"""§3, Table 2: a batch with in-network aggregation, by one with a ring."""

from __future__ import annotations

from dataclasses import dataclass

from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import PAPER, Bars, Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Change, Either, Row, Simulated, computed
from fanin_lab.papers.switchml import setting


@dataclass(frozen=True)
class Profile:
    """A line of Table 1: what is not communication, or hidden by it, is computing."""

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


PROFILES = {
    "vgg19": Profile(64, 0.499 * (1 - 0.10 * 0.01), 19.63e9, {10: 1.60}),
    "resnet50": Profile(64, 0.270 * (1 - 0.03 * 0.06), 4.09e9, {10: 1.05}),
    # Of sequences of 128 tokens, as the simulator's; the time is what counts.
    "bert-large": Profile(4, 0.668 * (1 - 0.17 * 0.65), 39.5e9, {10: 1.54, 100: 1.14}),
}
CASES = [(model, gbps) for model, profile in PROFILES.items() for gbps in profile.speedups]
SHORT = ("resnet50", 10)
"""Of which a batch has the least to communicate."""
WORKERS = 8
SCALE = Either(100.0, quick=400.0)
ITERATIONS = 6
SYSTEMS = ["switchml", "ring"]


def scenario(of: tuple[str, int], system: str, scale: float) -> Scenario:
    """Return the training of a model at a rate."""
    model, gbps = of
    profile = PROFILES[model]
    job = setting.job(
        system,
        WORKERS,
        gbps,
        model=model,
        batch=profile.batch,
        flops=profile.flops,
        scale=scale,
        iterations=ITERATIONS,
        jitter="2%",
    )
    return {
        "title": f"Table 2: {model} at {gbps} Gbit/s, {system}",
        "until": setting.ms(1000 * 4 * ITERATIONS / scale),
        "network": setting.rack(WORKERS, gbps),
        "job": [job],
    }


def _finished_s(report: Report) -> float:
    return float(report["jobs"][0]["finished_s"])


def speedup(at: At, of: tuple[str, int]) -> list[float]:
    """Return how many times as fast as with a ring a batch is."""
    return at.by(_finished_s, {"of": of, "system": "ring"}, {"of": of, "system": "switchml"})


def picture(at: At) -> Picture:
    """Show ours as bars, and Table 2's."""
    names = [f"{model}\n{gbps} Gbit/s" for model, gbps in CASES]
    ours = [Spread.of(speedup(at, of)).median for of in CASES]
    papers = [
        Line(
            [place - 0.4, place + 0.4],
            [PROFILES[model].speedups[gbps]] * 2,
            label=None if place else "paper (Table 2)",
            look=PAPER,
        )
        for place, (model, gbps) in enumerate(CASES)
    ]
    return Picture(
        [Panel([Bars(names, ours, look={"color": "C0"}), *papers], "", "SwitchML by ring")]
    )


ROWS = {
    (model, gbps): Row(
        "Table 2",
        f"{model} at {gbps} Gbit/s: a batch with SwitchML, times as fast as with a ring",
        PROFILES[model].speedups[gbps],
        computed(speedup, (model, gbps)),
        "x",
    )
    for model, gbps in CASES
}
EXPERIMENT = Simulated(
    "models",
    "A batch, SwitchML by a ring (Table 2)",
    scenario,
    [Cases({"of": CASES, "system": SYSTEMS}, throughputs=False)],
    list(ROWS.values()),
    picture,
    usual={"scale": SCALE},
    changes=[
        # The ring's steps, and the round trips between them, are then of less weight.
        Change(
            "parameters and times divided by a quarter of the scale",
            {"scale": Either(SCALE.full / 4, quick=SCALE.quick / 4)},
            of=[ROWS[SHORT]],
            cases=[Cases({"of": [SHORT], "system": SYSTEMS}, throughputs=False)],
        )
    ],
).experiment()
