"""BytePS' interface for PyTorch: `import fanin.byteps.torch as bps` in place of `byteps.torch`.

The names and arguments are those of its last state (February 2022). Beneath is the engine of
`fanin.horovod`: a program may use both at once. `docs/from-byteps.md` says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fanin.horovod import operations
from fanin.horovod.compression import Compression, Compressor
from fanin.horovod.engine import Handle
from fanin.horovod.functions import Parameters
from fanin.horovod.functions import broadcast_optimizer_state as _broadcast_optimizer_state
from fanin.horovod.functions import broadcast_parameters as _broadcast_parameters
from fanin.horovod.objects import broadcast_object
from fanin.horovod.optimizer import DistributedOptimizer as _DistributedOptimizer
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import poll, synchronize
from fanin.horovod.torch_job import init as _init
from fanin.horovod.world import local_rank, local_size, rank, shutdown, size

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]


def init(lazy: bool = True) -> None:  # noqa: ARG001 - BytePS' argument: nothing is started late
    """Join the job of all ranks, as `fanin.horovod.init` does."""
    _init()


def suspend() -> None:
    """Leave the job, until `resume`. All ranks call it, with nothing under way."""
    shutdown()


def resume(
    num_workers: int,
    num_servers: int,  # noqa: ARG001 - fanin's services are not counted
    global_rank: int,
    context: Any = None,  # noqa: ARG001 - of BytePS' other frameworks
) -> None:
    """Join again. The plan is made anew, by the switches that FANIN_SWITCH names by then.

    Raises `ValueError` if there are other ranks than before: `fanin.horovod.elastic` is for that.
    """
    _init()
    if (num_workers, global_rank) != (size(), rank()):
        told = f"rank {global_rank} of {num_workers}"
        found = f"rank {rank()} of {size()}"
        shutdown()
        raise ValueError(
            f"resume says {told}, and this is {found}: ranks that come or go need "
            "fanin.horovod.elastic (docs/horovod.md)"
        )


def declare(name: str) -> int:
    """Return 0: a name is known when it is first used."""
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}: give a text")
    return 0


def push_pull_async(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """Begin to average or add a tensor over all ranks; `synchronize` returns the result.

    Operations of all ranks with one `name` and one `version` belong together. Of those that are
    ready, the ones with the largest `priority` go first.
    """
    return operations.reduce_async(
        tensor, _op(average), _named(name, version), priority, in_place=False
    )


def push_pull_async_inplace(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """Begin to average or add a tensor in place. See `push_pull_async`."""
    return operations.reduce_async(
        tensor, _op(average), _named(name, version), priority, in_place=True
    )


byteps_push_pull = push_pull_async_inplace


def push_pull_inplace(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Tensor:
    """Average or add a tensor in place, and return it. See `push_pull_async`."""
    synchronize(push_pull_async_inplace(tensor, average, name, version, priority))
    return tensor


def push_pull(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
) -> Tensor:
    """Return a tensor averaged or added over all ranks; gradients go through it.

    Raises `ValueError` without a `name`. See `push_pull_async`.
    """
    if name is None:
        raise ValueError("push_pull needs a name: the same on all ranks, and no other tensor's")
    sent, context = compression.compress(tensor)
    summed = _PushPull.apply(sent, average, name, version, priority)
    return compression.decompress(summed, context)


class _PushPull(torch.autograd.Function):
    """The gradient of a sum of all ranks is that of all ranks' losses, summed alike."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *said: Any) -> Tensor:
        ctx.said = said
        result: Tensor = synchronize(push_pull_async(tensor, *said))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        average, name, version, priority = ctx.said
        handle = push_pull_async(gradients[0], average, f"{name}.gradient", version, priority)
        return synchronize(handle), None, None, None, None


def broadcast_parameters(
    params: Parameters,
    root_rank: int,
    prefix: str = "Parameter.",  # noqa: ARG001 - names are the engine's
) -> None:
    """Make parameters what the root's are. See `fanin.horovod.broadcast_parameters`."""
    _broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    prefix: str = "Parameter.",  # noqa: ARG001 - names are the engine's
) -> None:
    """Make an optimizer's state what the root's is."""
    _broadcast_optimizer_state(optimizer, root_rank)


def DistributedOptimizer(  # noqa: N802 - BytePS' name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return an optimizer of the same class that averages gradients over all ranks.

    See `fanin.horovod.DistributedOptimizer`.
    """
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    return _DistributedOptimizer(
        optimizer,
        named_parameters=pairs,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
    )


def _op(average: bool) -> ReduceOp:
    return ReduceOp.Average if average else ReduceOp.Sum


def _named(name: str | None, version: int) -> str | None:
    """Return a name of its own for each version, as several may be under way."""
    return name if name is None or version == 0 else f"{name}/{version}"
