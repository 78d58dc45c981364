"""Figures of Sapio et al., "Scaling Distributed ML with In-Network Aggregation", NSDI 2021."""

from __future__ import annotations

from fanin_lab.papers.finding import Paper
from fanin_lab.papers.switchml import (
    accuracy,
    factor,
    halves,
    loss,
    models,
    pool,
    scaling,
)

PAPER = Paper(
    [module.EXPERIMENT for module in (models, scaling, loss, pool, halves, accuracy, factor)],
    repeated="seeds",
    repetitions=6,
    missing=[
        "Table 1: the profile of its GPUs; what three models compute is taken from it.",
        "Table 2, DeepLight, LSTM, NCF, UGATIT and SSD: the simulator has not their layers. QSGD "
        "and Top-k: no compression is modelled.",
        "Figure 3, servers on machines of their own: only by what the paper says of them, twice "
        "those beside workers. Gloo and NCCL: the CPU time of TCP is not modelled, and the ring "
        "is the textbook's, in as many chunks as workers, without NCCL's channels and start-up.",
        "Figures 4 and 5, training against NCCL at 100 Gbit/s, need those models, too.",
        "Figures 2 and 11, the models: digits and a small GPT stand for them.",
        "Figure 10 and Table 4, convergence with Top-k: fanin compresses nothing.",
    ],
)
