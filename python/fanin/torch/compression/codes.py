"""Numbers of 1, 2 or 4 bits, packed into bytes; and read again, as the values that they stand for.

All of it are tensor operations: alike on every device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes below 2^bits along the last dimension, whose length fills whole bytes."""
    while bits < 8:
        # Two neighbours are the bytes of one number; the upper one moves down beside the lower.
        pairs = codes.view(torch.int16)
        codes = pairs.bitwise_or(pairs >> (8 - bits)).to(torch.uint8)
        bits *= 2
    return codes


def unpack(packed: Tensor, values: tuple[float, ...], bits: int) -> Tensor:
    """Return float32 `values[code]` for each of the packed codes, along the last dimension."""
    rows = _rows(values, bits).to(packed.device)
    chosen = rows.index_select(0, packed.reshape(-1).int())
    return chosen.view(*packed.shape[:-1], -1)


@cache
def _rows(values: tuple[float, ...], bits: int) -> Tensor:
    """Return what each byte stands for."""
    # A code that no compressor writes stands for NaN: it must not pass for a gradient.
    known = torch.full((2**bits,), torch.nan, dtype=torch.float32, device="cpu")
    known[: len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
    bytes_ = torch.arange(256, device="cpu")
    shifts = torch.arange(0, 8, bits, device="cpu")
    return known[(bytes_[:, None] >> shifts) % 2**bits]
