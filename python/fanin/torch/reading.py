"""Who reads a module's parameters first waits until they have stepped, however they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Wait = Callable[[Iterable[Tensor | None]], None]


class Parameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, which tells of those that are about to be read.

    A module finds each attribute that is a parameter here, and so do `parameters`, `state_dict`,
    `load_state_dict` and other modules: one that uses a child's weight and never calls the child,
    as `MultiheadAttention` does.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.waits: list[Wait] = []

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._wait((parameter,))
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict."""
        self._wait((super().get(name),))
        return super().get(name, default)

    def values(self) -> Any:
        """As of any dict."""
        self.wait()
        return super().values()

    def items(self) -> Any:
        """As of any dict."""
        self.wait()
        return super().items()

    def wait(self) -> None:
        """Wait for all of them."""
        self._wait(super().values())

    def _wait(self, parameters: Iterable[Tensor | None]) -> None:
        for wait in self.waits:
            wait(parameters)

    def __reduce__(self) -> Any:
        # What is copied or written to a file is a module like any other.
        return dict, (dict(self.items()),)


def watch(model: nn.Module, wait: Wait) -> Iterator[Tensor]:
    """Let `wait` be called with parameters before they are read, and return those of the model.

    Also before a module's forward pass: some, as recurrent ones do, have their parameters in lists
    of their own.
    """
    for module in model.modules():
        parameters: Any = module._parameters
        if not isinstance(parameters, Parameters):
            parameters = module._parameters = Parameters(parameters)
            module.register_forward_pre_hook(_before_forward)
        if wait not in parameters.waits:
            parameters.waits.append(wait)
        for parameter in dict.values(parameters):
            if parameter is not None:
                yield parameter


def unwatch(model: nn.Module, wait: Wait) -> None:
    """Let `wait` be called no more."""
    for module in model.modules():
        parameters = module._parameters
        if isinstance(parameters, Parameters) and wait in parameters.waits:
            parameters.waits.remove(wait)


def _before_forward(module: nn.Module, _: Any) -> None:
    parameters = module._parameters
    if isinstance(parameters, Parameters):  # a copy of the module has others
        parameters.wait()
