"""Gradients as they are sent: small neighbours packed together, large ones cut into partitions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from fanin.torch.backend.sub_models import packed

PARTITIONS = 64
"""Of how many a model is made, if they are not too short then, or too long."""
PARTITION_BYTES_MIN = 1 << 19
"""As long as it takes that each of eight services sums a part of it: shorter ranges are not cut."""
PARTITION_BYTES_MAX = 1 << 22
"""BytePS' (§6.1)."""
FIRST_PACK_BYTES = 1 << 14
"""The first layers' gradients come last and are needed first: what is packed with them waits for
them, and they for it. Each pack after the first has up to twice as much as the one before."""


class Piece:
    """One large parameter, or several small ones: their gradients' sums, and the works of these."""

    def __init__(self, parameters: Sequence[Tensor], flat: Tensor, partitions: int) -> None:
        self.parameters = parameters
        self.partitions = flat.tensor_split(partitions)
        lengths = [parameter.numel() for parameter in parameters]
        pieces = zip(torch.split(flat, lengths), parameters, strict=True) if parameters else ()
        self.gradients = [piece.view(parameter.shape) for piece, parameter in pieces]
        """A place for each parameter's gradient."""
        self.works: list[Work | None] = [None] * partitions
        self.left = set(range(len(parameters)))
        """Of which parameters this pass has no gradient yet."""

    def put(self, place: int, share: float) -> None:
        """Put a parameter's gradient in, times a rank's share of the average; zeros if it has none.

        As DDP does, to the bit.
        """
        gradient = self.parameters[place].grad
        if gradient is None:
            self.gradients[place].zero_()
        else:
            torch.mul(gradient.detach(), share, out=self.gradients[place])
        self.left.discard(place)

    def wait(self) -> None:
        """Wait for its sums, if they are under way."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.works = [None] * len(self.works)

    def is_there(self) -> bool:
        """Whether all its sums are there, so that nobody would wait."""
        return all(work is None or work.is_completed() for work in self.works)

    def begin(self) -> None:
        """Begin another pass."""
        self.wait()
        self.left = set(range(len(self.parameters)))


def pieces(
    parameters: Iterable[Tensor], kind: Callable[[Tensor], Hashable] = lambda _: None
) -> Iterator[Piece]:
    """Return pieces of parameters in their order; of each there is one dtype, device and kind."""
    alike: dict[tuple[torch.dtype, torch.device, Hashable], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device, kind(parameter)), []).append(parameter)
    size_bytes = sum(each.nbytes for of in alike.values() for each in of)
    partition = min(max(size_bytes // PARTITIONS, PARTITION_BYTES_MIN), PARTITION_BYTES_MAX)
    for (dtype, device, _), of in alike.items():
        most = partition // dtype.itemsize
        rest = iter(of)
        for pack in packed((each.numel() for each in of), _growing(most, dtype.itemsize)):
            flat = torch.zeros(sum(pack), dtype=dtype, device=device)
            together = [next(rest) for _ in pack]
            yield Piece(together, flat, max(-(-flat.numel() // most), 1))


def _growing(most: int, itemsize: int) -> Iterator[int]:
    """Return how many elements each pack has at most."""
    limit = FIRST_PACK_BYTES // itemsize
    while True:
        yield min(limit, most)
        limit *= 2
