"""Figures of GOAT (Fang et al., IEEE/ACM Transactions on Networking, 2024)."""

from __future__ import annotations

from fanin_lab.papers.finding import Paper
from fanin_lab.papers.goat import (
    accuracy,
    aggregation,
    deviation,
    example,
    overhead,
    packets,
    testbed,
    throughput,
    training,
)

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            example,
            testbed,
            training,
            throughput,
            accuracy,
            aggregation,
            overhead,
            deviation,
            packets,
        )
    ],
    repeated="seeds",
    repetitions=6,
    missing=[
        "Figure 7 (Exp 1): the accuracy itself, and how long its GPUs compute, of which nothing is "
        "known. An epoch's rest is GOAT's, for all schemes.",
        "Figure 12, the models: CIFAR-100 and ResNets are not here, but digits.",
    ],
)
