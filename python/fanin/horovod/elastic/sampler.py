"""Samples of a data set, shared anew among the ranks when their number changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

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
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has had a batch of so many samples."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch has come."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a `state_dict` was made."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left of the epoch among the ranks that there are."""
        self.num_replicas = size()
        self.rank = rank()
        samples = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(samples)
        self.remaining_indices = samples[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return iter(
            left[place % len(left)]
            for place in range(self.rank, self.total_size, self.num_replicas)
        )

    def __len__(self) -> int:
        return self.num_samples
