"""What becomes of tensors in each collective, as memory that the network reads and writes.

The network works in place, in memory that lies in one piece. A tensor that does not, is negated or
conjugated by a bit, or shares its memory with another one of the same call, is copied, and copied
back in the end. Tensors of a device are copied on it, on the current stream, and staged from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

from fanin import _fanin
from fanin.torch.works.work import Back, Part, Request, write

DTYPES: Final[dict[torch.dtype, _fanin.DType]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.int8: "int8",
}


def all_reduce(tensor: torch.Tensor, average: bool) -> Part:
    """Sum a tensor, or average it."""
    memory, back = _in_place(tensor)
    return Part(Request([memory], DTYPES[memory.dtype], average=average), back)


def reduce(tensor: torch.Tensor, average: bool, root: int, rank: int) -> Part:
    """Sum a tensor for one rank."""
    memory, back = _in_place(tensor)
    dtype = DTYPES[tensor.dtype]
    request = Request([memory], dtype, collective="reduce", root=root, average=average)
    return Part(request, back if rank == root else [])


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Part:
    """Give all ranks what one has."""
    memory, back = _in_place(tensor)
    request = Request([memory], None, collective="broadcast", root=root)
    return Part(request, [] if rank == root else back)


def all_gather(outputs: Sequence[torch.Tensor], source: torch.Tensor, rank: int) -> Part:
    """Give all ranks what each has; `outputs` are like `source`, one a rank."""
    own = outputs[rank]
    if not _same(own, source):
        # It may lie anywhere among the outputs.
        shared = own.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        write(own, (source.clone() if shared else source).reshape(own.shape))
    if _disjoint(outputs):
        placed = [_in_place(output) for output in outputs]
    else:
        placed = [_staged(output) for output in outputs]
    request = Request([memory for memory, _ in placed], None, collective="all_gather")
    return Part(request, [pair for _, back in placed for pair in back])


def all_gather_single(
    output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int
) -> Part:
    """Give all ranks what each has, one behind the other."""
    memory, back = _in_place(output)
    part = all_gather(memory.view(-1).chunk(world_size), source.reshape(-1), rank)
    # Slices of memory in one piece need nothing themselves.
    part.back = back
    return part


def reduce_scatter(
    output: torch.Tensor, sources: Sequence[torch.Tensor], average: bool, rank: int
) -> Part:
    """Sum one slice for each rank; `sources` are like `output`, one a rank, and stay."""
    own = sources[rank]
    others = [source for other, source in enumerate(sources) if other != rank]
    in_place = _same(output, own)
    if _disjoint([output, *others]) and (in_place or _disjoint([output, own])):
        if not in_place:
            write(output, own.reshape(output.shape))
        memory, back = _in_place(output)
        parts = [_in_place(source)[0] for source in others]
    else:
        # It may lie among what the others are to get, and they among each other.
        memory = _staged(own)[0]
        back = [(output.detach(), memory.view(output.shape))]
        parts = [_staged(source)[0] for source in others]
    parts.insert(rank, memory)
    dtype = DTYPES[output.dtype]
    request = Request(parts, dtype, collective="reduce_scatter", average=average)
    return Part(request, back)


def is_in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are what its memory holds, in their order, without gaps."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in one piece."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor.detach())


def _in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Back]:
    # Detached: writing into a leaf that requires grad is no business of autograd here.
    target = tensor.detach()
    # The binding wants elements at addresses that are multiples of their size.
    aligned = target.data_ptr() % target.element_size() == 0
    if is_in_one_piece(target) and aligned:
        return target, []
    return _staged(target)


def _staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Back]:
    staged = copied(tensor)
    return staged, [(tensor.detach(), staged)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory."""
    bits = [(each.is_neg(), each.is_conj()) for each in (one, other)]
    return (
        one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and bits[0] == bits[1]
    )


def _disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two of them have memory in common; those that only interleave count as if."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return all(one[1] <= other[0] for one, other in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((count - 1) * stride for count, stride in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
