"""Every collective of tensors of every dtype and layout in memory, with every operation.

The value is that of contiguous tensors, reckoned here; what lies between, before and behind a
tensor's elements stays, and so does what is only read.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import fake_device
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import Options
from fanin.torch.backend import FaninBackend, backend_of
from fanin.torch.backend.gloo_tensors import Handed
from fanin.torch.works import collectives
from ranks import Me, wait_until
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

SHAPE = (2, 3, 2, 4)
# Fills the memory between a tensor's elements, and around them.
BESIDE = 7

SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
# Gloo knows none of these.
MOVED = (*SUMMED, torch.int16, torch.uint16, torch.uint64, torch.complex128, torch.float8_e4m3fn)
OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def is_refused(op: str, dtype: torch.dtype) -> bool:
    """Whether Gloo refuses an operation; of integers fanin divides the sums."""
    if dtype == torch.bool:
        return op == "AVG"
    if dtype.is_complex:
        return op not in ("SUM", "AVG")
    return dtype.is_floating_point and op in BITS


def reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """What Gloo gives of contiguous tensors, and NCCL of truths."""
    if op in BITS:
        return reduce(BITS[op], tensors)
    stacked = torch.stack(list(tensors))
    if stacked.dtype == torch.bool:
        return stacked.all(0) if op in ("MIN", "PRODUCT") else stacked.any(0)
    if op in ("MIN", "MAX"):
        return stacked.amin(0) if op == "MIN" else stacked.amax(0)
    if op == "PRODUCT":
        return stacked.prod(0).to(stacked.dtype)
    total = stacked.sum(0).to(stacked.dtype)
    if op == "SUM":
        return total
    floats = stacked.dtype.is_floating_point or stacked.dtype.is_complex
    return total / len(tensors) if floats else total.div(len(tensors), rounding_mode="trunc")


@dataclass
class Laid:
    """A tensor, and all of the memory that it is a part of."""

    tensor: Tensor
    memory: Tensor

    def bits(self) -> Tensor:
        return self.memory.contiguous().view(torch.uint8)


def beside(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.full(tuple(shape), BESIDE).to(like.dtype)


def contiguous(values: Tensor) -> Laid:
    memory = torch.empty_like(values)
    return Laid(memory, memory)


def behind(values: Tensor) -> Laid:
    memory = beside([values.numel() + 9], values)
    return Laid(memory[5 : 5 + values.numel()].view(values.shape), memory)


def stepped(values: Tensor) -> Laid:
    memory = beside([*values.shape[:-1], 3 * values.shape[-1]], values)
    return Laid(memory[..., 1::3], memory)


def a_column(values: Tensor) -> Laid:
    memory = beside([*values.shape, 3], values)
    return Laid(memory[..., 1], memory)


def transposed(values: Tensor) -> Laid:
    memory = torch.empty_like(values.permute(3, 2, 1, 0), memory_format=torch.contiguous_format)
    return Laid(memory.permute(3, 2, 1, 0), memory)


def channels_last(values: Tensor) -> Laid:
    memory = torch.empty_like(values, memory_format=torch.channels_last)
    return Laid(memory, memory)


def expanded(values: Tensor) -> Laid:
    memory = values[..., :1].clone()
    return Laid(memory.expand(values.shape), memory)


Layout = Callable[[Tensor], Laid]
SOME: tuple[Layout, ...] = (contiguous, behind, stepped, a_column, transposed, channels_last)


def layouts(rank: int) -> dict[str, Iterator[Layout]]:
    """Each layout again and again; and another one each time, on each rank in another order."""
    alike = {each.__name__: itertools.repeat(each) for each in (*SOME, expanded)}
    return {**alike, "mixed": itertools.cycle((*SOME[rank:], *SOME[:rank]))}


class Case:
    """One rank's tensors of one collective."""

    def __init__(self, me: Me, layout: str, laid: Iterator[Layout], dtype: torch.dtype) -> None:
        self.rank = me.rank
        self.n = me.world_size
        self._layout = layout
        self._layouts = laid
        self._dtype = dtype
        # The memory that was handed over, and the memory that it is to equal in the end.
        self._laid: list[tuple[Laid, Laid]] = []

    def values(self, rank: int, part: int = 0) -> Tensor:
        """A part of what a rank has: of which all sums, products and averages are exact."""
        numbers = torch.arange(math.prod(SHAPE)).view(SHAPE)
        if self._layout == "expanded":
            numbers = numbers - numbers % SHAPE[-1]
        numbers = (numbers * 5 + rank + 2 * part) % 3
        exact = numbers if self._dtype == torch.bool else 6 * numbers
        return (exact * (1 + 2j) if self._dtype.is_complex else exact).to(self._dtype)

    def everybody(self, part: int = 0) -> list[Tensor]:
        return [self.values(rank, part) for rank in range(self.n)]

    def lay(self, values: Tensor, becomes: Tensor | None = None) -> Tensor:
        """A tensor of these values; it is to have others in the end, or the same."""
        layout = next(self._layouts)
        laid, expected = layout(values), layout(values)
        write(laid, values)
        write(expected, values if becomes is None else becomes)
        self._laid.append((laid, expected))
        return laid.tensor

    def is_right(self) -> bool:
        return all(torch.equal(laid.bits(), expected.bits()) for laid, expected in self._laid)


def write(laid: Laid, values: Tensor) -> None:
    if laid.tensor.stride()[-1] == 0:
        laid.memory.copy_(values[..., :1])
    else:
        laid.tensor.copy_(values)


# Each takes a case, and what torch's function takes besides tensors.


def all_reduce(case: Case, op: str, **how: Any) -> Any:
    tensor = case.lay(case.values(case.rank), reduced(op, case.everybody()))
    return dist.all_reduce(tensor, op=OPS[op], **how)


def all_reduces_in_one(case: Case, op: str, async_op: bool) -> Any:
    tensors = [
        case.lay(case.values(case.rank, part), reduced(op, case.everybody(part)))
        for part in range(2)
    ]
    with _coalescing_manager(async_ops=async_op) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, op=OPS[op])
    return manager if async_op else None


def reduce_to_one(case: Case, op: str, **how: Any) -> Any:
    root = 1 % case.n
    total = reduced(op, case.everybody()) if case.rank == root else None
    return dist.reduce(case.lay(case.values(case.rank), total), root, op=OPS[op], **how)


def reduce_scatter(case: Case, op: str, **how: Any) -> Any:
    parts = [case.lay(case.values(case.rank, part)) for part in range(case.n)]
    output = case.lay(case.values(0, 2), reduced(op, case.everybody(case.rank)))
    return dist.reduce_scatter(output, parts, op=OPS[op], **how)


def reduce_scatter_single(case: Case, op: str, **how: Any) -> Any:
    parts = [case.values(case.rank, part) for part in range(case.n)]
    output = case.lay(case.values(0, 2), reduced(op, case.everybody(case.rank)))
    return dist.reduce_scatter_single(output, case.lay(torch.cat(parts)), op=OPS[op], **how)


def broadcast(case: Case, **how: Any) -> Any:
    root = 1 % case.n
    return dist.broadcast(case.lay(case.values(case.rank), case.values(root)), root, **how)


def all_gather(case: Case, **how: Any) -> Any:
    outputs = [case.lay(case.values(0, 2), values) for values in case.everybody()]
    return dist.all_gather(outputs, case.lay(case.values(case.rank)), **how)


def all_gather_single(case: Case, **how: Any) -> Any:
    output = case.lay(torch.cat([case.values(0, 2)] * case.n), torch.cat(case.everybody()))
    return dist.all_gather_single(output, case.lay(case.values(case.rank)), **how)


def gather(case: Case, **how: Any) -> Any:
    root = 1 % case.n
    outputs = [case.lay(case.values(0, 2), values) for values in case.everybody()]
    if case.rank != root:
        case._laid.clear()
        return dist.gather(case.lay(case.values(case.rank)), None, root, **how)
    return dist.gather(case.lay(case.values(case.rank)), outputs, root, **how)


def scatter(case: Case, **how: Any) -> Any:
    root = 1 % case.n
    parts = [case.lay(values) for values in case.everybody()] if case.rank == root else None
    return dist.scatter(case.lay(case.values(0, 2), case.values(case.rank)), parts, root, **how)


def all_to_all(case: Case, **how: Any) -> Any:
    parts = [case.lay(case.values(case.rank, part)) for part in range(case.n)]
    outputs = [case.lay(case.values(0, 2), values) for values in case.everybody(case.rank)]
    return dist.all_to_all(outputs, parts, **how)


def all_to_all_single(case: Case, **how: Any) -> Any:
    parts = [case.values(case.rank, part) for part in range(case.n)]
    whole = torch.cat(case.everybody(case.rank))
    # The input has to lie in one piece.
    return dist.all_to_all_single(case.lay(torch.zeros_like(whole), whole), torch.cat(parts), **how)


ADDING = (
    all_reduce,
    all_reduces_in_one,
    reduce_to_one,
    reduce_scatter,
    reduce_scatter_single,
)
MOVING = (broadcast, all_gather, all_gather_single, gather, scatter)


def cases() -> Iterator[tuple[Any, torch.dtype, str | None]]:
    for dtype in SUMMED:
        served = [op for op in OPS if not is_refused(op, dtype)]
        yield from ((adds, dtype, op) for adds in ADDING for op in served)
        if not dtype.is_complex:  # torch refuses it
            yield all_to_all, dtype, None
            yield all_to_all_single, dtype, None
    yield from ((moves, dtype, None) for moves in MOVING for dtype in MOVED)


def every_case(me: Me, said: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        me.init(pg_options=Options(**said))
    wrong = []
    ends = itertools.cycle(("sync", "wait", "future", "poll"))
    laid = layouts(me.rank)
    for (collective, dtype, op), layout in itertools.product(cases(), laid):
        if collective is all_to_all and layout == "expanded":
            continue  # torch refuses it
        case, end = Case(me, layout, laid[layout], dtype), next(ends)
        if collective in (reduce_scatter, reduce_scatter_single) and end != "sync":
            end = "wait"  # Gloo's works of these know nothing else
        how: dict[str, Any] = {"async_op": end != "sync"}
        if op is not None:
            how["op"] = op
        try:
            work = collective(case, **how)
            if end == "future" and collective is not all_reduces_in_one:
                work.get_future().wait()
            elif end == "poll" and collective is not all_reduces_in_one:
                wait_until(work.is_completed, "the collective")
            if work is not None:
                work.wait()
        except RuntimeError as error:
            wrong.append(f"{collective.__name__} {op} {dtype} {layout} {end}: {error}")
            continue
        if not case.is_right():
            wrong.append(f"{collective.__name__} {op} {dtype} {layout} {end}")
    # At the end: after such a reduce, Gloo serves no other one.
    for dtype, op in itertools.product(SUMMED, OPS):
        if is_refused(op, dtype):
            for collective in (all_reduce, reduce_scatter, reduce_to_one):
                with pytest.raises((RuntimeError, ValueError)):
                    collective(Case(me, "contiguous", laid["contiguous"], dtype), op)
    return wrong


@pytest.mark.parametrize("machines", ["a", "aab", "abc"])
def test_where_a_tensor_lies_makes_no_difference(launch: Launch, machines: str) -> None:
    ranks = launch(on_machines, len(machines), machines, at="")
    assert ranks.results() == [[]] * len(machines)


def on_machines(me: Me, machines: str) -> list[str]:
    return every_case(me, {"machine": f"machine {machines[me.rank]}"})


# Who does what ATP does not.
OTHERS = ("own services", "gloo")


def left_to_others(me: Me, others: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if others == "gloo":
            patch.setattr(FaninBackend, "_make_own", lambda *_: None)
        wrong = every_case(me, {"protocol": "atp"})
        has_own = backend_of(None)._own.made is not None
    return wrong if has_own == (others == "own services") else ["others did it"]


@pytest.mark.parametrize("others", OTHERS)
def test_nor_where_switches_leave_much_to_others(launch: Launch, atp: str, others: str) -> None:
    assert launch(left_to_others, 2, others, at=atp).results() == [[]] * 2


def from_a_device(me: Me, others: str) -> list[str]:
    waited_for = fake_device.hands_over()
    wrong = left_to_others(me, others)
    return wrong if waited_for else ["nothing was copied back"]


@pytest.mark.parametrize("others", OTHERS)
def test_nor_where_others_get_copies_of_what_is_on_a_device(
    launch: Launch, atp: str, others: str
) -> None:
    assert launch(from_a_device, 2, others, at=atp).results() == [[]] * 2


def test_a_bit_that_conjugates_or_negates_is_resolved() -> None:
    for tensor in (torch.tensor([1 + 2j, 3 - 4j]).conj(), torch._neg_view(torch.tensor([1.0, -2]))):
        plain = tensor.resolve_conj().resolve_neg()
        handed = Handed()
        for given in (handed.reads(tensor), handed.writes([tensor])[0]):
            assert torch.equal(given.view(torch.uint8), plain.view(torch.uint8))
        request = collectives.broadcast(tensor, 0, 0).request
        assert request is not None
        assert torch.equal(request.memory[0].view(torch.uint8), plain.view(torch.uint8))
        handed.writes([tensor])[0].copy_(2 * plain)
        handed.finish()
        assert torch.equal(tensor, 2 * plain)
