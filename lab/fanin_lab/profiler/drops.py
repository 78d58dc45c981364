"""Which packets of gradients are lost, and what workers make of those that came (DLCP §2.3).

A tensor is cut into packets of 1,400 bytes, of which none has values of two tensors (§3.2.3). A
packet is lost whole. The paper loses them among some layers, or some magnitudes, and so does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from torch import Generator, Tensor

Among = Literal["all", "front", "middle", "back", "small", "medium", "large"]
AMONG: Final[tuple[Among, ...]] = get_args(Among)
"""Of which packets some are lost: all; those of a fifth of the layers; a fifth by magnitude."""
LAYERS: Final[tuple[Among, ...]] = ("front", "middle", "back")
MAGNITUDES: Final[tuple[Among, ...]] = ("small", "medium", "large")
PACKET_BYTES = 1400
"""Of gradients in a packet (§2.3, observation 3)."""
GROUP = 0.2
"""Which part of the layers, or of the packets, a group has (Figure 5)."""


@dataclass(frozen=True)
class Losses:
    """What is lost."""

    among: Among = "all"
    probability: float = 0.0
    """Of each packet among these."""


class Packets:
    """The packets of one message: some tensors of one type, which are handed over at once."""

    def __init__(self, sizes: Sequence[int], layers: Sequence[int], element_bytes: int = 4) -> None:
        """Cut tensors of these numbers of elements; ``layers`` says which layer each one is."""
        import torch

        whole = PACKET_BYTES // element_bytes
        lengths, self._layers = [], []
        for size, layer in zip(sizes, layers, strict=True):
            cut = [min(whole, size - start) for start in range(0, size, whole)]
            lengths += cut
            self._layers += [layer] * len(cut)
        self._lengths = torch.tensor(lengths, device="cpu")
        self.of_element = torch.repeat_interleave(
            torch.arange(len(lengths), device="cpu"), self._lengths
        )
        """The number of the packet that each element is in."""

    def __len__(self) -> int:
        return len(self._layers)

    def received(self, message: Tensor, losses: Losses, layers: int, dice: Generator) -> Tensor:
        """Return for each packet of a worker's flat message whether it comes; drawn anew each time.

        The model has so many ``layers``. On the CPU, wherever the message is.
        """
        import torch

        lost = torch.rand(len(self), generator=dice, device="cpu") < losses.probability
        if losses.among in LAYERS:
            first, last = _group(LAYERS.index(losses.among), layers)
            here = torch.tensor(self._layers, device="cpu")
            lost &= (first <= here) & (here < last)
        elif losses.among in MAGNITUDES:
            first, last = _group(MAGNITUDES.index(losses.among), len(self))
            chosen = torch.zeros(len(self), dtype=torch.bool, device="cpu")
            chosen[self._magnitudes(message).argsort()[first:last]] = True
            lost &= chosen
        return ~lost

    def _magnitudes(self, message: Tensor) -> Tensor:
        """Return the mean magnitude of each packet, as senders tag them (§3.2.2)."""
        import torch

        sums = torch.zeros(len(self), dtype=torch.float32, device=message.device)
        sums.index_add_(0, self.of_element.to(message.device), message.detach().abs().float())
        return sums.cpu() / self._lengths


def mean_of_received(total: Tensor, workers_in: Tensor) -> Tensor:
    """Return the mean over the workers whose block came (Appendix A), and 0 where nobody's did.

    ``workers_in`` has for each element how many that are.
    """
    return total / workers_in.clamp(min=1)


def _group(number: int, of: int) -> tuple[int, int]:
    """Return where the first, middle or last group begins, and where it ends; none is empty."""
    size = max(1, round(GROUP * of))
    begin = (0, (of - size) // 2, of - size)[number]
    return begin, begin + size
