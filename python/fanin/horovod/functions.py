"""Parameters and optimizers' states to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fanin.horovod.execution import dtype_of, form_of
from fanin.horovod.objects import broadcast_object
from fanin.horovod.operations import broadcast_async_
from fanin.horovod.requests import Form
from fanin.horovod.submission import synchronize
from fanin.horovod.world import rank

Parameters = Mapping[str, Any] | Iterable[Any]


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Make parameters what the root's are.

    `params` is a `state_dict()`, or what `named_parameters()` or `parameters()` gives, in an order
    that is the same on all ranks unless it has names.
    """
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"parameters are a dict or a list, and not {type(params).__name__}")
    handles = []
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is no tensor, but {type(tensor).__name__}: leave it out")
        handles.append(broadcast_async_(tensor.detach(), root_rank, name))
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None
) -> None:
    """Make an optimizer's state and settings what the root's are.

    Where the root's optimizer has no state yet, parameters without a gradient get one of zeros.
    `model` is not needed.
    """
    del model
    tensors: list[Tensor] = []

    def form(tensor: Tensor) -> Form:
        tensors.append(tensor.detach())
        return form_of(tensor)

    def empty(form: Form) -> Tensor:
        tensors.append(torch.empty(form.shape, dtype=dtype_of(form), device=form.device))
        return tensors[-1]

    ours = rank() == root_rank
    skeleton = _mapped(optimizer.state_dict(), Tensor, form) if ours else None
    skeleton = broadcast_object(skeleton, root_rank)
    state = None if ours else _mapped(skeleton, Form, empty)
    for handle in [broadcast_async_(tensor, root_rank) for tensor in tensors]:
        synchronize(handle)
    if state is not None:
        optimizer.load_state_dict(state)
    if not skeleton["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def _mapped(tree: Any, leaf: type, replace: Callable[[Any], Any]) -> Any:
    """Return a state with each leaf of a type replaced, in the order that the state gives."""
    if isinstance(tree, leaf):
        return replace(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, leaf, replace) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf, replace) for value in tree)
    return tree
