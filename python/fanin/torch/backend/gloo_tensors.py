"""Tensors as Gloo takes them: an address, and how many elements are there.

Gloo looks neither at strides nor at the bits that negate or conjugate a tensor, it does not know
every dtype, and of CUDA tensors it takes some collectives alone. A tensor of the host that lies in
one piece is handed over as it is. Any other is copied to the host; Gloo gets the copy, and what
Gloo writes there is written to the tensor when the work is done. What is only moved crosses as
bytes where Gloo does not know its dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from fanin.torch.works.collectives import is_in_one_piece
from fanin.torch.works.work import write

# Gloo moves these without help, in every collective.
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

    def reads(self, tensors: _Tensors, *, as_laid: bool = False) -> _Tensors:
        """Hand over what Gloo reads; if `as_laid`, in its layout, which Gloo may refuse."""
        return cast(_Tensors, self._each(tensors, _as_laid if as_laid else _in_one_piece))

    def writes(self, tensors: _Tensors, *, as_laid: bool = False) -> _Tensors:
        """Hand over what Gloo writes, or reads and writes; `as_laid` as above."""
        stand_for = _as_laid if as_laid else _in_one_piece
        return cast(_Tensors, self._each(tensors, lambda each: self._written_to(each, stand_for)))

    def fills(self, tensors: _Tensors) -> _Tensors:
        """Hand over what Gloo writes as a whole, and never reads."""
        return cast(_Tensors, self._each(tensors, lambda each: self._written_to(each, _blank)))

    def spoils(self, tensors: _Tensors) -> _Tensors:
        """Hand over what Gloo reads, and writes although nobody is to see it."""
        return cast(_Tensors, self._each(tensors, _on_host))

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
                _wait_for_stream(device)
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

    def _written_to(self, tensor: Tensor, stand_for: Callable[[Tensor], Tensor]) -> Tensor:
        stand = stand_for(tensor)
        self._written.append(stand)
        if stand is not tensor:
            self._back.append((tensor, stand))
        return stand


def _in_one_piece(tensor: Tensor) -> Tensor:
    is_there = is_in_one_piece(tensor) and not _is_on_device(tensor)
    return tensor if is_there else _on_host(tensor)


def _as_laid(tensor: Tensor) -> Tensor:
    if not (_is_on_device(tensor) or tensor.is_neg() or tensor.is_conj()):
        return tensor
    if torch._debug_has_internal_overlap(tensor) == 1:  # expanded
        return tensor
    return _on_host(tensor, tensor.stride())


def _blank(tensor: Tensor) -> Tensor:
    if not _is_on_device(tensor):
        return _in_one_piece(tensor)
    _wait_for_stream(tensor.device)  # which may still read what was there
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _on_host(tensor: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """Return a copy, in one piece or so laid, once the current stream has made the tensor."""
    if stride is None:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def _wait_for_stream(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


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
