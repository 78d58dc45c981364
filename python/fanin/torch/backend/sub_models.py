"""The parts of a model: those that a GOAT root plans one by one, and packs of small tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch

from fanin._settings import SUB_MODELS_MAX

# A gradient's element is float32 or int32 on its way.
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
    for pack in packed(reversed(lengths), repeat(most)):
        length = sum(pack)
        count = -(-length // most)
        if len(parts) + count > SUB_MODELS_MAX:
            raise ValueError(
                f"target_bytes is {target_bytes}: the model, of {sum(lengths)} elements, has more "
                f"than {SUB_MODELS_MAX} such parts; choose a larger one"
            )
        whole, longer = divmod(length, count)
        parts += [*repeat(whole + 1, longer), *repeat(whole, count - longer)]
    if not parts:
        raise ValueError("the model has no parameter that is trained")
    return ",".join(map(str, parts))


def packed(lengths: Iterable[int], mosts: Iterable[int]) -> list[list[int]]:
    """Return neighbours' lengths in packs, each of up to its `mosts`; what is longer is alone."""
    packs: list[list[int]] = []
    most = 0
    limits = iter(mosts)
    for length in lengths:
        if packs and sum(packs[-1]) + length <= most:
            packs[-1].append(length)
        else:
            packs.append([length])
            most = next(limits)
    return packs
