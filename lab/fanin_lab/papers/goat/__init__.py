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
    times,
)

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            example,
            testbed,
            times,
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
        "Figures 5 to 7 (Exp 1): throughput and accuracy over time on its GPUs and hosts, of which "
        "nothing but these figures is known. Where they follow from bytes is asked of Figures 8 "
        "and 9.",
        "Figure 12, the models: CIFAR-100 and ResNets are not here, but digits.",
    ],
)
