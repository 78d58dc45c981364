"""§3, Table 2: batches of eight models with compressed gradients, by a ring without compression.

As in the paper, workers hand their compressed gradients to all others (all-gather), and compressing
is a part of the time of communication. The simulator plays both as a ring that takes as long: an
all-gather of m bytes from each of n workers takes a link (n - 1) m, and a ring's sum of S bytes
2 (n - 1) / n S. Top-k's messages are as long as those of the product's compressor, an index and a
value for each element; QSGD's have the paper's bits. The paper took from a survey how long GPUs
compress, and does not say it. So one number of each method, the time for a byte, is fitted to
DeepLight at 10 Gbit/s, and not counted there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fanin_lab.papers.lab import Scenario, Spread
from fanin_lab.papers.plot import PAPER, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Row, Simulated, computed
from fanin_lab.papers.switchml import models
from fanin_lab.papers.switchml.models import CASES, PROFILES, SIZE_MIB, WORKERS, batch_s

FITTED = ("DeepLight", 10)
BITS = 32
"""Of a gradient's element."""


@dataclass(frozen=True)
class Method:
    """A way to compress, and how many times as fast as a ring it makes a batch (Table 2)."""

    ratio: float
    """The length of a message by that of the gradient."""
    speedups: tuple[float, ...]
    """By model and rate, in the order of `CASES`."""

    @property
    def seconds_a_byte(self) -> float:
        """How long a byte of the gradient is compressed, and others' bytes are decompressed."""
        model, gbps = FITTED
        profile = PROFILES[model]
        line_s = profile.line_s(gbps)
        ring_s = profile.visible_s(2 * (WORKERS - 1) / WORKERS * line_s) + profile.computing_s
        visible_s = ring_s / self.speedups[CASES.index(FITTED)] - profile.computing_s
        # What is hidden of this much is what is hidden of any more.
        hidden_s = line_s - profile.visible_s(line_s)
        cost_s = visible_s + hidden_s - (WORKERS - 1) * self.ratio * line_s
        return max(cost_s, 0.0) / (profile.size_mib * 2**20)

    def ring_bytes(self, of: tuple[str, int], timed: bool) -> float:
        """Return how many bytes a ring sums while a byte is compressed and gathered."""
        model, gbps = of
        compressing_s = self.seconds_a_byte * PROFILES[model].size_mib * 2**20
        compressing = compressing_s / models.profile_of(model, timed).line_s(gbps)
        return (compressing + (WORKERS - 1) * self.ratio) * WORKERS / (2 * (WORKERS - 1))


METHODS = {
    "QSGD, 6 bits": Method(
        6 / BITS, (1.27, 0.93, 1.27, 0.98, 1.20, 0.98, 1.22, 1.12, 1.22, 1.00, 1.00, 1.07)
    ),
    "QSGD, 8 bits": Method(
        8 / BITS, (0.97, 0.78, 0.97, 0.84, 0.98, 0.92, 0.97, 0.99, 0.96, 0.85, 1.00, 0.95)
    ),
    "Top-k, 1 %": Method(
        2 * 0.01, (9.24, 2.96, 7.49, 1.37, 3.45, 1.27, 2.13, 1.58, 4.07, 1.22, 1.01, 1.15)
    ),
    "Top-k, 10 %": Method(
        2 * 0.1, (1.05, 0.47, 1.05, 0.54, 1.04, 0.74, 1.04, 1.02, 1.05, 0.65, 1.00, 1.02)
    ),
}
NONE = "none"


def scenario(
    of: tuple[str, int],
    method: str,
    size_mib: float,
    gathered: bool = False,
    timed: bool = False,
) -> Scenario:
    """Return the training of a model at a rate, with gradients that are compressed, or are not."""
    found = models.scenario(of, "ring", size_mib, gathered, timed)
    if method == NONE:
        return found
    longer = METHODS[method].ring_bytes(of, timed)
    (job,) = found["job"]
    job["layers"] = [
        {**layer, "bytes": f"{longer * float(layer['bytes'].removesuffix('B')):.0f}B"}
        for layer in job["layers"]
    ]
    return {**found, "title": f"Table 2: {of[0]} at {of[1]} Gbit/s, {method}"}


def speedup(at: At, of: tuple[str, int], method: str) -> list[float]:
    """Return how many times as fast as with a ring a batch is."""
    return at.by(batch_s, {"of": of, "method": NONE}, {"of": of, "method": method})


def picture(at: At) -> Picture:
    """Show each case's speedup by Table 2's: where both are the same, it is on the line."""
    ends = [0.4, 12.0]
    marks: list[Mark] = [Line(ends, ends, label="the same", look=PAPER)]
    for number, (name, method) in enumerate(METHODS.items()):
        ours = [Spread.of(speedup(at, of, name)).median for of in CASES]
        look = {"color": f"C{number}", "marker": "o", "linestyle": "none"}
        marks.append(Line(method.speedups, ours, label=name, look=look))
    what = "a ring's time by that with compressed gradients"
    return Picture([Panel(marks, f"Table 2: {what}", "here", log_x=10, log_y=10)])


ROWS = [
    Row(
        "Table 2",
        f"{model} at {gbps} Gbit/s: a batch with {name}, times as fast as with a ring",
        paper,
        computed(speedup, (model, gbps), name),
        "x",
        cannot_fail="fitted: how long a byte is compressed" if (model, gbps) == FITTED else "",
    )
    for name, method in METHODS.items()
    for (model, gbps), paper in zip(CASES, method.speedups, strict=True)
]

EXPERIMENT = Simulated(
    "compressed",
    "A batch of eight models with compressed gradients, by a ring (Table 2)",
    scenario,
    [
        Cases(
            {"of": CASES, "method": [NONE, *METHODS]},
            settings=models.READINGS,
            seeds=1,
            throughputs=False,
        )
    ],
    ROWS,
    picture,
    usual={"size_mib": SIZE_MIB},
    over=models.OVER,
).experiment()
