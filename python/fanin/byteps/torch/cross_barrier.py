"""`CrossBarrier`: sums that also hide under the next forward pass (BytePS §6.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fanin.horovod.compression import Compression, Compressor
from fanin.torch import DistributedOptimizer


def CrossBarrier(  # noqa: N802 - BytePS' name
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,  # noqa: ARG001 - the model's
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,  # noqa: ARG001 - nothing has to be ended
) -> Any:
    """Return `fanin.torch.DistributedOptimizer`, which takes every optimizer and not three of them.

    `fanin.byteps.torch.init` comes first. Raises `ValueError` for a compression, or for several
    passes a step: FANIN_WIRE_DTYPE and `no_sync` do these here.
    """
    if compression is not Compression.none:
        raise ValueError("CrossBarrier compresses nothing itself: set FANIN_WIRE_DTYPE=bfloat16")
    if backward_passes_per_step != 1:
        raise ValueError("CrossBarrier takes one pass a step: use no_sync() of what it returns")
    return DistributedOptimizer(optimizer, model)
