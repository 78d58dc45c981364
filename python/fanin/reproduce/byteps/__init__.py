"""Figures of Jiang et al., "A Unified Architecture ..." (BytePS), OSDI 2020: those of the network."""

from __future__ import annotations

from fanin.reproduce.byteps import acceleration, goodput, theorem

EXPERIMENTS = [module.EXPERIMENT for module in (theorem, acceleration, goodput)]
