"""The figures of Lao et al., "ATP: In-network Aggregation for Multi-tenant Learning", NSDI 2021."""

from __future__ import annotations

from fanin.reproduce.atp import (
    background,
    congestion,
    hashing,
    loss,
    overflow,
    pairs,
    rack_scale,
    sharing,
    single,
)

EXPERIMENTS = [
    module.EXPERIMENT
    for module in (
        single,
        rack_scale,
        loss,
        sharing,
        hashing,
        congestion,
        background,
        pairs,
        overflow,
    )
]
