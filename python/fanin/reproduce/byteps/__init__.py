"""Figures of BytePS (Jiang et al., OSDI 2020)."""

from __future__ import annotations

from fanin.reproduce.byteps import (
    acceleration,
    communication,
    goodput,
    machine,
    scalability,
    spares,
    summation,
    theorem,
)
from fanin.reproduce.finding import Paper

PAPER = Paper(
    [
        module.EXPERIMENT
        for module in (
            theorem,
            acceleration,
            communication,
            machine,
            spares,
            scalability,
            summation,
            goodput,
        )
    ],
    repeated="rounds",
    repetitions=3,
)
