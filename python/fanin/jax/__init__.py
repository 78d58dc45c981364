"""JAX on fanin: collectives of arrays and pytrees, inside and outside of `jax.jit`, on CPUs.

A group is joined by `connect`, and its collectives are functions here. Inside of `jit` they are
calls of XLA's foreign function interface: XLA hands over its memory, and the services sum in it.
They are ordered effects, so every process submits alike, also what does not depend on each other.

A program with a collective is for one device. If a process has several, another program adds their
arrays first.
"""

from __future__ import annotations

from fanin.jax.collectives import all_gather as all_gather
from fanin.jax.collectives import all_reduce as all_reduce
from fanin.jax.collectives import broadcast as broadcast
from fanin.jax.collectives import reduce_scatter as reduce_scatter
from fanin.jax.meeting import connect as connect
from fanin.jax.optimizer import average_gradients as average_gradients

__all__ = [
    "all_gather",
    "all_reduce",
    "average_gradients",
    "broadcast",
    "connect",
    "reduce_scatter",
]
