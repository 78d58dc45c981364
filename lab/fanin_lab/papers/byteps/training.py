"""Training on the paper's machines: Figures 13, 15 and 16 (§7.2, §7.4), layer by layer.

A machine has eight GPUs, which compute alike, and its gradients are one GPU's. What the paper does
not give is swept: how fast a V100 computes, how long it takes to launch a kernel, batches, whether
the next forward pass waits for all parameters or each layer for its own, what the inside of a
machine leaves of all-reduce, and how native PS has its variables.

The paper names its evaluation code, github.com/bytewise/examples, which says which framework trains
which model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fanin_lab.papers.byteps import equations, inside
from fanin_lab.papers.byteps.cluster import (
    NIC_GBPS,
    PACKET_BYTES,
    PARTITION_BYTES,
    RING,
    Cluster,
    finished_s,
)
from fanin_lab.papers.byteps.plans import plans
from fanin_lab.papers.lab import Lab, Report, Scenario

FLOPS = (5e12, 1e13, 2e13, 4e13)
"""A GPU's, in a second: a V100 has at most 15.7 TFLOP/s in float32, and 125 with tensor cores."""
SLOW, USUAL, FAST, FASTEST = COMPUTINGS = range(4)
"""Of `FLOPS`, and of each model's batches."""
PLAYED_MB, PLAYED_QUICK_MB = 8.0, 2.0
"""To what a model's gradients are scaled down."""
ITERATIONS = 2
"""All alike, where none begins before the last has ended."""
ITERATIONS_OVERLAPPING = 6
"""Of which the first is longer, and the last four or five count."""
WINDOW_SCALED = 8
"""Packets: what a link carries in a round trip whose delays are scaled down, and its packets are
not."""
BASELINE_GBPS = 41.0
"""Without what §6.2 mends (Table 2), which native PS lacks (§7)."""
LAUNCH_S = (25e-6, 15e-6, 10e-6, 5e-6)
"""How long PyTorch takes to launch a kernel, Python and dispatcher included: our choice."""
GPT2_KERNELS, GPT2_OTHERS = 431 + 491, 596 + 1036 + 148
"""Operators of a step with 80 tokens, counted by hand in a copy of the evaluation code's model:
forward and backward; and to clip gradients, for AdamW and to set gradients to zero, which hide no
communication."""
RESNET50_FLOPS = 351 * 6 * 4.089e9
"""The artifact appendix that the paper names has 351 images/s of a GPU of 256 (Figure 15a). An
image has 4.089 G multiply-adds, three times."""


@dataclass(frozen=True)
class Model:
    """What the paper trains."""

    simulated: str
    """Which of the simulator's models it is."""
    name: str
    parameters: float
    batches: tuple[int, int, int, int]
    """Samples of a GPU, in the order of `FLOPS`: from the longest computing to the shortest."""
    has_servers: bool = True
    """Whether the paper has native PS for it; PyTorch has none (§7.4)."""
    in_tensorflow: bool = False
    """Whether its native PS is TensorFlow's, and not MXNet's."""
    kernels: int = 0
    """Operators of both passes, where launching them takes longer than what they compute."""
    others: int = 0
    """More operators of a step, between its passes and those of the next step."""
    flops: tuple[float, float, float, float] = FLOPS


MODELS = {
    "resnet50": Model(
        "resnet50",
        "ResNet-50",
        25.6e6,
        (256, 128, 64, 64),
        in_tensorflow=True,
        flops=(RESNET50_FLOPS,) * 4,
    ),
    "vgg16": Model("vgg16", "VGG-16", 138.4e6, (128, 64, 32, 32)),
    # §7.2: 2 images.
    "ugatit": Model("ugatit", "UGATIT", 670.8e6, (2, 2, 2, 2), has_servers=False),
    # Sentences of 32 tokens, and sequences of 128.
    "transformer": Model(
        "transformer", "Transformer", 63.1e6, (256, 128, 64, 64), in_tensorflow=True
    ),
    "bert-large": Model("bert-large", "BERT-large", 335.1e6, (64, 32, 16, 16)),
    # §7.2: 80 tokens.
    "gpt2": Model(
        "gpt2", "GPT-2", 124.4e6, (1, 1, 1, 1), False, kernels=GPT2_KERNELS, others=GPT2_OTHERS
    ),
}
MOTIVATION = "vgg16-32"
PLAYED = {
    **MODELS,
    # §3.1: 32 images for each GPU.
    MOTIVATION: Model("vgg16", "VGG-16", 138.4e6, (32, 32, 32, 32)),
}
OVER_BATCHES = "batches of 256, 128 or 64 images"
OVER_LAUNCHES = "GPT-2's kernels launched in 5, 10, 15 or 25 us each"
OVER_COMPUTING = "GPUs of 5, 10, 20 or 40 TFLOP/s with large to small batches"
OVER_OVERLAP = "BytePS's passes overlapping or not"
OVER_RING = "all-reduce limited by the inside of machines or by NICs alone"
OVER_SERVERS = (
    "native PS with the 41 Gbit/s of Table 2's baseline or what GPUs leave of its NIC, and in "
    "TensorFlow with whole variables or pieces of 4 MB"
)


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    system: str
    """ "byteps", "ring", "servers" with pieces of 4 MB, or "whole": they have whole variables."""
    trains: int
    spares: int = 0
    gbps: float = NIC_GBPS
    """Of a machine that trains."""
    computing: int = USUAL
    overlap: bool = False

    @property
    def name(self) -> str:
        """Of its scenario."""
        text = f"{self.model}-{self.system}-{self.trains}-{self.spares}-{self.gbps:.1f}"
        return f"{text}-{self.computing}" + ("-overlap" if self.overlap else "")


class Trained:
    """How long iterations take."""

    def __init__(self, lab: Lab, prefix: str, cases: Iterable[Case]):
        self._quick = lab.quick
        cases = list(dict.fromkeys(cases))
        alone = {(case.model, case.computing) for case in cases}
        self._computing_s = computing_s(lab, prefix, sorted(alone))
        clusters = {(case.trains, case.spares) for case in cases if case.system == "byteps"}
        shares = plans(lab, sorted(clusters))
        self._shares = {
            of: (plan.shares["w0"], plan.shares.get("s0", 0.0)) for of, plan in shares.items()
        }
        one_by_one = [case for case in cases if not case.overlap]
        runs = lab.play(
            {f"{prefix}-{case.name}": self._scenario(case) for case in one_by_one},
            once=True,
            throughputs=False,
        )
        overlapping = [case for case in cases if case.overlap]
        runs |= lab.play(
            {f"{prefix}-{case.name}": self._scenario(case) for case in overlapping}, once=True
        )
        self._times = {
            case: runs[f"{prefix}-{case.name}"].spread(self._seconds(case)).median for case in cases
        }

    def iteration_s(self, case: Case) -> float:
        """Return how long one takes."""
        return self._times[case]

    def efficiency(self, case: Case) -> float:
        """Return what part of linear scaling it reaches."""
        return self._computing_s[case.model, case.computing] / self._times[case]

    def gain(self, case: Case, other: Case) -> float:
        """Return how many times as fast as the other one it trains."""
        return self._times[other] / self._times[case]

    def _scenario(self, case: Case) -> Scenario:
        scale = _scale(case.model, self._quick)
        cluster = Cluster(case.trains, case.spares, case.gbps)
        job = _work(case.model, case.computing, scale)
        if case.system == "ring":
            job |= RING
        elif case.system == "whole":
            job |= cluster.servers()
        elif case.system == "servers":
            job |= cluster.servers(PARTITION_BYTES / scale)
        else:
            # Packets are not scaled: the window is 8 of them, and a part may be one.
            shares = self._shares[case.trains, case.spares]
            job |= cluster.byteps(*shares, window=WINDOW_SCALED) | {"part_min": 1}
            if case.overlap:
                # Whole packets: part of one would weigh more than in a partition of 4 MB.
                packets = max(1, round(PARTITION_BYTES / scale / PACKET_BYTES))
                job |= {"partition": f"{packets * PACKET_BYTES}B", "order": "needed"}
        warm_up_s = 0.0
        if case.overlap:
            sent_s = 2 * 32 * PLAYED[case.model].parameters / (1e9 * case.gbps)
            computed_s = self._computing_s[case.model, case.computing]
            warm_up_s = (computed_s + sent_s) / scale
        job |= {
            "overlap": case.overlap,
            "iterations": ITERATIONS_OVERLAPPING if case.overlap else ITERATIONS,
        }
        title = f"{PLAYED[case.model].name}: {case.system}, n = {case.trains}, k = {case.spares}"
        return cluster.play(title, job, scale=scale, warm_up_s=warm_up_s)

    def _seconds(self, case: Case) -> Callable[[Report], float]:
        if not case.overlap:
            scale = _scale(case.model, self._quick)
            return lambda report: scale * _each(report) + _unseen_s(case.model, case.computing)

        batch = PLAYED[case.model].batches[case.computing]
        return lambda report: batch / float(report["jobs"][0]["training"]["samples_per_s"])


def computing_s(
    lab: Lab, prefix: str, alone: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], float]:
    """Return how long a model's iteration takes one machine, of which nothing passes a link."""

    def scenario(model: str, computing: int) -> Scenario:
        work = _work(model, computing, _scale(model, lab.quick))
        job = {"system": "tcp-ps", **work, "iterations": ITERATIONS}
        return Cluster(1, 1).play(f"{PLAYED[model].name}, one machine", job)

    names = {
        (model, computing): f"{prefix}-{model}-alone-{computing}" for model, computing in alone
    }
    # Nothing in it is random: every seed would give the same.
    runs = lab.play({names[one]: scenario(*one) for one in alone}, once=True, throughputs=False)
    return {
        one: _scale(one[0], lab.quick) * runs[name].spread(_each).median + _unseen_s(*one)
        for one, name in names.items()
    }


def computing_in_words(model: str) -> str:
    """Return how fast a GPU usually computes a model."""
    it = PLAYED[model]
    if it.kernels:
        return f"{1e6 * LAUNCH_S[USUAL]:g} us a kernel"
    return f"{it.flops[USUAL] / 1e12:.3g} TFLOP/s"


def unhidden_s(computing_s: float, case: Case) -> float:
    """Return how long an iteration takes whose communication begins when all is computed."""
    ring = case.system == "ring"
    units = equations.ring(case.trains) if ring else equations.optimal(case.trains, case.spares)
    return computing_s + units * 32 * PLAYED[case.model].parameters / (1e9 * case.gbps)


def _scale(model: str, quick: bool) -> float:
    played_mb = PLAYED_QUICK_MB if quick else PLAYED_MB
    return 4 * PLAYED[model].parameters / (played_mb * 1e6)


def _work(model: str, computing: int, scale: float) -> dict[str, Any]:
    it = PLAYED[model]
    work = {"model": it.simulated, "batch": it.batches[computing], "scale": scale}
    if not it.kernels:
        return {**work, "flops": it.flops[computing]}
    between_ns = 1e9 * it.others * LAUNCH_S[computing] / scale
    pauses = {"pause_every": 1, "pause": f"{between_ns:.0f}ns"} if it.others else {}
    return {**work, "flops": _gpt2_flop() / (it.kernels * LAUNCH_S[computing]), **pauses}


def _unseen_s(model: str, computing: int) -> float:
    """Return an iteration's part of the pause behind the last one, which a run has no more."""
    return PLAYED[model].others * LAUNCH_S[computing] / ITERATIONS


def _gpt2_flop() -> float:
    """Return the operations of a sequence in the simulator: 1,024 tokens, three times forward."""
    width, depth, tokens, vocabulary = 768, 12, 1024, 50_257
    weights = 12 * depth * width**2 + vocabulary * width
    return 6.0 * (tokens * weights + 2 * depth * tokens**2 * width)


def _each(report: Report) -> float:
    return finished_s(report) / ITERATIONS


@dataclass(frozen=True)
class Rates:
    """What the inside of a machine leaves of its NIC to the network, in Gbit/s."""

    byteps: float
    ring: float
    servers: float


def rates(
    lab: Lab, prefix: str, kind: str, clusters: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Rates]:
    """Ask `fanin topo`, for "nvlink" or "pcie-only", and (n, k).

    BytePS has the strategy that it chooses, native PS the strawman (§4.2.1) or all roots, which
    §7.3 calls Horovod's hierarchical mode, and all-reduce a ring over all GPUs.
    """
    machine = inside.nvlink(NIC_GBPS) if kind == "nvlink" else inside.pcie_only(2, 4, nic=NIC_GBPS)
    best, straightforward = (
        ("root=2", "root=all") if kind == "nvlink" else ("assisted", "straightforward")
    )

    def ask(cluster: tuple[int, int]) -> Rates:
        n, k = cluster
        found = inside.told(lab, f"{prefix}-{kind}-{n}-{k}", machine, n, spares=k)
        return Rates(*(found.rate_gbps(of) for of in (best, "ring", straightforward)))

    return dict(zip(clusters, lab.each("fanin topo", ask, clusters), strict=True))


@dataclass(frozen=True)
class Setting:
    """What the paper does not give."""

    computing: int
    overlap: bool
    """Of BytePS's passes."""
    ring_limited: bool
    """Whether all-reduce is, by the inside of machines; else by its NIC alone."""
    servers_limited: bool
    """Whether native PS is, by Table 2; else by what its GPUs leave of its NIC."""
    whole: bool
    """Whether TensorFlow's native PS has whole variables (`tf.train.replica_device_setter`). §3.1
    says that with VGG-16 it is as MXNet's, which cuts large ones among all servers."""
    launching: int = USUAL
    """Index of `LAUNCH_S`."""

    def of_model(self, model: str) -> int:
        """Return what decides how long a model computes: of `COMPUTINGS`, or of `LAUNCH_S`."""
        return self.launching if PLAYED[model].kernels else self.computing


EITHER = (False, True)
SETTINGS = [
    Setting(*of) for of in product(COMPUTINGS, EITHER, EITHER, EITHER, EITHER, range(len(LAUNCH_S)))
]
SHOWN = Setting(USUAL, overlap=False, ring_limited=True, servers_limited=True, whole=False)


def of_lab(lab: Lab) -> list[Setting]:
    """Return the settings to play: quickly, those of the usual computing."""
    usual = (USUAL, USUAL)
    return [of for of in SETTINGS if not lab.quick or (of.computing, of.launching) == usual]


class Systems:
    """Who trains how, as far as the inside of machines lets them."""

    def __init__(
        self, lab: Lab, prefix: str, kind: str, clusters: Sequence[tuple[int, int]]
    ) -> None:
        self._rates = rates(lab, prefix, kind, clusters)

    def byteps(self, model: str, n: int, k: int, of: Setting) -> Case:
        """Return BytePS's."""
        gbps = self._rates[n, k].byteps
        # Gradients that are clipped wait for each other.
        overlap = of.overlap and not PLAYED[model].others
        return Case(model, "byteps", n, k, gbps, of.of_model(model), overlap)

    def ring(self, model: str, n: int, of: Setting) -> Case:
        """Return all-reduce's."""
        gbps = self._rates[n, 0].ring if of.ring_limited else NIC_GBPS
        return Case(model, "ring", n, gbps=gbps, computing=of.of_model(model))

    def servers(self, model: str, n: int, of: Setting, k: int | None = None) -> Case:
        """Return native PS's, on n machines more unless it is said."""
        k = n if k is None else k
        gbps = BASELINE_GBPS if of.servers_limited else self._rates[n, k].servers
        system = "whole" if of.whole and PLAYED[model].in_tensorflow else "servers"
        return Case(model, system, n, k, gbps, of.of_model(model))
