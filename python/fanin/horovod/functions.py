"""Objects, parameters and optimizers' states to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fanin.horovod.errors import Disagreement
from fanin.horovod.operations import allgather_async, broadcast_, broadcast_async_, synchronize
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import Form
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
        return Form.of(tensor)

    def empty(form: Form) -> Tensor:
        tensors.append(torch.empty(form.shape, dtype=form.dtype, device=form.device))
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


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object, which must be one that `pickle` takes.

    Raises `HorovodInternalError` on all ranks if `pickle` does not take it.
    """
    words, fails = torch.empty(0, dtype=torch.uint8, device="cpu"), None
    if rank() == root_rank:
        words, fails = _pickled(obj)
    head = torch.tensor([words.numel(), fails is not None], device="cpu")
    broadcast_(head, root_rank, name and f"{name}.length", process_set)
    length, failed = head.tolist()
    if rank() != root_rank:
        words = torch.empty(length, dtype=torch.uint8, device="cpu")
    broadcast_(words, root_rank, name and f"{name}.bytes", process_set)
    if failed:
        raise Disagreement(f"rank {root_rank}'s object {_unpickled(words)}") from fails
    return obj if rank() == root_rank else _unpickled(words)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the ranks' order.

    Raises `HorovodInternalError` on all ranks if `pickle` does not take the object of one.
    """
    words, fails = _pickled(obj)
    head = torch.tensor([[words.numel(), fails is not None]], device="cpu")
    of_heads = allgather_async(head, name and f"{name}.length", process_set)
    of_words = allgather_async(words, name and f"{name}.bytes", process_set)
    lengths, failed = synchronize(of_heads).unbind(1)
    ranks = set_ranks(process_set)
    assert len(lengths) == len(ranks)
    of_ranks = torch.split(synchronize(of_words), lengths.tolist())
    for each, of_rank, words in zip(ranks, failed.tolist(), of_ranks, strict=True):
        if of_rank:
            raise Disagreement(f"rank {each}'s object {_unpickled(words)}") from fails
    return [_unpickled(words) for words in of_ranks]


def _pickled(obj: Any) -> tuple[Tensor, Exception | None]:
    """Return an object's bytes; those of a text, and the error, if it has none."""
    fails = None
    try:
        words = pickle.dumps(obj)
    except Exception as error:
        fails = error
        words = pickle.dumps(f"cannot be pickled: {type(error).__name__}: {error}")
    return torch.frombuffer(bytearray(words), dtype=torch.uint8), fails


def _unpickled(words: Tensor) -> Any:
    return pickle.loads(words.numpy().tobytes())


def _mapped(tree: Any, leaf: type, replace: Callable[[Any], Any]) -> Any:
    """Return a state with each leaf of a type replaced, in the order that the state gives."""
    if isinstance(tree, leaf):
        return replace(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, leaf, replace) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf, replace) for value in tree)
    return tree
