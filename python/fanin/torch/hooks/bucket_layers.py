"""Which layers of a model a bucket of DDP has: the later it comes in a pass, the further in front.

DDP numbers a model's buckets as their gradients come, the last layers' first, and tells at the end
of a pass alone how many there are. So a bucket has a layer from the second pass on in which the
model has it. All ranks have the same buckets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from fanin._layers import Layer


class BucketLayers:
    """The layers of the buckets of some models, which take turns."""

    def __init__(self) -> None:
        # By the first parameter of a bucket: how many buckets its model has.
        self._counts: Any = WeakTensorKeyDictionary()
        self._passed: list[torch.Tensor] = []

    def of(self, bucket: GradBucket) -> Layer | None:
        """Return the layer of the bucket that a pass has come to; None if it is not known yet."""
        index, first = bucket.index(), bucket.parameters()[0]
        count: int | None = self._counts.get(first)
        if index == 0:
            self._passed = []
        self._passed.append(first)
        if bucket.is_last():
            self._counts.update(dict.fromkeys(self._passed, index + 1))
            self._passed = []
        # A model may have got more buckets.
        return None if count is None or index >= count else (count - 1 - index, count)
