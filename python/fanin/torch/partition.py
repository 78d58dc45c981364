"""The parts of a model that a GOAT root plans one by one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch

from fanin._settings import SUB_MODELS_MAX

# What a parameter's gradient has on its way: float32 or int32.
BYTES = 4


def sub_models(parameters: Iterable[torch.Tensor], *, target_bytes: int = 1 << 20) -> str:
    """Return the setting `sub_models` for a model: parts of about `target_bytes` as they travel.

        sub_models = fanin.torch.sub_models(model.parameters(), target_bytes=4 << 20)
        options = fanin.torch.Options(protocol="goat", sub_models=sub_models)

    Parameters that are trained are taken in the order in which their gradients come, the last one
    first, as DDP's buckets are. Neighbours are merged as long as they fit together, and what is
    longer is split into equal parts. It depends on the shapes alone, so it is the same on all
    ranks of a model.

    Raises `ValueError` where that makes no part, or more than a job may have.
    """
    most = max(target_bytes // BYTES, 1)
    lengths = [each.numel() for each in parameters if each.requires_grad and each.numel()]
    parts: list[int] = []
    open_ended = False  # whether the last part is of whole layers, and others may join it
    for length in reversed(lengths):
        if open_ended and parts[-1] + length <= most:
            parts[-1] += length
            continue
        count = -(-length // most)
        if len(parts) + count > SUB_MODELS_MAX:
            raise ValueError(
                f"target_bytes is {target_bytes}: the model, of {sum(lengths)} elements, has more "
                f"than {SUB_MODELS_MAX} such parts; choose a larger one"
            )
        whole, longer = divmod(length, count)
        parts += [*repeat(whole + 1, longer), *repeat(whole, count - longer)]
        open_ended = count == 1
    if not parts:
        raise ValueError("the model has no parameter that is trained")
    return ",".join(map(str, parts))
