"""Gradients in fewer bytes: BytePS's compressors, as a communication hook of DDP.

    state = fanin.torch.CompressionState(compression.OneBit())
    model.register_comm_hook(state, fanin.torch.compression_hook)

`compressors` says what is sent of a gradient, `cut` how a bucket is divided among the ranks,
`memory` keeps what was not sent for the next step, `hook` sends and receives. Works on any process
group, fanin's or another; docs/compression.md says which compressor to take.
"""

from fanin.torch.compression.compressors import (
    Compressor,
    Dithering,
    OneBit,
    RandomK,
    TopK,
    TwoWay,
)
from fanin.torch.compression.hook import CompressionState, compression_hook

__all__ = [
    "CompressionState",
    "Compressor",
    "Dithering",
    "OneBit",
    "RandomK",
    "TopK",
    "TwoWay",
    "compression_hook",
]
