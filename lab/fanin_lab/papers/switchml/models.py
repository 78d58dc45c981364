"""§2.2 and §3, Tables 1 and 2: batches of eight models, with a switch and with a ring.

Table 1 has what was recorded: how long a batch takes, the share of it that is communication, and
the share of that which computing hides. It also says by how much faster GPUs would make the
communication contiguous. So it says how long is computed, and when gradients come: the hidden share
evenly over some time, and the rest at the end of computing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import PAPER, Bars, Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, computed
from fanin_lab.papers.switchml import setting


@dataclass(frozen=True)
class Profile:
    """A line of Table 1: a model on P100s."""

    size_mib: float
    batch_s: dict[int, float]
    """By Gbit/s, as all that follows."""
    communicating: dict[int, float]
    """The share of a batch."""
    hidden: dict[int, float]
    """The share of that which overlaps with computing."""
    alpha: float
    """With GPUs so many times as fast, communication at 100 Gbit/s is contiguous."""
    speedups: dict[int, float]
    """Table 2's: in-network aggregation by a ring."""

    def communicating_s(self, gbps: int, hidden: bool) -> float:
        """Return the communication of a batch that computing hides, or that it does not."""
        share = self.hidden[gbps] if hidden else 1 - self.hidden[gbps]
        return self.batch_s[gbps] * self.communicating[gbps] * share

    @property
    def computing_s(self) -> float:
        """The computing of a batch."""
        return self.batch_s[100] - self.communicating_s(100, hidden=False)

    def layers(self, loading_s: float = 0.0, gathered: bool = False) -> list[dict[str, str]]:
        """Return layers whose gradients come as Table 1 says, in the order of the forward pass.

        Data is loaded before it. `gathered`: the column of 10 Gbit/s is kept, too. Some gradients
        come at once then, as late as 100 Gbit/s can still hide them.
        """
        # With faster GPUs this time is as short as the communication that it hides.
        hiding_s = self.alpha * self.communicating_s(100, hidden=True)
        last = 1 - self.hidden[100]
        before_s = self.computing_s - hiding_s + loading_s
        at_once, count = (self.at_once, FINE_PIECES) if gathered else (0.0, PIECES)
        behind_s = min(hiding_s, at_once * self.line_s(100))
        each_s = (hiding_s - behind_s) / count
        if at_once:
            rest = [*self._parts(last, behind_s), *self._parts(at_once, each_s)]
        else:
            rest = self._parts(last, each_s)
        pieces = [self._part((1 - last - at_once) / count, each_s)] * count
        # The first gradient comes at once after the forward pass.
        return [*rest, *pieces[:-1], {**pieces[-1], "forward": _ns(before_s), "backward": _ns(0)}]

    def timed(self) -> Profile:
        """Return it with a size that takes as long as Table 1's communication at 10 Gbit/s.

        By it SSD has 86 MiB in place of 98, and ResNet-50 has 98 in place of 87, as if the table
        had swapped them. For the six others both agree to 1 %.
        """
        seconds = self.batch_s[10] * self.communicating[10]
        return replace(self, size_mib=self.size_mib * seconds / (HEADERS * self.line_s(10)))

    @property
    def at_once(self) -> float:
        """The share of the gradients that keeps the rest of 10 Gbit/s' communication visible.

        The time of a batch at 10 Gbit/s beyond its computing is taken for visible. For UGATIT this
        is 400 ms, and the column of overlap says 72 ms; for all other models both agree.
        """
        visible_s = self.batch_s[10] - self.computing_s
        last = 1 - self.hidden[100]
        at_once = (visible_s - last * self.line_s(10)) / (self.line_s(10) - self.line_s(100))
        # A few come evenly in any case.
        return min(max(at_once, 0.0), 0.99 * (1 - last))

    def visible_s(self, communicating_s: float) -> float:
        """Return how much of so long a communication computing does not hide.

        The share that is hidden at 100 Gbit/s comes evenly, and the rest behind all computing.
        """
        hiding_s = self.alpha * self.communicating_s(100, hidden=True)
        return max((1 - self.hidden[100]) * communicating_s, communicating_s - hiding_s)

    def line_s(self, gbps: int) -> float:
        """Return how long a link carries all gradients."""
        return self.size_mib * 2**20 * 8 / (gbps * 1e9)

    def _part(self, share: float, backward_s: float) -> dict[str, str]:
        return {"bytes": f"{share * self.size_mib * 2**20:.0f}B", "backward": _ns(backward_s)}

    def _parts(self, share: float, backward_s: float) -> list[dict[str, str]]:
        """Return layers of at most `LAYER_BYTES`, whose gradients come at once."""
        count = math.ceil(share * self.size_mib * 2**20 / LAYER_BYTES)
        if not count:
            return []
        parts = [self._part(share / count, 0.0)] * count
        return [*parts[:-1], {**parts[-1], "backward": _ns(backward_s)}]


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.0f}ns"


PROFILES = {
    "DeepLight": Profile(
        *(2319, {10: 2.101, 100: 0.258}, {10: 0.97, 100: 0.79}, {10: 0.02, 100: 0.20}),
        *(1.0, {10: 1.80, 100: 1.67}),
    ),
    "LSTM": Profile(
        *(1627, {10: 1.534, 100: 0.312}, {10: 0.94, 100: 0.46}, {10: 0.10, 100: 0.56}),
        *(1.5, {10: 1.77, 100: 1.20}),
    ),
    "BERT": Profile(
        *(1274, {10: 1.677, 100: 0.668}, {10: 0.67, 100: 0.17}, {10: 0.03, 100: 0.35}),
        *(3.5, {10: 1.54, 100: 1.14}),
    ),
    "VGG19": Profile(
        *(548, {10: 0.661, 100: 0.499}, {10: 0.73, 100: 0.10}, {10: 0.67, 100: 0.99}),
        *(6.7, {10: 1.60}),
    ),
    "UGATIT": Profile(
        *(511, {10: 1.612, 100: 1.212}, {10: 0.28, 100: 0.04}, {10: 0.84, 100: 0.99}),
        *(17.6, {10: 1.22}),
    ),
    "NCF": Profile(
        *(121, {10: 0.149, 100: 0.046}, {10: 0.72, 100: 0.23}, {10: 0.04, 100: 0.27}),
        *(1.2, {10: 1.54, 100: 1.22}),
    ),
    "SSD": Profile(
        *(98, {10: 0.293, 100: 0.293}, {10: 0.26, 100: 0.03}, {10: 0.99, 100: 0.99}),
        *(15.2, {10: 1.01}),
    ),
    "ResNet-50": Profile(
        *(87, {10: 0.299, 100: 0.270}, {10: 0.29, 100: 0.03}, {10: 0.67, 100: 0.94}),
        *(19.8, {10: 1.05}),
    ),
}
BOUND = [name for name, profile in PROFILES.items() if 100 in profile.speedups]
"""Bound by the network at 100 Gbit/s, too."""
HEADERS = 1538 / 1460
"""TCP's and Ethernet's, by what a packet carries."""
CASES = [(model, gbps) for model, profile in PROFILES.items() for gbps in profile.speedups]
LAYER_BYTES = 2**28
PIECES = 8
"""Of the gradients that come evenly."""
FINE_PIECES = 32
"""The same, where others come at once."""
WORKERS = 8
ELEMENTS, MTU = 2048, 9000
"""Of a packet: the longest, since the paper emulates line rate and no packets."""
SIZE_MIB = Either(16.0, quick=4.0)
"""The size of a scaled model."""
SHOWN = {"DeepLight": "Deep-\nLight", "ResNet-50": "Res-\nNet-50"}
"""Names on the picture's axis."""
DELAY = "100ns"
"""The delay of a link: the paper emulates communication at line rate."""
ITERATIONS = 4
SYSTEMS = ["switchml", "ring"]


def profile_of(model: str, timed: bool) -> Profile:
    """Return a model's profile, by its size or by the time of its communication."""
    return PROFILES[model].timed() if timed else PROFILES[model]


def scenario(
    of: tuple[str, int],
    system: str,
    size_mib: float,
    gathered: bool = False,
    timed: bool = False,
) -> Scenario:
    """Return the training of a model at a rate; `gathered` is of `Profile.layers`.

    `timed`: communication takes as long as Table 1 says.
    """
    model, gbps = of
    profile = profile_of(model, timed)
    scale = profile.size_mib / size_mib
    job = setting.job(
        system,
        WORKERS,
        gbps,
        layers=profile.layers(gathered=gathered),
        scale=scale,
        iterations=ITERATIONS,
    )
    if system == "switchml":
        job["elements"] = ELEMENTS
    return {
        "title": f"Table 2: {model} at {gbps} Gbit/s, {system}",
        "until": setting.ms(1000 * 4 * ITERATIONS * profile.batch_s[10] / scale),
        "payload": "sample",
        "network": {**setting.rack(WORKERS, gbps), "delay": DELAY, "mtu": MTU},
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


def added_ms(at: At, model: str) -> list[float]:
    """Return what communication adds to the computing of a batch at 10 Gbit/s."""
    batches = at.samples(batch_s, of=(model, 10), system="switchml")
    return [1e3 * (batch - PROFILES[model].computing_s) for batch in batches]


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


READINGS = [{"gathered": False}, {"gathered": True}, {"timed": True}]
OVER = (
    "gradients that come evenly, or by both columns of Table 1 some of them at once, as late as "
    "100 Gbit/s can hide them, and as many as Table 1's sizes or its times at 10 Gbit/s say"
)


ROWS = [
    *(
        Row(
            "Table 1",
            f"{model}: what communication adds to a batch's computing at 10 Gbit/s, from the "
            "column of 100 Gbit/s",
            1e3 * profile.communicating_s(10, hidden=False),
            computed(added_ms, model),
            "ms",
            usual_only=True,
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
    # The paper plays one trace of each model, and nothing here is drawn.
    [Cases({"of": CASES, "system": SYSTEMS}, settings=READINGS, seeds=1, throughputs=False)],
    ROWS,
    picture,
    usual={"size_mib": SIZE_MIB},
    over=OVER,
).experiment()
