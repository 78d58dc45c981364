"""`DistributedOptimizer`: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fanin._elastic_members import ELASTIC
from fanin.horovod import operations
from fanin.horovod.adasum_optimizer import AdasumSteps
from fanin.horovod.compression import Compression, Compressor
from fanin.horovod.execution import TorchExecutor
from fanin.horovod.objects import broadcast_object
from fanin.horovod.parameters import Passes, all_of, name_added, named, when_ready
from fanin.horovod.process_sets import ProcessSet, global_process_set
from fanin.horovod.requests import ReduceOp
from fanin.horovod.submission import Adasum, Average, synchronize
from fanin.horovod.world import size, world
from fanin.torch.optimizers import overlap as overlapped
from fanin.torch.optimizers.wrapper import with_steps

Groups = int | Sequence[Sequence[Tensor]]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    overlap: torch.nn.Module | None = None,
) -> Any:
    """Return an optimizer of the same class that reduces gradients over all ranks.

    Each gradient is reduced as soon as it is there, while `backward` goes on; `step` waits for all
    of them. The state is the given optimizer's, which is not used any more.

    `named_parameters` names each parameter of the optimizer, alike on all ranks: then ranks may
    have their gradients in different orders. `backward_passes_per_step` passes are added up before
    they are reduced. `gradient_predivide_factor` divides gradients before the sum, and the rest of
    the average comes after it. `groups` are lists of parameters, or a number of lists to make, that
    are reduced together. `sparse_as_dense` sums sparse gradients as dense ones. Gradients are
    reduced among `process_set`; other ranks step with their own.

    `op=hvd.Adasum` steps first, and reduces what the steps change by Adasum.

    `overlap` is the model whose next forward pass overlaps with the sums, which Horovod has not:
    the result is a `fanin.torch.DistributedOptimizer`, and `ValueError` is raised where another
    argument asks for what that has not.
    """
    op = ReduceOp(op)
    if overlap is not None:
        unlike = {
            "compression": compression is not Compression.none,
            "backward_passes_per_step": backward_passes_per_step != 1,
            "op": op is not Average,
            "gradient_predivide_factor": gradient_predivide_factor != 1.0,
            "groups": bool(groups or num_groups),
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set is not global_process_set,
        }
        return _overlapped(optimizer, overlap, [name for name, is_so in unlike.items() if is_so])
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is a part of the average: op must be Average")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step is {backward_passes_per_step}, and must be 1 or more"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated: give groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = named(optimizer, named_parameters)
    passes = Passes(names, backward_passes_per_step)
    if op is Adasum and size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum is for all ranks: leave process_set out")
        made = with_steps(optimizer, AdasumSteps)
        made.prepare_adasum(names, passes, compression)
        return made
    made = with_steps(optimizer, ReducedSteps)
    reduction = Reduction(
        names,
        passes,
        compression,
        Average if op is Adasum else op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
    )
    made.prepare(reduction, _checked(groups))
    return made


def _overlapped(optimizer: torch.optim.Optimizer, model: torch.nn.Module, unlike: list[str]) -> Any:
    executor = world().engine.executor  # raises before `init`
    if not isinstance(executor, TorchExecutor):
        raise ValueError(f"{world().framework.name} is initialized, and has no tensors of PyTorch")
    if unlike:
        raise ValueError(
            f"overlap sums gradients one by one, and averages those of all ranks: leave out "
            f"{', '.join(unlike)}, or overlap"
        )
    if os.environ.get(ELASTIC):
        raise ValueError(
            "overlap is not for elastic jobs, whose ranks come and go between two steps: leave it "
            "out"
        )
    # The default group may be another backend's.
    made = overlapped.DistributedOptimizer(optimizer, model, executor.world)
    # Programs that clip gradients ask for it; `step` knows by itself what was waited for.
    made.skip_synchronize = contextlib.nullcontext
    return made


class Reduction:
    """How gradients are reduced, and which of them are under way."""

    def __init__(
        self,
        names: dict[Tensor, str],
        passes: Passes,
        compression: Compressor,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names = names
        self.passes = passes
        self.process_set = process_set
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._places: dict[Tensor, int] = {}
        self._recurring: dict[tuple[Tensor, ...], operations.RecurringAllreduce] = {}
        self._under_way: dict[tuple[Tensor, ...], tuple[Any, list[Any]]] = {}

    @property
    def begun(self) -> set[Tensor]:
        """The parameters whose gradients are being reduced."""
        return {parameter for group in self._under_way for parameter in group}

    def forget(self) -> None:
        """Begin anew."""
        self._under_way = {}
        self.passes.begin(self.passes.of)

    def start(self, parameters: tuple[Tensor, ...]) -> None:
        """Reduce gradients together; one that is not there is zeros, as others may have it."""
        gradients = [self._gradient(parameter) for parameter in parameters]
        name = self.names[parameters[0]]
        if len(gradients) == 1 and gradients[0].is_sparse:
            handle: Any = operations.sparse_allreduce_async(
                gradients[0], name, self._op, self.process_set
            )
            self._under_way[parameters] = handle, []
            return
        sent = [self._compression.compress(gradient) for gradient in gradients]
        tensors = [tensor for tensor, _ in sent]
        handle = self._allreduce(parameters).start(tensors)
        self._under_way[parameters] = handle, [context for _, context in sent]

    def finish(self) -> None:
        """Wait for all gradients, and put them into their parameters."""
        under_way = self._under_way
        self.forget()
        # All, as the names of those that are not waited for could not be used again.
        all_of(partial(self._put, parameters, *sent) for parameters, sent in under_way.items())

    def _put(self, parameters: tuple[Tensor, ...], handle: Any, contexts: list[Any]) -> None:
        if callable(handle):
            parameters[0].grad = handle()
            return
        for parameter, result, context in zip(
            parameters, synchronize(handle), contexts, strict=True
        ):
            _put(parameter, self._compression.decompress(result, context))

    def _allreduce(self, parameters: tuple[Tensor, ...]) -> operations.RecurringAllreduce:
        if len(self._places) != len(self.names):  # some were added
            self._places = {parameter: place for place, parameter in enumerate(self.names)}
            self._recurring = {}
        known = self._recurring.get(parameters)
        if known is None:
            scales = 1.0, 1.0
            if self._op is Average:
                scales = 1.0 / self._predivide, self._predivide
            # Parameters are named from the front.
            layer = min(self._places[parameter] for parameter in parameters), len(self._places)
            known = self._recurring[parameters] = operations.RecurringAllreduce(
                self.names[parameters[0]], self._op, scales, self.process_set, layer
            )
        return known

    def _gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        return gradient.to_dense() if gradient.is_sparse and self._sparse_as_dense else gradient


class ReducedSteps(torch.optim.Optimizer):
    """What is put before an optimizer's class: its steps wait for the gradients of all ranks."""

    _reduction: Reduction

    def prepare(self, reduction: Reduction, groups: Groups | None) -> None:
        """Reduce each gradient when it is there."""
        self._reduction = reduction
        self._synchronizes = True
        self._synchronized = False
        self._required: set[Tensor] = set()
        self._groups: dict[Tensor, tuple[Tensor, ...]] = {}
        if not reduction.process_set.included():
            return
        parameters = [p for each in self.param_groups for p in each["params"] if p.requires_grad]
        if groups is not None:
            self._groups = _grouped(parameters, groups, reduction)
        self._watch(parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as all ranks do; they are named by their place."""
        super().add_param_group(param_group)
        added = name_added(self, self._reduction.names)
        self._reduction.passes.add(added)
        if self._reduction.process_set.included():
            self._watch([parameter for parameter in added if parameter.requires_grad])

    @property
    def backward_passes_per_step(self) -> int:
        """How many passes are added up before their sum is reduced."""
        return self._reduction.passes.each

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        return self._reduction.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up another number of passes from now on."""
        self._reduction.passes.each = passes
        self._reduction.passes.begin(self._reduction.passes.of)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a state; what was under way is forgotten."""
        self._reduction.forget()
        self._synchronized = False
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Wait for all gradients; those of parameters that had none in this step, too."""
        if self._reduction.process_set.included():
            for parameter in self._in_order(self._required - self._reduction.begun):
                self._start(parameter)
            self._reduction.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` not wait, as `synchronize` was called before: to clip gradients, say."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Step with the gradients of all ranks; a closure's, each time that it is called."""
        if closure is not None:
            return super().step(self._reducing(closure))
        if self._synchronizes:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize(): the gradients, "
                    "which synchronize() has reduced, are reduced a second time",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    def zero_grad(self, *args: Any, **keywords: Any) -> None:
        """Forget gradients; raises `AssertionError` while they are being reduced."""
        if self._reduction.begun:
            raise AssertionError(
                "zero_grad() is called between backward() and step(), while gradients are being "
                "reduced: call it before backward()"
            )
        super().zero_grad(*args, **keywords)

    def _watch(self, parameters: list[Tensor]) -> None:
        self._required.update(parameters)
        for parameter in parameters:
            when_ready(parameter, self._gradient_is_there)

    def _reducing(self, closure: Any) -> Any:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return reduced

    def _gradient_is_there(self, parameter: Tensor) -> None:
        if self._reduction.passes.ready(parameter):
            group = self._groups.get(parameter, (parameter,))
            if all(self._reduction.passes.is_ready(each) for each in group):
                self._reduction.start(group)

    def _start(self, parameter: Tensor) -> None:
        if parameter not in self._reduction.begun:
            self._reduction.start(self._groups.get(parameter, (parameter,)))

    def _in_order(self, parameters: set[Tensor]) -> list[Tensor]:
        return [p for each in self.param_groups for p in each["params"] if p in parameters]


def _put(parameter: Tensor, reduced: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = reduced.to_sparse(gradient.sparse_dim())
    elif gradient.data_ptr() != reduced.data_ptr():
        gradient.copy_(reduced)


def _checked(groups: Groups | None) -> Groups | None:
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups is {groups}: a number above 0, or lists of parameters")
        return groups
    flat = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, Tensor) for parameter in flat):
        raise ValueError("groups are lists of parameters, and something in them is no tensor")
    if max(Counter(map(id, flat)).values(), default=0) > 1:
        raise ValueError("a parameter is in groups twice")
    return groups


def _grouped(
    parameters: list[Tensor], groups: Groups, reduction: Reduction
) -> dict[Tensor, tuple[Tensor, ...]]:
    """Return the group of each parameter, in the order of the first rank of the process set."""
    first = reduction.process_set.all_ranks()[0]
    names = broadcast_object(
        [reduction.names[parameter] for parameter in parameters],
        first,
        process_set=reduction.process_set,
    )
    places = {name: place for place, name in enumerate(names)}
    ordered = sorted(parameters, key=lambda parameter: places[reduction.names[parameter]])
    if isinstance(groups, int):
        least, more = divmod(len(ordered), groups)
        lengths = [least + 1] * more + [least] * (groups - more)
        rest = iter(ordered)
        lists = [tuple(next(rest) for _ in range(length)) for length in lengths]
    else:
        of_parameters = set(parameters)
        lists = [tuple(p for p in group if p in of_parameters) for group in groups]
    return {parameter: group for group in lists for parameter in group}
