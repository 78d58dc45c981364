"""Mistakes of programs for Horovod's interface: told to all ranks, and all go on."""

from __future__ import annotations

from collections.abc import Callable

import fanin.horovod as hvd
import pytest
import torch
from conftest import Launch
from fanin.horovod.world import world
from ranks import Me
from torch import nn, optim


def with_mistakes(me: Me) -> list[str]:
    hvd.init()
    odd = me.rank % 2
    told = []
    calls: dict[str, Callable[[], object]] = {
        "dtype": lambda: hvd.allreduce(torch.ones(3, dtype=[torch.int32, torch.float32][odd])),
        "shape": lambda: hvd.allreduce(torch.ones(3 + odd)),
        "op": lambda: hvd.allreduce(torch.ones(3), op=[hvd.Min, hvd.Max][odd]),
        "root": lambda: hvd.broadcast(torch.ones(3), odd),
        "columns": lambda: hvd.allgather(torch.ones(3, 1 + odd)),
        "nowhere": lambda: hvd.broadcast(torch.ones(3), 17),
    }
    for name, call in calls.items():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        told.append(f"{name}: {caught.value}")
        assert caught.value.__cause__ is None
    # The other rank does not use this name: it stays under way.
    hvd.allreduce_async(torch.ones(3), name=f"of rank {me.rank}")
    with pytest.raises(ValueError, match="under way already"):
        hvd.allreduce_async(torch.ones(3), name=f"of rank {me.rank}")
    for splits in ([5] * me.world_size, [1], [-1] * me.world_size, torch.ones(me.world_size)):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.ones(4), splits)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum)[0] == me.world_size, "all go on"
    hvd.shutdown()
    return told


def test_mistakes_are_told_to_all_ranks_and_all_go_on(launch: Launch) -> None:
    results = launch(with_mistakes, 2).results()
    assert results[0] == results[1]
    assert "ranks disagree about the dtype: rank 0 has torch.int32, and rank 1" in results[0][0]


def with_gradients_of_other_shapes(me: Me) -> list[str]:
    hvd.init()
    model = nn.Linear(2 + me.rank, 3)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    told = []
    for _ in range(2):
        model(torch.ones(2 + me.rank)).sum().backward()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            optimizer.step()
        told.append(str(caught.value))
        optimizer.zero_grad()
    hvd.shutdown()
    return told


def test_a_step_that_is_refused_can_be_tried_again(launch: Launch) -> None:
    for told in launch(with_gradients_of_other_shapes, 2).results():
        assert len(told) == 2
        assert all("allreduce 'weight': ranks disagree about the shape" in text for text in told)


class NotPickled(Exception):  # noqa: N818 - what it is
    def __init__(self) -> None:
        super().__init__("the disk is full")
        self.what = lambda: None


class NotUnpickled(Exception):  # noqa: N818 - what it is
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} is {where}")


ERRORS = {"pickle": NotPickled(), "unpickle": NotUnpickled("the disk", "full")}


def with_an_error_that_stays_where_it_is(me: Me, which: str) -> list[str]:
    def fail(*_: object) -> None:
        raise ERRORS[which]

    hvd.init()
    pending = hvd.allreduce_async(torch.ones(3), name=f"of rank {me.rank} alone")
    if me.rank == 0:
        vars(world().engine.executor)["execute"] = fail
        with pytest.raises(hvd.HorovodInternalError, match="the disk is full"):
            hvd.barrier()
    else:
        hvd.barrier()  # where nothing is to be done
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(pending)
    hvd.shutdown()
    return [str(caught.value), str(caught.value.__cause__)]


@pytest.mark.parametrize("which", ERRORS)
def test_an_error_that_cannot_travel_is_told_as_a_text(launch: Launch, which: str) -> None:
    first, second = launch(with_an_error_that_stays_where_it_is, 2, which).results()
    assert first == ["the disk is full"] * 2
    assert second == ["the disk is full", f"{type(ERRORS[which]).__name__}: the disk is full"]


def with_a_sparse_gradient(me: Me) -> list[str]:
    hvd.init()
    table = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():  # whole numbers: what a step takes from them is not rounded
        table.weight.copy_(torch.arange(8.0).view(4, 2))
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), op=hvd.Sum
    )
    if me.rank == 0:  # the other one's batch does not come to the table
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    before = table.weight.detach().clone()
    table(torch.tensor([me.rank])).sum().backward()
    optimizer.step()
    hvd.shutdown()
    assert (before - table.weight).sum(1).tolist() == [2.0, 2.0, 0.0, 0.0], "all go on"
    return [str(caught.value)]


def test_a_sparse_gradient_beside_none_is_told(launch: Launch) -> None:
    results = launch(with_a_sparse_gradient, 2).results()
    assert results[0] == results[1]
    assert "allreduce 'weight': ranks disagree about the layout" in results[0][0]
    assert "rank 0 has a sparse tensor, and rank 1 a dense one" in results[0][0]


def of_any_dtype(_: Me) -> list[str]:
    hvd.init()
    reals = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool]
    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    pairs = [torch.complex32, torch.complex64, torch.complex128]
    others = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
    refused = []
    for dtype in [*reals, *whole, *pairs, *others]:
        # Bytes travel for any dtype.
        assert hvd.allgather(torch.zeros(2, dtype=dtype)).shape == (4,)
        for op in hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum:
            called: list[Callable[..., torch.Tensor]] = [hvd.allreduce, hvd.reducescatter]
            for reduced in called if op in (hvd.Sum, hvd.Average) else called[:1]:
                try:
                    result = reduced(torch.ones(2).to(dtype), op=op)
                except hvd.HorovodInternalError as error:
                    told = str(error).partition("'")[0] + str(error).partition(": ")[2]
                    refused.append(told)
                else:
                    two = op is hvd.Sum and dtype is not torch.bool
                    assert result[0].item() == (2 if two else 1), (dtype, op)
    hvd.shutdown()
    return refused


def test_what_nobody_can_reduce_is_told_and_all_else_is_reduced(launch: Launch) -> None:
    none = {
        "complex32": ["Average", "Min", "Max", "Product", "Adasum"],
        "complex64": ["Min", "Max", "Product"],
        "complex128": ["Min", "Max", "Product"],
    }
    for dtype in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"):
        none[dtype] = ["Sum", "Average", "Min", "Max", "Product", "Adasum"]
    refused = [
        f"{kind} there is no {op} of torch.{dtype}: convert the tensor first"
        for dtype, ops in none.items()
        for op in ops
        for kind in (["allreduce", "reducescatter"] if op in ("Sum", "Average") else ["allreduce"])
    ]
    assert launch(of_any_dtype, 2).results() == [refused] * 2


def with_odd_tensors(_: Me) -> None:
    hvd.init()
    number = torch.tensor([1 + 2j])
    sums = [
        hvd.allreduce(number.conj(), op=hvd.Sum),
        hvd.allreduce_(number.clone().conj(), op=hvd.Sum),
        hvd.allgather(number.conj()).sum(0, keepdim=True),
        hvd.broadcast(number.conj(), 0) * 2,
        hvd.alltoall(number.conj().repeat(2)).sum(0, keepdim=True),
        hvd.allreduce_(torch._neg_view(number.conj().resolve_conj()), op=hvd.Sum) * -1,
    ]
    assert [each.item() for each in sums] == [2 - 4j] * len(sums), sums
    with pytest.raises(ValueError, match="clone"):
        hvd.allreduce_(torch.ones(1).expand(2))
    with pytest.raises(ValueError, match="dequantize"):
        hvd.allreduce(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    assert hvd.allreduce(torch.ones(1).expand(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.shutdown()


def test_tensors_that_are_no_plain_memory(launch: Launch) -> None:
    launch(with_odd_tensors, 2).results()
