"""Parameters that are to step yet: whoever reads one waits, whatever reference leads to it.

Modules, lists, `param_groups` and closures all have the same `Parameter` object. Until it has
stepped, it is of a class whose `__torch_function__` lets it step first, and then does what was
asked. Torch calls that for each operation, method and attribute of a tensor.

An `autograd.Function` is none of these, nor is what it calls in C++. Whoever applies one to a
parameter waits for it, too; but not by an `apply` that was kept from before (`install`).

Code that is handed the object past torch's Python functions does not see the class: an extension
in C++, TorchScript, `torch.func`. So the object's memory is away, too. Meanwhile it has memory that
raises an error when it is read.

Another tensor of the same memory (`p.data`, `p.detach().numpy()`, a parameter in shared memory) is
out of reach: `is_kept_elsewhere` tells, and such a parameter may not wait.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fanin.torch.patches.installed import once

UNREADABLE = (
    "this parameter has not stepped, and is read past torch's Python functions (by an extension in "
    "C++, TorchScript or torch.func): call synchronize() of its DistributedOptimizer after step()"
)


class Unread:
    """A parameter that is told of before it is read; but for its gradient, which is no secret."""

    plain: ClassVar[type[Tensor]]
    """The class that it has else."""
    tell: ClassVar[Callable[[Sequence[Tensor] | None], None]]
    """Lets these parameters step, and makes them plain; None: all."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        del types
        keywords = keywords or {}
        if function in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **keywords)
        if found := list(_unread((arguments, keywords), cls)):
            cls.tell(found)
            return function(*arguments, **keywords)
        # Parameters inside objects that only the function knows: it may be any of them.
        cls.tell(None)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **keywords)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        # The copy has the class that the parameter has then.
        type(self).tell([cast(Tensor, self)])
        return copy.deepcopy(self, known)


_gradient: Any = Tensor.grad
_OF_GRADIENTS = {_gradient.__get__, _gradient.__set__, _gradient.__delete__}


class Reading:
    """Lets `tell` be called before parameters are read that were put away or marked."""

    def __init__(self, tell: Callable[[Sequence[Tensor] | None], None]) -> None:
        install()
        self._tell = tell
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        self._away: dict[Tensor, Tensor] = {}
        # Tensors without memory to read, by dtype, device and shape.
        self._unreadable: dict[Any, Tensor] = {}

    def put_away(self, parameter: Tensor) -> None:
        """Let whoever reads a parameter wait, or get an error, until it is brought back."""
        make_plain(parameter)
        self._away[parameter] = parameter.data
        parameter.data = self._unreadable_of(parameter)
        self.mark(parameter)

    def bring_back(self, parameter: Tensor) -> None:
        """Give a parameter its memory, so that it can step, and be read by those who wait."""
        make_plain(parameter)
        memory = self._away.pop(parameter, None)
        if memory is not None:
            parameter.data = memory

    def mark(self, parameter: Tensor) -> None:
        """Let whoever reads a parameter tell first."""
        make_plain(parameter)
        plain = type(parameter)
        if plain not in self._classes:
            names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
            own = {"plain": plain, "tell": self._tell, **names}
            make: Any = type(plain)
            self._classes[plain] = make(plain.__name__, (Unread, plain), own)
        parameter.__class__ = self._classes[plain]

    def _unreadable_of(self, parameter: Tensor) -> Tensor:
        """Return a tensor as the parameter is, whose memory raises an error when it is read."""
        kind = parameter.dtype, parameter.device, parameter.shape
        if kind not in self._unreadable:
            element = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            memory = element.untyped_storage()._cdata
            torch._C._set_storage_data_ptr_access_error_msg(memory, UNREADABLE)
            self._unreadable[kind] = element.expand(parameter.shape)
        return self._unreadable[kind]


def make_plain(parameter: Tensor) -> None:
    """Let nobody tell before a parameter is read."""
    marked = type(parameter)
    if issubclass(marked, Unread):
        parameter.__class__ = marked.plain


def is_kept_elsewhere(parameter: Tensor) -> bool:
    """Whether a parameter's memory can be read, but not by the parameter.

    It is if another tensor or an array has it, another process does, or a compiled program, which
    asks for the parameter's class before it reads it.
    """
    if "_dynamo_static_input_type" in vars(parameter):
        return True
    memory = parameter.untyped_storage()
    others = torch._C._storage_Use_Count(memory._cdata) > _USES
    return others or (parameter.device.type == "cpu" and memory.is_shared())


# By a tensor, and by the object for it that was asked for.
_USES = 2


@once("a parameter that an autograd.Function is applied to must be read by torch before")
def install() -> None:
    """Let parameters step that an `autograd.Function` is applied to."""
    function: Any = torch.autograd.Function
    apply = vars(function)["apply"]

    @functools.wraps(apply)
    def reading(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        for parameter in _unread((arguments, keywords), Unread):
            cast(Any, type(parameter)).tell([parameter])
        return apply.__get__(None, cls)(*arguments, **keywords)

    function.apply = classmethod(reading)


def _unread(values: Any, kind: type[Unread]) -> Iterator[Tensor]:
    """Yield the parameters of a kind in a function's arguments."""
    if isinstance(values, kind):
        yield cast(Tensor, values)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _unread(value, kind)
    elif isinstance(values, dict):
        yield from _unread(list(values.values()), kind)
