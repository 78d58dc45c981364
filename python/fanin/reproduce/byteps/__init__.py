"""Figures of BytePS (Jiang et al., OSDI 2020), those about what is between machines."""

from __future__ import annotations

from fanin.reproduce.byteps import acceleration, goodput, theorem
from fanin.reproduce.finding import Paper

PAPER = Paper(
    [module.EXPERIMENT for module in (theorem, acceleration, goodput)],
    repeated="rounds",
    repetitions=3,
)
