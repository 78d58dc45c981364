"""§5.2.2, Figure 9: traffic into the parameter server, aggregated at two levels or at one."""

from __future__ import annotations

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Scenario
from fanin_lab.papers.plot import Bars, Level, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated

SYSTEMS = {"atp": "ATP", "rss": "rack-scale service", "ps": "no aggregation"}
PAPER_RATIO = 3.0
TENSORS = Either(8, quick=2)
TENSOR_BYTES = 1_000_000
COUNTING = "three racks send three sums where ATP sends one: arithmetic of the topology"


def scenario(system: str, tensors: int) -> Scenario:
    """Return some tensors' sums on the paper's racks."""
    job = setting.job(
        system,
        workers=[f"w{worker}" for worker in range(6)],
        server="ps",
        tensor=f"{TENSOR_BYTES}B",
        tensors=tensors,
    )
    return {
        "title": f"Figure 9: {SYSTEMS[system]}",
        "network": setting.network("figure9"),
        "switch": setting.switch(),
        "job": [job],
    }


def received(at: At, system: str) -> list[float]:
    """Return the bytes that the server receives for each byte of gradients."""
    sent = TENSORS.of(at.quick) * TENSOR_BYTES
    return at.samples(lambda report: report["servers"][0]["received_bytes"] / sent, system=system)


def ratios(at: At) -> list[float]:
    """Return what the rack-scale service's server receives, by what ATP's does."""
    both = zip(received(at, "rss"), received(at, "atp"), strict=True)
    return [rss / atp for rss, atp in both]


def picture(at: At) -> Picture:
    """Show what the server receives of each system."""
    found = [received(at, system)[0] for system in SYSTEMS]
    bars = Bars(list(SYSTEMS.values()), found, look={"color": ["C0", "C1", "C7"]}, numbers="%.2f")
    paper = Level(PAPER_RATIO * found[0], "paper: 3 times ATP's")
    return Picture([Panel([bars, paper], "", "bytes into the server a byte of gradients")])


EXPERIMENT = Simulated(
    "rack-scale",
    "Two racks and a server's (Figure 9): traffic into the server",
    scenario,
    # Nothing in it is random.
    [Cases({"system": SYSTEMS}, seeds=1, throughputs=False)],
    [
        Row(
            "§5.2.2, Fig. 9",
            "traffic into the server, rack-scale service by ATP",
            PAPER_RATIO,
            ratios,
            "x",
            cannot_fail=COUNTING,
        ),
        Row(
            "abstract",
            "less traffic than the rack-scale service in the multi-rack cluster",
            66.0,
            lambda at: [100 * (1 - 1 / ratio) for ratio in ratios(at)],
            "%",
            cannot_fail=COUNTING,
        ),
    ],
    picture,
    usual={"tensors": TENSORS},
).experiment()
