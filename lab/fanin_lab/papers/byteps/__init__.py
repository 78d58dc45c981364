"""Figures of BytePS (Jiang et al., OSDI 2020)."""

from __future__ import annotations

from fanin_lab.papers.byteps import (
    acceleration,
    communication,
    goodput,
    machine,
    motivation,
    optimizers,
    scalability,
    spares,
    summation,
    theorem,
)
from fanin_lab.papers.finding import Paper

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            theorem,
            acceleration,
            motivation,
            communication,
            machine,
            spares,
            scalability,
            summation,
            optimizers,
            goodput,
        )
    ],
    repeated="rounds",
    repetitions=3,
)
