"""What all experiments share: the paper's machines as the simulator has them (ATP §5.1).

The paper's links carry 100 Gbit/s, but its hosts at most 60 (§D.1), of which 248 of every 306 bytes
are gradients: 48.6 Gbit/s of payload. Our packets of 64 elements have 256 bytes of payload in 386
on the wire, so links of 73 Gbit/s make hosts that move as much payload as the paper's. The delay
stands for what hosts and switch take: 660 packets, a third of the paper's peak-throughput
aggregators, then fill a link, as they do there.

VGG16's peak goodput of 20 Gbit/s (§5.5) is 4.7 times its 528 MB a second, or 151 images a second
in batches of 32; an accelerator of 15.4 TFLOP/s, which computes 166 images a second, trains at that
rate behind such a network.
"""

from __future__ import annotations

from typing import Any

from fanin.reproduce.lab import Report

RATE = "73Gbit"
DELAY = "6us"
QUEUE = "1MB"
ECN = "100kB"
"""Of switches' queues: what they hold, and from where on they mark."""
ELEMENTS = 64
WINDOW = 660
"""Packets that an ATP worker has on the way at most: they fill a link."""
WIRE_BYTES = 386
PAYLOAD_BYTES = 4 * ELEMENTS
FLOPS = 1.54e13
BATCH = 32
JITTER = "2%"
"""Of a worker's times: without it, jobs that began at different moments would stay apart, or not,
forever."""


def network(topology: str, **more: Any) -> dict[str, Any]:
    """Return a network of such machines."""
    return {
        "topology": topology,
        "rate": RATE,
        "delay": DELAY,
        "queue": QUEUE,
        "ecn": ECN,
        "nic_ecn": False,
        **more,
    }


def rack(hosts: int, **more: Any) -> dict[str, Any]:
    """Return the network of the paper's testbed: hosts h0, h1, .. on one switch, s0."""
    return network("rack", hosts=hosts, **more)


def job(system: str = "atp", **more: Any) -> dict[str, Any]:
    """Return a job of eight workers, unless said otherwise."""
    packets = {"elements": ELEMENTS, "window": WINDOW} if system == "atp" else {}
    return {"system": system, "workers": 8, **packets, **more}


def training(model: str, scale: float, **more: Any) -> dict[str, Any]:
    """Return a training job; parameters and times are divided by ``scale``."""
    work = {"model": model, "batch": BATCH, "flops": FLOPS, "scale": scale, "jitter": JITTER}
    return job(**{**work, **more})


def microbenchmark(**more: Any) -> dict[str, Any]:
    """Return the aggregation micro-benchmark: tensors of 4 MB, two on the way (§5.1)."""
    return job(**{"tensor": "4MB", **more})


def sharing(jobs: list[tuple[str, int, dict[str, Any]]], scale: float) -> list[dict[str, Any]]:
    """Return training jobs (model, workers, more keys), whose servers share one more host.

    They begin one after the other, so that they are in different phases of their iterations.
    """
    server = f"h{sum(workers for _, workers, _ in jobs)}"
    return [
        training(model, scale, workers=workers, server=server, start=ms(140 * at / scale), **more)
        for at, (model, workers, more) in enumerate(jobs)
    ]


def ms(time_ms: float) -> str:
    """Write a time for a scenario."""
    return f"{time_ms:.6f}ms"


def images_per_s(report: Report, job: int = 0) -> float:
    """Return a training job's throughput: images a second and worker."""
    return float(report["jobs"][job]["training"]["samples_per_s"])


def goodput_gbps(report: Report, job: int = 0) -> float:
    """Return a job's aggregation throughput (§5.1): parameters that a worker received a second."""
    return float(report["jobs"][job]["aggregation_gbps"])
