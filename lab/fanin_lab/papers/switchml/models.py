"""§2.2 and §3, Tables 1 and 2: batches of eight models, with a switch and with a ring.

Table 1 has what was recorded: how long a batch takes, the share of it that is communication, and
the share of that which computing hides. So it says how long is computed, and in which time
gradients come. They come evenly here, in buckets; the paper does not say how long these were.
"""

from __future__ import annotations

from dataclasses import dataclass

from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import PAPER, Bars, Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Change, Either, Row, Simulated, computed
from fanin_lab.papers.switchml import setting


@dataclass(frozen=True)
class Profile:
    """A line of Table 1: a model on P100s."""

    size_mb: float
    batch_s: dict[int, float]
    """By Gbit/s."""
    communicating: float
    """The share of a batch at 100 Gbit/s."""
    hidden: float
    """The share of that which overlaps with computing."""
    alpha: float
    """With GPUs so many times as fast, communication at 100 Gbit/s is contiguous."""
    speedups: dict[int, float]
    """Table 2's: in-network aggregation by a ring, by Gbit/s."""

    @property
    def computing_s(self) -> float:
        """The computing of a batch."""
        return self.batch_s[100] * (1 - self.communicating * (1 - self.hidden))

    @property
    def gradients_s(self) -> float:
        """The time in which gradients come, up to the end of computing.

        If GPUs are `alpha` times as fast, it is as long as what communication it hides.
        """
        hidden_s = self.batch_s[100] * self.communicating * self.hidden
        return min(self.alpha * hidden_s, self.computing_s)

    def layers(self, bucket_mb: float, compute: float = 1.0) -> list[dict[str, str]]:
        """Return a layer for each bucket, in the order of the forward pass."""
        count = min(LAYERS_MAX, max(1, round(self.size_mb / bucket_mb)))
        between_s = self.gradients_s / count / compute
        before_s = (self.computing_s - self.gradients_s) / compute
        layer = {
            "bytes": f"{self.size_mb * 1e6 / count:.0f}B",
            "backward": f"{between_s * 1e9:.0f}ns",
        }
        last = {**layer, "forward": f"{before_s * 1e9:.0f}ns"}
        return [layer] * (count - 1) + [last]


PROFILES = {
    "DeepLight": Profile(2319, {10: 2.101, 100: 0.258}, 0.79, 0.20, 1.0, {10: 1.80, 100: 1.67}),
    "LSTM": Profile(1627, {10: 1.534, 100: 0.312}, 0.46, 0.56, 1.5, {10: 1.77, 100: 1.20}),
    "BERT": Profile(1274, {10: 1.677, 100: 0.668}, 0.17, 0.35, 3.5, {10: 1.54, 100: 1.14}),
    "VGG19": Profile(548, {10: 0.661, 100: 0.499}, 0.10, 0.99, 6.7, {10: 1.60}),
    "UGATIT": Profile(511, {10: 1.612, 100: 1.212}, 0.04, 0.99, 17.6, {10: 1.22}),
    "NCF": Profile(121, {10: 0.149, 100: 0.046}, 0.23, 0.27, 1.2, {10: 1.54, 100: 1.22}),
    "SSD": Profile(98, {10: 0.293, 100: 0.293}, 0.03, 0.99, 15.2, {10: 1.01}),
    "ResNet-50": Profile(87, {10: 0.299, 100: 0.270}, 0.03, 0.94, 19.8, {10: 1.05}),
}
BOUND = [name for name, profile in PROFILES.items() if 100 in profile.speedups]
"""Bound by the network at 100 Gbit/s, too."""
CASES = [(model, gbps) for model, profile in PROFILES.items() for gbps in profile.speedups]
LAYERS_MAX = 16
"""More buckets of a long model show nothing more: most of them wait for the link."""
BUCKETS_MB = [25, 64]
"""The defaults of PyTorch's DDP and of Horovod."""
WORKERS = 8
SIZE_MB = Either(16.0, quick=4.0)
"""The size of a scaled model."""
SHOWN = {"DeepLight": "Deep-\nLight", "ResNet-50": "Res-\nNet-50"}
"""Names on the picture's axis."""
DELAY = "100ns"
"""The delay of a link: the paper emulates communication at line rate."""
ITERATIONS = 4
SYSTEMS = ["switchml", "ring"]


def scenario(
    of: tuple[str, int], system: str, size_mb: float, bucket_mb: float = BUCKETS_MB[0]
) -> Scenario:
    """Return the training of a model at a rate."""
    model, gbps = of
    profile = PROFILES[model]
    scale = profile.size_mb / size_mb
    job = setting.job(
        system,
        WORKERS,
        gbps,
        layers=profile.layers(bucket_mb),
        scale=scale,
        iterations=ITERATIONS,
        jitter="2%",
    )
    return {
        "title": f"Table 2: {model} at {gbps} Gbit/s, {system}",
        "until": setting.ms(1000 * 4 * ITERATIONS * profile.batch_s[10] / scale),
        "payload": "sample",
        "network": {**setting.rack(WORKERS, gbps), "delay": DELAY},
        "job": [job],
    }


def batch_s(report: Report) -> float:
    """Return how long a batch takes, of the whole model."""
    job = report["jobs"][0]
    done = job["training"]
    return float(job["finished_s"] / done["iterations"] * done["scale"])


def speedup(at: At, of: tuple[str, int]) -> list[float]:
    """Return how many times as fast as with a ring a batch is."""
    return at.by(batch_s, {"of": of, "system": "ring"}, {"of": of, "system": "switchml"})


def batch_ms(at: At, model: str) -> list[float]:
    """Return how long a batch takes at 10 Gbit/s."""
    return [1e3 * time for time in at.samples(batch_s, of=(model, 10), system="switchml")]


def picture(at: At) -> Picture:
    """Show ours as bars, and Table 2's."""
    names = [f"{SHOWN.get(model, model)}\n{gbps}" for model, gbps in CASES]
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
        [
            Panel(
                [Bars(names, ours, look={"color": "C0"}), *papers],
                "model, Gbit/s",
                "a ring's time by SwitchML's",
            )
        ]
    )


ROWS = [
    *(
        Row(
            "Table 1",
            f"{model}: a batch at 10 Gbit/s, from the profile at 100 Gbit/s",
            1e3 * profile.batch_s[10],
            computed(batch_ms, model),
            "ms",
        )
        for model, profile in PROFILES.items()
    ),
    *(
        Row(
            "Table 2",
            f"{model} at {gbps} Gbit/s: a batch with SwitchML, times as fast as with a ring",
            PROFILES[model].speedups[gbps],
            computed(speedup, (model, gbps)),
            "x",
        )
        for model, gbps in CASES
    ),
]
EXPERIMENT = Simulated(
    "models",
    "A batch of eight models, SwitchML by a ring (Tables 1 and 2)",
    scenario,
    [
        Cases(
            {"of": CASES, "system": SYSTEMS},
            settings=[{}, *({"bucket_mb": mb} for mb in BUCKETS_MB[1:])],
            seeds=3,
            throughputs=False,
        )
    ],
    ROWS,
    picture,
    usual={"size_mb": SIZE_MB},
    changes=[
        Change(
            "UGATIT's gradients in two buckets: 511 MB are the light model's, of which "
            "discriminators are 84 %, and these have a step of their own",
            {"bucket_mb": 256},
            where={"of": [("UGATIT", 10)]},
            of=[row for row in ROWS if "UGATIT" in row.what],
            cases=[Cases({"of": [("UGATIT", 10)], "system": SYSTEMS}, throughputs=False)],
        )
    ],
    over=f"buckets of {' or '.join(map(str, BUCKETS_MB))} MB",
).experiment()
