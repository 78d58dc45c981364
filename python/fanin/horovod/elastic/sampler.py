"""Samples of a data set, shared anew among the ranks when their number changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fanin.horovod.world import rank, size


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the samples that no rank has had in this epoch.

    A field of a `TorchState`. The program calls `record_batch` after each batch, and `set_epoch`
    at the end of each epoch. Samples are shuffled by `seed` and the epoch, alike on all ranks; some
    come twice where they cannot be divided evenly.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    @property
    def processed_indices(self) -> list[int]:
        """The samples of this epoch that are done, in the order of the data set."""
        indices: list[int] = self._done.nonzero().view(-1).tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples."""
        self.epoch = epoch
        self._done = torch.zeros(len(self.dataset), dtype=torch.bool, device="cpu")
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has had its batch of this number, counted since the last sharing."""
        first = batch_idx * batch_size
        self._done[self._turns[first : first + batch_size]] = True

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note samples that this rank has had; the others hear of it when the state is synced."""
        self._done[torch.tensor(list(indices), dtype=torch.int64, device="cpu")] = True

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch has come."""
        return {"epoch": self.epoch, "processed_indices": self._done.nonzero().view(-1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a `state_dict` was made."""
        self.unite([state_dict])

    def unite(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Go on in the epoch of the first, without what is done in it by any."""
        self.epoch = state_dicts[0]["epoch"]
        self._done = torch.zeros(len(self.dataset), dtype=torch.bool, device="cpu")
        for each in state_dicts:
            if each["epoch"] == self.epoch:
                self._done[
                    torch.as_tensor(each["processed_indices"], dtype=torch.int64, device="cpu")
                ] = True
        self.reset()

    def reset(self) -> None:
        """Share what is left of the epoch among the ranks that there are."""
        seed = self.seed + self.epoch if self.shuffle else None
        self._turns = turns(self._done, seed, size())
        self._place = rank()

    def __iter__(self) -> Iterator[int]:
        return iter(self._turns[:, self._place].tolist())

    def __len__(self) -> int:
        return len(self._turns)


def turns(done: Tensor, seed: int | None, ranks: int) -> Tensor:
    """Return which sample is whose: a row for each turn, and in it a column for each rank."""
    if seed is None:
        order = torch.arange(len(done), device="cpu")
    else:
        order = torch.randperm(
            len(done), generator=torch.Generator().manual_seed(seed), device="cpu"
        )
    left = order[~done[order]]
    length = -(-len(left) // ranks)
    # Its beginning again, where the last turn is not full.
    return left.repeat(ranks)[: length * ranks].view(length, ranks)
