"""§6.2, Figure 5: training on 16 workers, SwitchML by NCCL over RDMA and over TCP.

NCCL is a ring whose hosts take so long for a byte that Figure 3's largest ratios come out. The
models are Table 1's. The paper's times include data loading, and it does not say how long that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fanin_lab.papers.lab import Scenario, Spread
from fanin_lab.papers.plot import Bars, Level, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Row, Simulated, by, computed, each
from fanin_lab.papers.switchml import setting
from fanin_lab.papers.switchml.models import BOUND, DELAY, ITERATIONS, PROFILES, SIZE_MIB, batch_s

GBPS = 100
WORKERS = 16
SLOWER = {"RDMA": 2.9, "TCP": 9.1}
"""§1: the most by which SwitchML sums faster than NCCL."""
FRAME_BYTES, SEGMENT_BYTES = 1538, 1460
"""A full segment of TCP and its frame, with an MTU of 1500."""
LOADING = [0.0, 0.5, 1.0]
"""How long data loading takes, by computing."""
PAPER = {
    ("TCP", "most"): 5.55,
    ("TCP", "least"): 2.05,
    ("RDMA", "most"): 2.27,
    ("RDMA", "least"): 1.13,
}


def host_byte_ns(transport: str) -> float:
    """Return how long a byte of a frame takes a host, so that a ring is that much slower."""
    switchml_gbps = GBPS * setting.PAYLOAD_BYTES / setting.WIRE_BYTES
    ring_gbps = switchml_gbps / SLOWER[transport]
    frames_gbps = ring_gbps * 2 * (WORKERS - 1) / WORKERS * FRAME_BYTES / SEGMENT_BYTES
    return 8 / frames_gbps


def scenario(
    model: str, way: str, size_mib: float, loading: float = LOADING[0], cost: bool = False
) -> Scenario:
    """Return the training of a model by SwitchML, or by a ring over a transport.

    `cost`: whether SwitchML's packets cost hosts what ATP's do.
    """
    profile = PROFILES[model]
    scale = profile.size_mib / size_mib
    if way == "switchml":
        hosts = setting.HOSTS_OF_ATP if cost else {}
    else:
        hosts = {"host_byte_cost": f"{host_byte_ns(way):.4f}ns"}
    job = setting.job(
        "switchml" if way == "switchml" else "ring",
        WORKERS,
        GBPS,
        layers=profile.layers(loading * profile.computing_s),
        scale=scale,
        iterations=ITERATIONS,
        jitter="2%",
    )
    return {
        "title": f"Figure 5: {model}, {way}",
        "until": setting.ms(1000 * 8 * ITERATIONS * profile.batch_s[10] / scale),
        "payload": "sample",
        "network": {**setting.rack(WORKERS, GBPS, **hosts), "delay": DELAY},
        "job": [job],
    }


def speedup(at: At, transport: str, choose: Callable[[Sequence[float]], float]) -> list[float]:
    """Return how many times as fast SwitchML is, of the model that is chosen."""
    return each(choose, [_of_model(at, transport, model) for model in BOUND])


def _of_model(at: At, transport: str, model: str) -> list[float]:
    ring, switchml = (at.samples(batch_s, model=model, way=way) for way in (transport, "switchml"))
    return by(ring, switchml)


def picture(at: At) -> Picture:
    """Show each model's speedups."""

    def panel(transport: str) -> Panel:
        ours = [Spread.of(_of_model(at, transport, model)).median for model in BOUND]
        bars = Bars(BOUND, ours, look={"color": "C0"})
        labels = {"most": "paper: the most and the least", "least": None}
        papers = [Level(PAPER[transport, which], label) for which, label in labels.items()]
        return Panel([bars, *papers], "model", f"time over {transport} by SwitchML's")

    return Picture([panel(transport) for transport in SLOWER])


EXPERIMENT = Simulated(
    "trained",
    "Training on 16 workers, SwitchML by NCCL (Figure 5)",
    scenario,
    [
        Cases(
            {"model": BOUND, "way": ["switchml", *SLOWER]},
            settings=[
                {"loading": loading, "cost": cost} for loading in LOADING for cost in (False, True)
            ],
            seeds=3,
            seeds_swept=1,
            throughputs=False,
        )
    ],
    [
        Row(
            "abstract, Fig. 5" if (transport, which) == ("TCP", "most") else "Fig. 5",
            f"training on 16 workers at 100 Gbit/s, by NCCL over {transport}, the {which} of four "
            "models",
            paper,
            computed(speedup, transport, max if which == "most" else min),
            "x",
        )
        for (transport, which), paper in PAPER.items()
    ],
    picture,
    usual={"size_mib": SIZE_MIB},
    over="data loading of 0, 0.5 or 1 times as long as computing, SwitchML's packets for nothing "
    "or at the cost of ATP's hosts",
).experiment()
