"""How a bucket is divided among the ranks, each of which sums one shard of it."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_MAX = 1024
"""Elements that have a scale of their own: 4 bytes more on 128 of signs.

BytePS has one for each tensor, and a bucket of DDP's has many tensors, whose sizes differ.
"""
BYTE = 8


@dataclass(frozen=True)
class Cut:
    """A bucket of `elements` in `shards` of `length`; the last ones may be filled up with zeros."""

    elements: int
    shards: int
    length: int
    block: int
    """Elements that share a scale, `BLOCK_MAX` or a few less; `length` is a multiple of it."""

    @staticmethod
    def of(elements: int, shards: int) -> Cut:
        """Cut so many elements into so many shards."""
        least = -(-elements // shards)
        # As long as each other: with a short block behind long ones, filled up, a shard would take
        # elements from the last shards, which have none then.
        blocks = -(-least // BLOCK_MAX)
        block = -(-least // (blocks * BYTE)) * BYTE
        return Cut(elements, shards, blocks * block, block)

    @property
    def padded(self) -> int:
        """Elements with the zeros behind them."""
        return self.shards * self.length
