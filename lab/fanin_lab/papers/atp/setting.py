"""What all experiments share: the paper's machines as the simulator has them (ATP §5.1).

Links carry the paper's 100 Gbit/s. A packet costs a host 17.5 ns and 0.076 ns a byte, in each
direction: the line through what the paper says of its hosts, 60 Gbit/s in packets of 306 bytes
(§5.5) and 1.3 times less in such of 180 (Figure 19). Our frame of 64 elements has 64 bytes more
than the paper's, and that of SwitchML's 32 has 30; hosts are charged for the paper's.

Accelerators compute each model at a published throughput of an RTX 2080 Ti, the paper's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fanin_lab.papers.lab import Between, Report, throughput

RATE = "100Gbit"
HOSTS = {"host_packet_cost": "12.64ns", "host_byte_cost": "0.076ns"}
"""17.5 ns less 64 times 0.076: frames of 370 bytes cost what 306 would."""
HOSTS_OF_SWITCHML = {"host_packet_cost": "15.22ns", "host_byte_cost": "0.076ns"}
"""17.5 ns less 30 times 0.076: frames of 210 bytes cost what 180 would (§4)."""
HOSTS_FREE: dict[str, Any] = {}
"""Packets cost a host nothing."""
HOST_GOODPUT_GBPS = 50.2
"""Of elements, that a host moves: 256 bytes in 17.5 + 0.076 * 306 ns."""
DELAY = "6us"
"""Of a link; a round trip from worker to server and back is four of these. The paper gives none."""
QUEUE = "1MB"
ECN = "100kB"
"""Of switches' queues: what they hold, and from where on they mark."""
ELEMENTS = 64
ELEMENTS_OF_SWITCHML = 32
"""Of a packet (§5.1): one pass through a switch (§4)."""
WINDOW = 660
"""Packets that an ATP worker has on the way at most: with this round trip they fill a host."""
SLOTS = 512
"""SwitchML's at 100 Gbit/s (its Appendix C)."""
WIRE_BYTES, PAPER_WIRE_BYTES = 394, 330
"""Of a packet on the link: its own header 72, IP and UDP 28, Ethernet 38; the paper's frame is of
306 bytes, and has 24 more around it."""
RATE_OF_FRAMES = f"{100 * WIRE_BYTES / PAPER_WIRE_BYTES:.1f}Gbit"
"""With which our frame takes as long as the paper's at 100 Gbit/s."""
PAYLOAD_BYTES = 4 * ELEMENTS
PAPER_PTA = 1980
"""§5.4.1: the aggregators with which three jobs fill the link to their servers."""
PAPER_DELAY = "20us"
"""Of a link, with which the 1980 packets of 306 bytes are one round trip (of four links) at 60
Gbit/s: 81 us. The paper gives no delay."""
FILLS = {DELAY: WINDOW, PAPER_DELAY: 1980}
"""By the links' delay, packets on the way that fill a host."""
LINKS_THERE_AND_BACK = {"rack": 4, "dumbbell": 6}
"""By topology, links between a worker and the server farthest from it, both ways."""
ROUND_TRIP_US, PAPER_ROUND_TRIP_US = 24.0, 80.0
"""Of a path without queues, on any topology: four links of `DELAY`, or of `PAPER_DELAY`. The
paper's dumbbell is one switch (§5.3.2): its path takes no longer than one through a rack."""
WINDOWS = {ROUND_TRIP_US: FILLS[DELAY], PAPER_ROUND_TRIP_US: FILLS[PAPER_DELAY]}
"""By the round trip, packets on the way that fill a host."""
CONTENDED: dict[str, Any] = {"scale": 50.0, "round_trip_us": ROUND_TRIP_US, "aggregators": 8192}
"""Where jobs share a switch (Figure 12, §D.2), and the paper gives none of these."""
CONTENDED_SWEPT: list[dict[str, Any]] = [
    {},
    {"round_trip_us": PAPER_ROUND_TRIP_US},
    {"round_trip_us": PAPER_ROUND_TRIP_US, "aggregators": PAPER_PTA},
]
CONTENDED_QUICK: list[dict[str, Any]] = [{"scale": 200.0}]
CONTENDED_OVER = "round trips of 24 us, or of 80 us with 8,192 or 1,980 aggregators"
WAYS = 8
"""The aggregators in which a fragment looks for a place, in fanin's own switches."""
WITH_WAYS = f"a fragment looks for a place in {WAYS} aggregators, as in fanin's own switches"
ONE_WAY = "§3.5: one, by a hash"
"""What the paper says of that."""
RDMA_PACKETS = {"1,344": (336, 1500), "4,096": (1024, 4500)}
"""By their bytes, which the paper does not give: elements, and the MTU that takes them."""
BYTEPS_HOSTS = {"90Gbit": "0.0889ns", "41Gbit": "0.195ns"}
"""By what a host of BytePS's moves over RDMA in each direction, a byte's cost. BytePS's own paper
has 90 Gbit/s through 100 (§7.1), and 41 without what it mends (Table 2); which of it ATP's authors
had is not said."""
RDMA_ON_THE_WAY = 500_000
"""Elements: more than a link carries in a round trip over six links of 20 us."""
BATCH = 32
COMPUTED = {
    # Images a second and multiply-adds of an image (torchvision). ResNets: Lambda, "2080 Ti Deep
    # Learning Benchmarks", FP32. The others: logs of Lambda's lambda-tensorflow-benchmark
    # (TensorFlow 1.15, FP32, synthetic data, one GPU, no XLA), which have 292 and 112 for ResNets.
    "resnet50": (294.0, 4.09e9),
    "resnet152": (110.0, 11.51e9),
    "vgg16": (165.0, 15.47e9),
    "alexnet": (3764.0, 0.714e9),
}
LIKE = {"vgg11": ["vgg16"], "vgg19": ["vgg16"], "resnet101": ["resnet50", "resnet152"]}
"""Of which nothing is published there: as many operations a second as others of the kind."""
JITTER = "2%"
"""Of a worker's times: without it, jobs that began at different moments would stay apart, or not,
forever."""


def network(topology: str, cost: Mapping[str, Any] = HOSTS, **more: Any) -> dict[str, Any]:
    """Return a network of such machines."""
    return {
        "topology": topology,
        "rate": RATE,
        **cost,
        "delay": DELAY,
        "queue": QUEUE,
        "ecn": ECN,
        "nic_ecn": False,
        **more,
    }


def rack(hosts: int, cost: Mapping[str, Any] = HOSTS, **more: Any) -> dict[str, Any]:
    """Return the network of the paper's testbed: hosts h0, h1, .. on one switch, s0."""
    return network("rack", cost, hosts=hosts, **more)


def switch(aggregators: int = 8192, ways: int = 1) -> dict[str, Any]:
    """Return the paper's switches: a fragment has one aggregator, and no others (§3.5)."""
    return {"aggregators": aggregators, "ways": ways}


def delay(topology: str, round_trip_us: float) -> str:
    """Return the delay of each link with which a round trip takes so long."""
    return f"{round_trip_us / LINKS_THERE_AND_BACK[topology]:.3f}us"


def rdma(topology: str, packet: str, moves: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a network for RDMA with PFC (§5.1).

    Hosts' cores have no part in it, and nothing is lost or marked: no queue ever fills. `moves` is
    what hosts move, if not as much as links.
    """
    _, mtu = RDMA_PACKETS[packet]
    usual = {"topology": topology, "rate": RATE, "delay": DELAY, "queue": "64MB", "mtu": mtu}
    return {**usual, **({"host_byte_cost": BYTEPS_HOSTS[moves]} if moves else {}), **more}


def rdma_keys(system: str, packet: str) -> dict[str, Any]:
    """Return what a job over such a network has: it waits for no timeout."""
    elements, _ = RDMA_PACKETS[packet]
    if system == "ring":
        return {"system": system}
    window = RDMA_ON_THE_WAY // elements
    return {"system": system, "elements": elements, "window": window, "timeout": "10ms"}


def job(system: str = "atp", **more: Any) -> dict[str, Any]:
    """Return a job of eight workers, unless said otherwise."""
    packets = {
        "ring": {},
        "switchml": {"elements": ELEMENTS_OF_SWITCHML, "slots": SLOTS},
    }.get(system, {"elements": ELEMENTS, "window": WINDOW})
    return {"system": system, "workers": 8, **packets, **more}


def training(model: str, scale: float, **more: Any) -> dict[str, Any]:
    """Return a training job; parameters and times are divided by ``scale``."""
    return job(**{**work(model, scale), **more})


def work(model: str, scale: float) -> dict[str, Any]:
    """Return what a training job does."""
    return {
        "model": model,
        "batch": BATCH,
        "flops": flops(model),
        "scale": scale,
        "jitter": JITTER,
    }


def flops(model: str) -> float:
    """Return the operations a second at which a worker trains a model as fast as is published.

    Forward and backward are three times two operations a multiply-add.
    """
    alike = [COMPUTED[name] for name in LIKE.get(model, [model])]
    return sum(6 * images * multiply_adds for images, multiply_adds in alike) / len(alike)


def sharing(jobs: list[tuple[str, int, dict[str, Any]]], scale: float) -> list[dict[str, Any]]:
    """Return training jobs (model, workers, more keys), whose servers share one more host.

    They begin at moments that a seed draws, in different phases of their iterations.
    """
    shared = f"h{sum(workers for _, workers, _ in jobs)}"
    start = Between(0, 280 / scale)
    return [
        training(model, scale, **{"workers": workers, "server": shared, "start": start, **more})
        for model, workers, more in jobs
    ]


def ms(time_ms: float) -> str:
    """Write a time for a scenario."""
    return f"{time_ms:.6f}ms"


def measured(time_s: float, scale: float) -> dict[str, Any]:
    """Return how long a scenario is played, of unscaled time; the first quarter is warm-up."""
    return {"until": ms(1000 * time_s / scale), "warm_up": ms(1000 * time_s / 4 / scale)}


def images_of_jobs(report: Report) -> list[float]:
    """Return the throughput of each training job."""
    return [images_per_s(report, job) for job in range(len(report["jobs"]))]


def images_of(job: int) -> Callable[[Report], float]:
    """Return what reads the throughput of one of several jobs."""
    return lambda report: images_per_s(report, job)


def images_per_s(report: Report, job: int = 0) -> float:
    """Return a training job's throughput: images a second and worker."""
    found = report["jobs"][job]
    return throughput(found, found["training"]["samples_per_s"])


def goodput_gbps(report: Report, job: int = 0) -> float:
    """Return a job's aggregation throughput (§5.1): parameters that a worker received a second."""
    found = report["jobs"][job]
    return throughput(found, found["aggregation_gbps"])
