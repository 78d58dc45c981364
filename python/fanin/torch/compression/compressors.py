"""What is sent of a gradient: BytePS's compressors (its docs/gradient-compression.md).

A compressor is its parameters and nothing else: what it remembers from step to step is in `memory`.
Gradients are float32 here. What is not finite stays so: whatever has NaN or infinity in it comes
out with NaN or infinity, on all ranks.
"""

# The methods are documented where they are abstract.
# ruff: noqa: D102

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fanin.torch.compression import codes
from fanin.torch.compression.cut import BYTE, Cut

SCALE_BYTES = 4
VALUE_BYTES = 4
INDEX_BYTES = 4
LEVELS_MAX = 127
"""Of dithering: with their negatives and zero they fill a byte."""
NOISE_BITS = 16
EXPONENT_BIAS, MANTISSA_BITS = 127, 23


class Compressor(ABC):
    """One way to say a gradient in fewer bytes."""

    @abstractmethod
    def sent_bytes(self, cut: Cut) -> int:
        """Return how many bytes a rank sends in a step for a bucket so cut."""

    def check(self, elements: int) -> None:  # noqa: B027 - most take buckets of any length
        """Raise `ValueError` unless a bucket of so many elements can be compressed."""


class TwoWay(Compressor):
    """Messages that cannot be added up: each rank sums one shard, and compresses the sum again."""

    @abstractmethod
    def compress(self, rows: Tensor, cut: Cut, dice: torch.Generator, first: int = 0) -> Tensor:
        """Return one message of uint8 for each row of float32, of `cut.length` elements each.

        The rows are shards that follow each other, from the `first` on.
        """

    @abstractmethod
    def decompress(self, messages: Tensor, cut: Cut) -> Tensor:
        """Return the rows that the messages stand for."""

    @abstractmethod
    def message_bytes(self, cut: Cut) -> int:
        """Return how long a message is."""

    def subtract(self, rows: Tensor, messages: Tensor, cut: Cut) -> None:
        """Leave in the rows what their messages do not say."""
        rows.sub_(self.decompress(messages, cut))

    def sent_bytes(self, cut: Cut) -> int:
        """Return the messages for the other ranks, and the sum of the own shard to each."""
        return 2 * (cut.shards - 1) * self.message_bytes(cut)


class _Coded(TwoWay):
    """A few bits an element, and a scale for each block."""

    @property
    @abstractmethod
    def values(self) -> tuple[float, ...]:
        """What each code stands for, as a part of the scale."""

    @property
    def bits(self) -> int:
        """How many an element takes."""
        return next(bits for bits in (1, 2, 4, 8) if len(self.values) <= 2**bits)

    @abstractmethod
    def scales(self, blocks: Tensor, cut: Cut, first: int) -> Tensor:
        """Return the scale of each block, as (.., 1); not finite where the block is not."""

    @abstractmethod
    def encode(self, blocks: Tensor, scales: Tensor, dice: torch.Generator) -> Tensor:
        """Return the code of each element."""

    def message_bytes(self, cut: Cut) -> int:
        return cut.length // cut.block * SCALE_BYTES + cut.length * self.bits // BYTE

    def compress(self, rows: Tensor, cut: Cut, dice: torch.Generator, first: int = 0) -> Tensor:
        count = len(rows)
        blocks = rows.view(count, -1, cut.block)
        scales = self.scales(blocks, cut, first)
        packed = codes.pack(self.encode(blocks, scales, dice), self.bits)
        sound = scales.where(scales.isfinite(), torch.nan)
        return torch.cat([sound.view(torch.uint8).view(count, -1), packed.view(count, -1)], dim=1)

    def decompress(self, messages: Tensor, cut: Cut) -> Tensor:
        count = len(messages)
        head = cut.length // cut.block * SCALE_BYTES
        scales = messages[:, :head].reshape(-1).view(torch.float32)
        read = codes.unpack(messages[:, head:], self.values, self.bits)
        return read.view(-1, cut.block).mul_(scales.unsqueeze(-1)).view(count, -1)


@dataclass(frozen=True)
class OneBit(_Coded):
    """The sign of each element; with `scaling` times the mean magnitude of its block, else 1."""

    scaling: bool = True

    @property
    def values(self) -> tuple[float, ...]:
        return (1.0, -1.0)

    def scales(self, blocks: Tensor, cut: Cut, first: int) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(blocks, 1, dim=-1, keepdim=True)
        if not self.scaling:
            return norms.mul_(0).add_(1)
        # The zeros behind the last element have no part in the mean.
        starts = torch.arange(norms.numel(), device=norms.device).view_as(norms) * cut.block
        left = cut.elements - first * cut.length - starts
        return norms.div_(left.clamp_(1, cut.block))

    def encode(self, blocks: Tensor, scales: Tensor, dice: torch.Generator) -> Tensor:  # noqa: ARG002
        return (blocks < 0).view(torch.uint8)


@dataclass(frozen=True)
class Dithering(_Coded):
    """One of `k` levels and a sign for each element, rounded by chance: right in the mean.

    The levels are 1/k, 2/k, .. 1 ("linear"), or 2^(1-k), .. 1/2, 1 ("natural"), of the largest
    magnitude of the block ("max") or its Euclidean norm ("l2"). `seed` is that of the chance.
    """

    k: int
    partition: Literal["linear", "natural"] = "linear"
    normalize: Literal["max", "l2"] = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= LEVELS_MAX:
            raise ValueError(
                f"dithering has 1 to {LEVELS_MAX} levels, and k is {self.k!r}: 1, 7 and "
                f"{LEVELS_MAX} fill 2, 4 and 8 bits"
            )
        if self.partition not in ("linear", "natural"):
            raise ValueError(f"the partition is linear or natural, not {self.partition!r}")
        if self.normalize not in ("max", "l2"):
            raise ValueError(f"normalize is max or l2, not {self.normalize!r}")

    @property
    def values(self) -> tuple[float, ...]:
        levels = range(1, self.k + 1)
        linear = self.partition == "linear"
        positive = [each / self.k if linear else 2.0 ** (each - self.k) for each in levels]
        return (*(-value for value in reversed(positive)), 0.0, *positive)

    def scales(self, blocks: Tensor, cut: Cut, first: int) -> Tensor:  # noqa: ARG002
        order = torch.inf if self.normalize == "max" else 2
        norms: Tensor = torch.linalg.vector_norm(blocks, order, dim=-1, keepdim=True)
        return norms

    def encode(self, blocks: Tensor, scales: Tensor, dice: torch.Generator) -> Tensor:
        steps = self.k if self.partition == "linear" else 2 ** (self.k - 1)
        # A block of zeros, or one that is not finite, has only codes 0 here.
        safe = scales.where((scales > 0) & scales.isfinite(), torch.inf)
        noise = _noise(blocks, dice)
        # Two divisions: the quotient of tiny scales would be infinite.
        scaled = blocks.div(safe).mul_(steps).nan_to_num_(0.0)
        if self.partition == "linear":
            rounded = scaled.add_(noise).floor_().clamp_(-self.k, self.k)
        else:
            size = scaled.abs()
            first, below = (size + noise).floor_(), size < 1
            # Noise below the exponent carries into it as often as the mantissa says.
            exponent = size.view(torch.int32).add_(noise.mul_(2**MANTISSA_BITS).int())
            exponent.bitwise_right_shift_(MANTISSA_BITS).sub_(EXPONENT_BIAS - 1)
            level = torch.where(below, first, exponent)
            rounded = level.clamp_(max=self.k).copysign_(scaled)
        return rounded.add_(self.k).to(torch.uint8)


@dataclass(frozen=True)
class TopK(TwoWay):
    """The `k` elements of the largest magnitude: a number a bucket, or a part of it, as 0.01.

    Each shard has as many, as far as it has elements.
    """

    k: int | float

    def __post_init__(self) -> None:
        _check_k(self.k)

    def check(self, elements: int) -> None:
        _check_elements(self.k, elements)

    def message_bytes(self, cut: Cut) -> int:
        return self._kept(cut) * (INDEX_BYTES + VALUE_BYTES)

    def compress(
        self,
        rows: Tensor,
        cut: Cut,
        dice: torch.Generator,  # noqa: ARG002
        first: int = 0,  # noqa: ARG002
    ) -> Tensor:
        # NaN is larger than all numbers, here.
        indices = rows.abs().topk(self._kept(cut), dim=1, sorted=False).indices
        values = rows.gather(1, indices)
        return torch.cat([indices.int(), values.view(torch.int32)], dim=1).view(torch.uint8)

    def decompress(self, messages: Tensor, cut: Cut) -> Tensor:
        indices, values = self._read(messages)
        return values.new_zeros(len(messages), cut.length).scatter_(1, indices, values)

    def subtract(self, rows: Tensor, messages: Tensor, cut: Cut) -> None:  # noqa: ARG002
        rows.scatter_(1, self._read(messages)[0], 0.0)

    def _kept(self, cut: Cut) -> int:
        # The last shards may have few elements or none, and the others make up for it.
        count = count_of(self.k, cut.elements)
        whole, rest = divmod(cut.elements, cut.length)
        even = -(-count // (whole + (rest > 0)))
        return max(even, -(-(count - rest) // whole)) if whole else even

    def _read(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        indices, values = messages.view(torch.int32).chunk(2, dim=1)
        return indices.long(), values.view(torch.float32)


@dataclass(frozen=True)
class RandomK(Compressor):
    """`k` elements by chance, the same on all ranks: a number a bucket, or a part of it, as 0.01.

    So they are summed as they are. One is drawn from each of k ranges that are equally long, so
    that none is drawn twice. Without error feedback each counts for all of its range: right in the
    mean.
    """

    k: int | float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_k(self.k)

    def check(self, elements: int) -> None:
        _check_elements(self.k, elements)

    def sent_bytes(self, cut: Cut) -> int:
        """Return what a rank sends where the ranks' own services sum, or a ring does."""
        return summed_bytes(count_of(self.k, cut.elements) * VALUE_BYTES, cut.shards)

    def draw(self, elements: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the indices, in order, and for how many elements each counts."""
        count = count_of(self.k, elements)
        # In whole numbers: k ranges that cover all elements, each once.
        bounds = (
            torch.arange(count + 1, device="cpu").mul_(elements).div_(count, rounding_mode="floor")
        )
        lengths = bounds.diff()
        chance = torch.rand(count, generator=dice, dtype=torch.float64, device="cpu")
        return bounds[:-1] + (chance * lengths).long(), lengths


def summed_bytes(payload_bytes: int, ranks: int) -> int:
    """Return what a rank sends for an all-reduce: others' shares, and the own share's sum to all.

    The ranks are each other's services.
    """
    return 2 * (ranks - 1) * payload_bytes // ranks


def count_of(k: int | float, elements: int) -> int:
    """Return how many of so many elements are sent."""
    return k if isinstance(k, int) else min(elements, max(1, round(k * elements)))


def check_gradient(gradient: Tensor) -> None:
    """Raise `TypeError` unless compressors take gradients of this dtype and layout."""
    dtype = gradient.dtype
    if gradient.is_sparse:
        raise TypeError(
            "sparse gradients are not compressed, whose places would have to be said, too; make "
            "them dense (as Embedding with sparse=False does), or train without compression"
        )
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return
    if dtype == torch.float64:
        raise TypeError(
            "gradients of float64 are not compressed: compressors reckon in float32, and would "
            "take away the precision for which float64 was chosen; train in float32, or without "
            "compression"
        )
    raise TypeError(f"gradients of {dtype} are not compressed, only float32, float16 and bfloat16")


def _check_k(k: int | float) -> None:
    if isinstance(k, bool) or not isinstance(k, int | float) or not math.isfinite(k) or k <= 0:
        raise ValueError(f"k is {k!r}: give a number of elements, 1 or more, or a part, as 0.01")
    if isinstance(k, float) and k >= 1:
        raise ValueError(
            f"k is {k!r}: a part of the bucket is below 1; write {int(k)} for a number"
        )


def _check_elements(k: int | float, elements: int) -> None:
    if isinstance(k, int) and k > elements:
        raise ValueError(
            f"k is {k}, and a bucket has {elements} elements: give a part, as 0.01, which fits "
            "buckets of every length"
        )


def _noise(like: Tensor, dice: torch.Generator) -> Tensor:
    """Return numbers in (0, 1), in steps of 2^-16, in half the time of torch.rand."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=dice)
    lanes = words.view(torch.int16)[: like.numel()].view(like.shape)
    half = 0.5 + 2.0 ** -(NOISE_BITS + 1)
    return lanes.to(torch.float32).mul_(2.0**-NOISE_BITS).add_(half)
