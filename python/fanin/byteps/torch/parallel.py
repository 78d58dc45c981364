"""`DistributedDataParallel` under BytePS' name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import parallel

from fanin.horovod.compression import Compression, Compressor


def DistributedDataParallel(  # noqa: N802 - BytePS' name
    module: nn.Module,
    device_ids: Sequence[Any] | None = None,
    broadcast_buffers: bool = True,
    compression: Compressor = Compression.none,
) -> parallel.DistributedDataParallel:
    """Return torch's own, on the group that `fanin.byteps.torch.init` has made.

    Raises `ValueError` for a compression: FANIN_WIRE_DTYPE does that here.
    """
    if compression is not Compression.none:
        raise ValueError("DDP compresses nothing itself: set FANIN_WIRE_DTYPE=bfloat16")
    return parallel.DistributedDataParallel(
        module, device_ids=device_ids, broadcast_buffers=broadcast_buffers
    )
