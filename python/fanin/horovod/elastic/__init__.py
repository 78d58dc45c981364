"""Training that goes on with the ranks that are left when others are gone.

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

`fanin run --min-np` starts ranks for it. Under a launcher that ends all ranks with the first that
fails, as torchrun does, nobody is left: there a training begins anew, from what it wrote to a disk.
docs/horovod.md says what a launcher must do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fanin.horovod.elastic.running import run
from fanin.horovod.elastic.state import HostUpdateResult, ObjectState, State

if TYPE_CHECKING:
    from fanin.horovod.elastic.sampler import ElasticSampler
    from fanin.horovod.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "HostUpdateResult", "ObjectState", "State", "TorchState", "run"]

_MODULES = {"ElasticSampler": "sampler", "TorchState": "torch_state"}
"""Where the names that need torch are: other frameworks have the rest without it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
