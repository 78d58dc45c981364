"""What a rank keeps of a bucket from step to step: what was not sent yet, and momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from fanin.torch.compression.compressors import RandomK, TwoWay
from fanin.torch.compression.cut import Cut


class Memory:
    """Of one bucket.

    Error feedback as BytePS has it ("vanilla"): what a compressor did not say of a gradient is
    added to the next one, at the rank, and once more where a shard's sum is compressed. It is of no
    use any more after a gradient that is not finite.
    """

    def __init__(self, cut: Cut, rank: int, device: torch.device, feedback: bool) -> None:
        self.cut = cut
        self._rank = rank
        self._own = max(0, min(cut.length, cut.elements - rank * cut.length))
        self._unsent = torch.zeros(cut.padded, device=device) if feedback else None
        self._unsent_of_sum = torch.zeros(1, cut.length, device=device) if feedback else None

    def unsent(self) -> tuple[Tensor, Tensor] | None:
        """Return what was not sent yet: of the gradient, and of the own shard's sum."""
        if self._unsent is None or self._unsent_of_sum is None:
            return None
        return self._unsent, self._unsent_of_sum

    def resume(self, unsent: tuple[Tensor, Tensor]) -> None:
        """Go on with what another one of this length had not sent."""
        own = self.unsent()
        assert own is not None  # the checkpoint is of a state with error feedback
        for to, saved in zip(own, unsent, strict=True):
            to.copy_(saved)

    def messages(self, gradient: Tensor, compressor: TwoWay, dice: torch.Generator) -> Tensor:
        """Return what is sent of a gradient, a row for each shard."""
        flat = self._corrected(gradient)
        rows = flat.view(self.cut.shards, self.cut.length)
        messages = compressor.compress(rows, self.cut, dice)
        if self._unsent is not None:
            compressor.subtract(rows, messages, self.cut)
            flat[self.cut.elements :] = 0.0
        return messages

    def sum_message(self, messages: Tensor, compressor: TwoWay, dice: torch.Generator) -> Tensor:
        """Return what is sent of the average of the own shard, which all ranks' messages say."""
        average = compressor.decompress(messages, self.cut).mean(dim=0, keepdim=True)
        average[:, self._own :] = 0.0
        if self._unsent_of_sum is None:
            return compressor.compress(average, self.cut, dice, self._rank)
        unsent = self._unsent_of_sum.add_(average)
        message = compressor.compress(unsent, self.cut, dice, self._rank)
        compressor.subtract(unsent, message, self.cut)
        unsent[:, self._own :] = 0.0
        return message

    def average(self, messages: Tensor, compressor: TwoWay) -> Tensor:
        """Return what the messages of all shards' owners say."""
        return compressor.decompress(messages, self.cut).view(-1)[: self.cut.elements]

    def drawn(
        self, gradient: Tensor, compressor: RandomK, dice: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return indices by chance, and the values there, as they are to be added up."""
        flat = self._corrected(gradient)
        indices, lengths = (
            each.to(flat.device) for each in compressor.draw(self.cut.elements, dice)
        )
        values = flat[indices]
        # Values that are not finite need not be among the drawn ones.
        values.masked_fill_(~is_finite(flat), torch.nan)
        if self._unsent is None:
            values.mul_(lengths)
        else:
            flat[indices] = 0.0
        return indices, values

    def _corrected(self, gradient: Tensor) -> Tensor:
        """Return the gradient with what was left of earlier ones, and zeros behind it."""
        if self._unsent is None:
            flat = torch.zeros(self.cut.padded, device=gradient.device)
        else:
            flat = self._unsent
        flat[: self.cut.elements].add_(gradient)
        return flat


class Momentum:
    """Nesterov's, as BytePS has it: in the gradients before they are compressed.

    Of each parameter by itself, as buckets change.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._velocities: dict[Tensor, Tensor] = {}

    def add_to(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Add it, once the gradients have changed it."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            velocity = self._velocities.get(parameter)
            if velocity is None:
                velocity = torch.zeros_like(gradient, dtype=torch.float32)
                self._velocities[parameter] = velocity
            velocity.mul_(self._factor).add_(gradient)
            gradient.add_(velocity, alpha=self._factor)

    def forget(self) -> None:
        """Begin at rest."""
        self._velocities.clear()

    def velocities(self) -> dict[Tensor, Tensor]:
        """Return those of the parameters that have one, in float32."""
        return self._velocities

    def resume(self, velocities: dict[Tensor, Tensor]) -> None:
        """Go on with others' velocities."""
        self._velocities = {
            parameter: velocity.to(parameter.device, torch.float32, copy=True)
            for parameter, velocity in velocities.items()
        }


def is_finite(flat: Tensor) -> Tensor:
    """Return whether all of at least one element is, as one of bool on its device."""
    # Both are NaN where one element is; and no sum is infinite of elements that are not.
    lowest, highest = torch.aminmax(flat)
    return lowest.isfinite() & highest.isfinite()
