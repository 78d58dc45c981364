"""What the switch does not serve goes to Gloo, and a program does not notice."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from conftest import Launch
from ranks import Me
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager


def other_reductions(me: Me) -> None:
    me.init()
    rank, n = me.rank, me.world_size
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.float32, torch.int32):
        tensor = torch.tensor([rank + 1, 5 - rank], dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert tensor.tolist() == [n, 5]
    tensor = torch.full((3,), rank + 1.0, dtype=torch.float64)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [n * (n + 1) / 2] * 3
    product = torch.tensor([2.0])
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
    assert product.item() == 2**n
    bits = torch.tensor([1 << rank], dtype=torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == 2**n - 1
    complex_sum = torch.full((2,), 1 + 2j)
    dist.all_reduce(complex_sum)
    assert complex_sum.tolist() == [n * (1 + 2j)] * 2
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (n,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * n


def test_other_ops_dtypes_and_layouts(launch: Launch) -> None:
    launch(other_reductions, 2).results()


def other_collectives(me: Me) -> None:
    me.init()
    rank, n = me.rank, me.world_size
    tensor = torch.full((4,), float(rank))
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [1.0] * 4

    gathered = [torch.empty(2) for _ in range(n)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    assert [part[0].item() for part in gathered] == list(range(n))
    flat = torch.empty(2 * n)
    dist.all_gather_single(flat, torch.full((2,), float(rank)))
    assert flat[::2].tolist() == list(range(n))

    scattered = torch.empty(2)
    dist.reduce_scatter(scattered, [torch.full((2,), float(i)) for i in range(n)])
    assert scattered.tolist() == [n * rank] * 2
    dist.reduce_scatter_single(scattered, torch.arange(2.0 * n))
    assert scattered.tolist() == [n * 2 * rank, n * (2 * rank + 1)]

    reduced = torch.ones(2)
    dist.reduce(reduced, dst=0)
    assert rank != 0 or reduced.tolist() == [n] * 2
    parts = [torch.empty(1) for _ in range(n)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), parts, dst=0)
    assert parts is None or [part.item() for part in parts] == list(range(n))
    piece = torch.empty(1)
    dist.scatter(piece, [torch.tensor([float(i)]) for i in range(n)] if rank == 0 else None, src=0)
    assert piece.item() == rank

    exchanged = torch.empty(n)
    dist.all_to_all_single(exchanged, torch.full((n,), float(rank)))
    assert exchanged.tolist() == list(range(n))

    objects: list[object] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(n)]
    box: list[object] = [("from", 0)] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    assert box == [("from", 0)]

    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))


def test_other_collectives(launch: Launch) -> None:
    launch(other_collectives, 3).results()


def point_to_point(me: Me) -> None:
    me.init()
    if me.rank == 0:
        dist.send(torch.tensor([1.0]), dst=1)
        dist.send(torch.tensor([2.0]), dst=1, tag=7)
        work = dist.isend(torch.tensor([3.0]), dst=1)
        assert work is not None
        work.wait()
        assert work.is_completed()
    else:
        tensor = torch.zeros(1)
        assert dist.recv(tensor) == 0  # from whomever
        assert tensor.item() == 1
        dist.recv(tensor, src=0, tag=7)
        assert tensor.item() == 2
        work = dist.irecv(tensor, src=0)
        assert work is not None
        work.wait()
        assert tensor.item() == 3
    peer = 1 - me.rank
    sent, received = torch.full((3,), float(me.rank)), torch.empty(3)
    batch = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    assert received.tolist() == [peer] * 3


def test_send_and_receive(launch: Launch) -> None:
    launch(point_to_point, 2).results()


def coalesced(me: Me) -> None:
    me.init()
    n = me.world_size
    for device in (None, torch.device("cpu")):
        tensors = [torch.ones(length, dtype=torch.int32) for length in (3, 0, 1000)]
        with _coalescing_manager(device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all((tensor == n).all() for tensor in tensors)
        doubles = [torch.ones(4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
        with _coalescing_manager(device=device):
            for tensor in doubles:
                dist.all_reduce(tensor)
        assert all((tensor == n).all() for tensor in doubles)
    # A region of anything else, under the old style of coalescing.
    pair = [torch.full((2,), float(me.rank)), torch.full((2,), float(me.rank))]
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in pair:
            dist.broadcast(tensor, src=0)
    manager.wait()
    assert all(tensor.tolist() == [0.0, 0.0] for tensor in pair)
    # And all-reduces afterwards still communicate.
    after = torch.ones(3)
    dist.all_reduce(after)
    assert after.tolist() == [n] * 3


def test_coalescing_regions_communicate(launch: Launch) -> None:
    launch(coalesced, 2).results()


def functional(me: Me) -> None:
    from torch.distributed import _functional_collectives as collectives

    me.init()
    group = dist.group.WORLD
    assert group is not None
    ours = torch.arange(4, dtype=torch.int32)
    assert torch.equal(collectives.all_reduce(ours, "sum", group) + 0, me.world_size * ours)
    many = collectives.all_reduce_coalesced([ours, ours + 1], "sum", group)
    assert torch.equal(many[1] + 0, me.world_size * (ours + 1))
    gathered = collectives.all_gather_tensor(ours, 0, group) + 0
    assert torch.equal(gathered, ours.repeat(me.world_size))


def test_functional_collectives(launch: Launch) -> None:
    launch(functional, 2).results()


def detailed(me: Me) -> float:
    me.init()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor[0].item()


def detailed_debug(me: Me) -> float:
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    return detailed(me)


def test_detail_debug_mode(launch: Launch) -> None:
    assert launch(detailed_debug, 2).results() == [2.0, 2.0]
