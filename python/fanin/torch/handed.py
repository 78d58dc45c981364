"""Tensors as Gloo takes them: an address, and how many elements are there.

Gloo looks neither at strides nor at the bits that negate or conjugate a tensor, it does not know
every dtype, and of CUDA tensors it takes some collectives alone. A tensor of the host that lies in
one piece is handed over as it is. Any other is copied to the host; Gloo gets the copy, and what
Gloo writes there is written to the tensor when the work is done. What is only moved crosses as
bytes where Gloo does not know its dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from fanin.torch.collectives import is_in_one_piece
from fanin.torch.work import write

# What Gloo moves by itself, in every collective.
DTYPES: Final = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
)

_Tensors = TypeVar("_Tensors")


class Handed:
    """The tensors of one call of Gloo.

    Each is handed over by the method that says what Gloo does with it: a tensor, or lists of them,
    however deep. If the call only moves elements, `moved` are all of its tensors.
    """

    def __init__(self, *moved: Any) -> None:
        dtypes = {tensor.dtype for tensor in _flat(moved)}
        # Tensors of several dtypes are Gloo's to refuse.
        self._as_bytes = len(dtypes) == 1 and not dtypes <= DTYPES
        self._lock = threading.Lock()
        self._written: list[Tensor] = []
        self._back: list[tuple[Tensor, Tensor]] = []
        self._divisor = 1
        # By the identity of what was handed over in its place, which is kept alive here.
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def reads(self, tensors: _Tensors, *, strict: bool = False) -> _Tensors:
        """Hand over what Gloo reads. If `strict`, what torch refuses by its layout stays so."""
        return self._each_but_refused(tensors, self._read, strict)

    def writes(self, tensors: _Tensors, *, strict: bool = False) -> _Tensors:
        """Hand over what Gloo writes, or reads and writes. `strict` as above."""
        return self._each_but_refused(tensors, self._write, strict)

    def spoils(self, tensors: _Tensors) -> _Tensors:
        """Hand over what Gloo reads, and writes although nobody is to see it."""
        return cast(_Tensors, self._each(tensors, self._spoil))

    def divide(self, divisor: int) -> None:
        """Let what Gloo writes be divided in the end, truncated towards zero."""
        self._divisor = divisor

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something to do once Gloo is done."""
        return bool(self._back) or self._divisor != 1

    def finish(self) -> None:
        """Give the tensors what Gloo wrote: once, by whoever learns first that Gloo is done."""
        with self._lock:
            if not self.is_unfinished:
                return
            # In inference mode also tensors that were made in it may be written to. Detached:
            # writing into a leaf that requires grad is no business of autograd here.
            with torch.inference_mode():
                for tensor in self._written if self._divisor != 1 else ():
                    tensor.detach().div_(self._divisor, rounding_mode="trunc")
            for tensor, copy in self._back:
                write(tensor, copy)
            # On which stream it is read is not known here.
            for device in {tensor.device for tensor, _ in self._back if _is_on_device(tensor)}:
                torch.cuda.synchronize(device)
            self._let_go()

    def drop(self) -> None:
        """Leave the tensors as they are: Gloo has failed."""
        with self._lock:
            self._let_go()

    def restored(self, value: Any) -> Any:
        """Return a result of Gloo with the caller's tensors in it."""
        if not self._tensors:
            return value
        if isinstance(value, Tensor):
            known = self._tensors.get(id(value))
            return value if known is None else known[1]
        if isinstance(value, list):
            return [self.restored(each) for each in value]
        return value

    def _let_go(self) -> None:
        self._written, self._back, self._divisor = [], [], 1

    def _each_but_refused(self, tensors: _Tensors, hand: Any, strict: bool) -> _Tensors:
        refused = strict and not all(map(is_in_one_piece, _flat([tensors])))
        return tensors if refused else cast(_Tensors, self._each(tensors, hand))

    def _each(self, tensors: Any, hand: Any) -> Any:
        if isinstance(tensors, Tensor):
            return self._handed(tensors, hand(tensors)) if _is_strided(tensors) else tensors
        return [self._each(each, hand) for each in tensors]

    def _handed(self, tensor: Tensor, stand: Tensor) -> Tensor:
        if self._as_bytes:
            stand = stand.detach().view(-1).view(torch.uint8)
        if stand is not tensor:
            self._tensors[id(stand)] = stand, tensor
        return stand

    def _read(self, tensor: Tensor) -> Tensor:
        is_there = is_in_one_piece(tensor) and not _is_on_device(tensor)
        return tensor if is_there else _on_host(tensor)

    def _write(self, tensor: Tensor) -> Tensor:
        stand = self._read(tensor)
        self._written.append(stand)
        if stand is not tensor:
            self._back.append((tensor, stand))
        return stand

    def _spoil(self, tensor: Tensor) -> Tensor:
        return _on_host(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy that lies in one piece, once the current stream has made the tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _flat(tensors: Iterable[Any]) -> Iterator[Tensor]:
    for each in tensors:
        if isinstance(each, Tensor):
            yield each
        else:
            yield from _flat(each)
