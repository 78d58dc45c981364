"""`TorchState`: models, optimizers and samplers of PyTorch."""

from __future__ import annotations

from typing import Any, Final

import torch

from fanin.horovod.elastic.sampler import ElasticSampler
from fanin.horovod.elastic.state import ObjectState
from fanin.horovod.functions import broadcast_optimizer_state, broadcast_parameters
from fanin.horovod.objects import allgather_object, broadcast_object
from fanin.horovod.world import rank
from fanin.torch.optimizers.overlap import OverlappedSteps

_LOADING: Final = ("state_dict", "load_state_dict")


class TorchState(ObjectState):
    """A state of a model, an optimizer and other objects; each is an attribute.

    Modules, optimizers, learning rate schedulers, `ElasticSampler`s and all else that has
    `state_dict` and `load_state_dict`, also among the keywords, stay the objects that they are: a
    copy of their `state_dict` is saved, and rank 0's is loaded into them. All other objects are as
    in `ObjectState`. Raises `ValueError` for an optimizer with `overlap`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        if any(isinstance(value, OverlappedSteps) for value in (optimizer, *kwargs.values())):
            raise ValueError(
                "an optimizer with overlap has sums of one job, and elastic training makes others: "
                "make it without overlap"
            )
        super().__init__(broadcast_object, rank, model=model, optimizer=optimizer, **kwargs)

    def sync(self) -> None:
        """Take rank 0's; of samplers, what any rank has done in rank 0's epoch."""
        for value in self._now().values():
            match value:
                case torch.nn.Module():
                    broadcast_parameters(value.state_dict(), 0)
                case torch.optim.Optimizer():
                    broadcast_optimizer_state(value, 0)
                case ElasticSampler():
                    value.unite(allgather_object(value.state_dict()))
                case _ if self._loads(value):
                    # Not the object: a scheduler's copy would have a copy of its optimizer.
                    state = broadcast_object(value.state_dict())
                    if rank() != 0:
                        value.load_state_dict(state)
        super().sync()

    def reset(self) -> None:
        """Share what is left of each sampler's epoch among the ranks."""
        for value in self._now().values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def _loads(self, value: Any) -> bool:
        return all(callable(getattr(value, name, None)) for name in _LOADING)
