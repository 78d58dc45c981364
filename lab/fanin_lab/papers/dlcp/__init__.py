"""The figures of Wang et al., "Domain-specific Communication Optimization for ..." (DLCP), 2020."""

from __future__ import annotations

from fanin_lab.papers.dlcp import (
    accuracy,
    completion,
    compression,
    gradients,
    rotation,
    speed,
    tolerance,
)
from fanin_lab.papers.finding import Paper

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            tolerance,
            gradients,
            accuracy,
            compression,
            completion,
            speed,
            rotation,
        )
    ],
    repeated="seeds",
    repetitions=6,
    missing=[
        "Figures 4, 5 and 15(a), Tables 1 and 2, the models: CIFAR, Caltech101 and wikitext are "
        "not here, but digits, a small GPT on the text of Python's library, and for Figure 5 "
        "also a residual network on images of MNIST; other data are half of the digits, and the "
        "English of Python's help.",
        "Figure 5, the bounds (1.1 % of the front layers, 0.4 % of the back, 1.6 % of small "
        "gradients, 0.1 % of large): our models forgive so much more that only the order is "
        "compared, at a loss that costs them something.",
        "Figure 12: what else PyTorch and MXNet cost is not in a simulator.",
    ],
)
