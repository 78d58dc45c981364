"""Figures of Sapio et al., "Scaling Distributed ML with In-Network Aggregation", NSDI 2021."""

from __future__ import annotations

from fanin_lab.papers.finding import Paper
from fanin_lab.papers.switchml import (
    accuracy,
    compressed,
    convergence,
    factor,
    halves,
    loss,
    models,
    pool,
    scaling,
    trained,
)

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            models,
            compressed,
            trained,
            scaling,
            loss,
            pool,
            halves,
            accuracy,
            convergence,
            factor,
        )
    ],
    repeated="seeds",
    repetitions=6,
    missing=[
        "Table 1 at 100 Gbit/s: what models compute is taken from it.",
        "Figure 3, servers on machines of their own: only by what the paper says of them, twice "
        "those beside workers. Gloo and NCCL: the CPU time of TCP is not modelled, and the ring "
        "is the textbook's, in as many chunks as workers, without NCCL's channels and start-up.",
        "Figure 4: its bars have no numbers in the text.",
        "Figures 2 and 11, the models: digits, a small GPT, and a residual network of 272,000 "
        "parameters on 5,000 images of MNIST stand for them.",
        "Figure 10 and Table 4, the models: the same residual network stands for them.",
    ],
)
