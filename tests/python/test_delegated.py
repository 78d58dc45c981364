"""What the switch does not serve goes to Gloo, and a program does not notice."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from typing import Any

import fake_device
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch.backend import channel
from ranks import Me, sums_on_switch, wait_until
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel


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


def averages_of_integers(me: Me) -> None:
    """As with NCCL: the sum, divided towards zero."""
    me.init()
    rank, n = me.rank, me.world_size
    mine = [-7, 5, -1]
    for dtype in (torch.int64, torch.int32, torch.int8):
        tensor = torch.tensor(mine, dtype=dtype).div_(1 + rank, rounding_mode="trunc")
        every = torch.stack(
            [torch.tensor(mine).div(1 + r, rounding_mode="trunc") for r in range(n)]
        )
        means = torch.div(every.sum(0), n, rounding_mode="trunc").tolist()

        summed = tensor.clone()
        dist.all_reduce(summed, op=dist.ReduceOp.AVG)
        assert summed.tolist() == means
        rooted = tensor.clone()
        work = dist.reduce(rooted, dst=1, op=dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        work.wait()
        assert rank != 1 or rooted.tolist() == means
        part = torch.empty(1, dtype=dtype)
        dist.reduce_scatter(part, list(tensor[:n].chunk(n)), op=dist.ReduceOp.AVG)
        assert part.item() == means[rank]
        dist.reduce_scatter_single(part, tensor[:n].clone(), op=dist.ReduceOp.AVG)
        assert part.item() == means[rank]

    # Gloo's own work of it has no future.
    part = torch.empty(1, dtype=torch.int64)
    low = torch.arange(n, dtype=torch.int64) + rank
    work = dist.reduce_scatter(part, list(low.chunk(n)), dist.ReduceOp.MIN, async_op=True)
    assert work is not None
    assert work.get_future().wait() == []
    assert part.item() == rank

    # Nor has a receive, of which Gloo tells a single thread.
    part = torch.empty(1)
    for _ in range(10):
        if rank == 1:
            dist.send(torch.ones(1), dst=0)
        elif rank == 0:
            work = dist.irecv(part, src=1)
            assert work is not None
            future = work.get_future()
            work.wait()
            assert future.wait() == []

    # However its end is learned, and once only.
    for learn in ("poll", "future", "barrier", "synchronize", "region"):
        tensor = torch.tensor([rank + 4, -rank - 4])
        if learn == "region":
            with _coalescing_manager(device=torch.device("cpu")):
                dist.reduce(tensor, dst=0, op=dist.ReduceOp.AVG)
        else:
            work = dist.reduce(tensor, dst=0, op=dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            if learn == "poll":
                wait_until(work.is_completed, "the average is there")
            elif learn == "future":
                work.get_future().wait()
            elif learn == "synchronize":
                work.synchronize()
            else:
                dist.barrier()
            assert rank != 0 or tensor.tolist() == [4, -4], learn
            work.wait()
        assert rank != 0 or tensor.tolist() == [4, -4], learn
    with pytest.raises(RuntimeError, match=r"AVG of bool.* can't be cast to .* Bool"):
        dist.reduce_scatter(torch.empty(1).bool(), [torch.ones(1).bool()] * n, dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="neither the switch nor Gloo"):
        dist.all_reduce(torch.ones(1, dtype=torch.int16))


def test_averages_of_integers(launch: Launch) -> None:
    launch(averages_of_integers, 2).results()


def averages_at_the_end(me: Me) -> list[list[int]]:
    me.init()
    tensors = [torch.full((length,), me.rank * 4 + 2) for length in (3, 100_000, 1)]
    for tensor in tensors:
        dist.reduce(tensor, dst=0, op=dist.ReduceOp.AVG, async_op=True)
    dist.destroy_process_group()
    return [sorted(set(tensor.tolist())) for tensor in tensors]


def test_averages_of_integers_are_divided_before_a_destroyed_group_is_gone(launch: Launch) -> None:
    assert launch(averages_at_the_end, 2).result(0) == [[4]] * 3


def cut_off(me: Me) -> str:
    """Rank 1 lives, on the switch; only its connections of Gloo are gone."""
    me.init(timeout=timedelta(seconds=30))
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    dist.barrier()
    if me.rank == 1:
        gloo: Any = dist.ProcessGroupGloo
        backend._gloo = gloo(HashStore(), 0, 1, timedelta(seconds=30))  # the other one is gone
        me.say("cut off")
        tensor = torch.tensor([5], dtype=torch.int32)
        with pytest.raises(errors.RankLeft) as left:  # and no sum with what rank 0 never submitted
            dist.all_reduce(tensor)
        return str(left.value)
    me.hear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "LOSS_TIMEOUT", 0.5)
        with pytest.raises(RuntimeError, match="onnection"):
            dist.recv(torch.ones(3), src=1)
    with pytest.raises(errors.Closed) as closed:
        dist.all_reduce(torch.ones(3))
    return str(closed.value)


def test_a_connection_of_gloo_that_is_lost_ends_the_group_and_adds_nothing_to_a_sum(
    launch: Launch,
) -> None:
    ranks = launch(cut_off, 2)
    assert ranks.hear(1) == "cut off"
    ranks.tell(0, "go")
    ended, left = ranks.results()
    assert re.search("the group ended, here, because Gloo lost another rank.*onnection", ended)
    assert "rank 0" in left


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

    # Nobody leaves a barrier before all have come to it.
    store = dist.distributed_c10d._get_default_store()
    store.add("came", 1)
    dist.barrier()
    assert store.add("came", 0) == n
    store.add("came again", 1)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    assert store.add("came again", 0) == n


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
        work.wait()  # once more
    # A barrier does not wait for what is only received.
    if me.rank == 0:
        dist.barrier()
        dist.send(torch.tensor([6.0]), dst=1)
    else:
        work = dist.irecv(tensor, src=0)
        assert work is not None
        dist.barrier()
        work.wait()
        assert tensor.item() == 6
    if me.rank == 0:
        dist.send(torch.tensor([4.0, 5.0]), dst=1)
    else:
        memory = torch.zeros(4)
        dist.recv(memory[::2])
        assert memory.tolist() == [4, 0, 5, 0]
    peer = 1 - me.rank
    sent, received = torch.full((3,), float(me.rank)), torch.empty(3)
    batch = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    assert received.tolist() == [peer] * 3


def test_send_and_receive(launch: Launch) -> None:
    launch(point_to_point, 2).results()


def point_to_point_from_a_device(me: Me) -> int:
    copies = fake_device.hands_over()
    point_to_point(me)
    return len(copies)


def test_a_device_sends_and_receives_copies(launch: Launch) -> None:
    sends, receives = launch(point_to_point_from_a_device, 2).results()
    assert (sends, receives) == (1, 6), "each device waits for what it received"


def unlike(world_size: int) -> None:
    with _coalescing_manager():
        dist.all_reduce(torch.ones(3))
        dist.all_gather_single(torch.empty(2 * world_size), torch.ones(2))


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

    # A region that torch refuses leaves nothing behind that would swallow what comes after it.
    with pytest.raises(RuntimeError, match="mixed types"):
        unlike(n)
    before = sums_on_switch()
    after = torch.full((1000,), me.rank + 1.0)
    dist.all_reduce(after)
    assert after.tolist() == [n * (n + 1) / 2] * 1000
    assert sums_on_switch() == before + 1

    # FSDP2 does the same: gathers and reduce-scatters, each kind in one region.
    parts = [torch.full((length,), me.rank + 1.0) for length in (2, 5)]
    wholes = [torch.empty(n * len(part)) for part in parts]
    with _coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_single(whole, part)
    manager.wait()
    for whole, part in zip(wholes, parts, strict=True):
        assert whole.tolist() == [1.0] * len(part) + [2.0] * len(part)
    with _coalescing_manager():
        for whole, part in zip(wholes, parts, strict=True):
            dist.reduce_scatter_single(part, whole)
    for part in parts:
        assert part.tolist() == [n * (me.rank + 1.0)] * len(part)


def test_coalescing_regions_communicate(launch: Launch) -> None:
    launch(coalesced, 2).results()


def refused(me: Me) -> list[str]:
    """What torch says of tensors that do not lie in one piece, where it takes no others."""
    strided, peer = torch.ones(2 * me.world_size)[::2], 1 - me.rank
    calls: list[Any] = [
        lambda: dist.all_to_all_single(torch.ones(me.world_size), strided),
        lambda: dist.send(strided, peer),
        lambda: dist.recv(strided, peer),
    ]
    said = []
    for call in calls:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        said.append(f"{caught.type.__name__} {str(caught.value).splitlines()[0]}")
    return said


def refused_alike(me: Me) -> None:
    gloo, fanin = me.on_both(refused)
    assert gloo == fanin


def test_what_torch_refuses_stays_refused(launch: Launch) -> None:
    launch(refused_alike, 2).results()


def objects(me: Me) -> None:
    """Objects whose pickles differ in length from rank to rank."""
    me.init()
    rank, n = me.rank, me.world_size
    ours = {"rank": rank, "text": "x" * 1000 * rank}
    expected = [{"rank": i, "text": "x" * 1000 * i} for i in range(n)]
    gathered: list[Any] | None = [None] * n if rank == 1 else None
    dist.gather_object(ours, gathered, dst=1)
    assert gathered == (expected if rank == 1 else None)
    got: list[Any] = [None]
    dist.scatter_object_list(got, expected if rank == 0 else None, src=0)
    assert got == [ours]
    if rank == 0:
        dist.send_object_list([ours, "and another"], dst=2)
    elif rank == 2:
        box: list[Any] = [None, None]
        assert dist.recv_object_list(box, src=0) == 0
        assert box == [expected[0], "and another"]
    pair: Any = dist.new_group([0, 2])
    if rank != 1:
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, ours, group=pair)
        assert everyone == [expected[0], expected[2]]


def test_objects_of_different_lengths(launch: Launch) -> None:
    launch(objects, 3).results()


def barred(me: Me) -> str:
    me.init()
    if me.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        me.say(str(caught.value))
    else:
        me.hear()
    return "still here"


def test_a_monitored_barrier_names_the_ranks_that_do_not_come(launch: Launch) -> None:
    ranks = launch(barred, 3)
    message = ranks.hear(0)
    assert re.search(r"Ranks 1, 2 failed to pass monitoredBarrier", message), message
    for rank in (1, 2):
        ranks.tell(rank, "go")
    assert ranks.results() == ["still here"] * 3


def functional(me: Me) -> None:
    from torch.distributed import _functional_collectives as collectives

    me.init()
    group = dist.group.WORLD
    assert group is not None
    rank, n = me.rank, me.world_size
    ours = torch.arange(4, dtype=torch.int32)
    summed = collectives.all_reduce(ours, "sum", group)
    assert torch.equal(summed + 0, n * ours)
    assert torch.equal(ours, torch.arange(4, dtype=torch.int32))  # not in place
    averaged = collectives.all_reduce(torch.full((3,), float(rank)), "avg", group)
    assert averaged.tolist() == [(n - 1) / 2] * 3
    many = collectives.all_reduce_coalesced([ours, ours + 1], "sum", group)
    assert torch.equal(many[0] + 0, n * ours)
    assert torch.equal(many[1] + 0, n * (ours + 1))
    assert sums_on_switch() == 4
    highest = collectives.all_reduce(ours * rank, "max", group)
    assert torch.equal(highest + 0, ours * (n - 1))
    gathered = collectives.all_gather_tensor(ours + rank, 0, group) + 0
    assert torch.equal(gathered, torch.cat([ours + i for i in range(n)]))
    gathered = collectives.all_gather_tensor((ours + rank).view(2, 2), 1, group) + 0
    assert torch.equal(gathered, torch.cat([(ours + i).view(2, 2) for i in range(n)], 1))
    reduced = collectives.reduce_scatter_tensor(torch.arange(2 * n), "sum", 0, group) + 0
    assert reduced.tolist() == [n * 2 * rank, n * (2 * rank + 1)]
    exchanged = collectives.all_to_all_single(torch.full((n,), rank), None, None, group) + 0
    assert exchanged.tolist() == list(range(n))
    assert (collectives.broadcast(ours + rank, 1, group) + 0).tolist() == [1, 2, 3, 4]
    # With gradients: an all-reduce forwards is one backwards.
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    y = collectives.all_gather_tensor_autograd(x, 0, group)
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [n * (n + 1) / 2] * 3


def test_functional_collectives(launch: Launch) -> None:
    launch(functional, 2).results()


def detailed(me: Me) -> Any:
    """Training, and ranks that disagree, under torch's own checks of every collective."""
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    me.init()
    trained = few_steps(me)
    mismatches = []
    first: list[Any] = [dist.all_reduce, dist.all_reduce]
    second: list[Any] = [dist.all_reduce, partial(dist.broadcast, src=0)]
    for lengths, calls in (((3, 4), first), ((3, 3), second)):
        tensor = torch.ones(lengths[me.rank])
        with pytest.raises(RuntimeError) as caught:
            calls[me.rank](tensor)
        mismatches.append(str(caught.value))
        assert tensor.tolist() == [1.0] * lengths[me.rank]  # refused before anything was added
    after = torch.ones(3)
    dist.all_reduce(after)
    assert after.tolist() == [me.world_size] * 3
    return trained, mismatches


def plain(me: Me) -> torch.Tensor:
    me.init("gloo")
    return few_steps(me)


def few_steps(me: Me) -> torch.Tensor:
    torch.manual_seed(2)
    model = DistributedDataParallel(torch.nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((3, 20), me.rank + step / 8)).square().mean().backward()
        optimizer.step()
    weight: torch.Tensor = model.module.weight.detach().clone()
    return weight


def test_detail_debug_mode_trains_and_reports_ranks_that_disagree(launch: Launch) -> None:
    gloo = launch(plain, 2).results()[0]
    for ours, (unlike_shapes, unlike_collectives) in launch(detailed, 2).results():
        assert (gloo - ours).abs().max() <= 1e-6
        for message in (unlike_shapes, unlike_collectives):
            assert "Detected mismatch between collectives on ranks" in message
        assert re.search(r"TensorShape=\[[34]\].*TensorShape=\[[34]\]", unlike_shapes, re.S)
        assert "ALLREDUCE" in unlike_collectives
        assert "BROADCAST" in unlike_collectives
