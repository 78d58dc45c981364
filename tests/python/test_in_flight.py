"""What is under way when a program goes on: barriers, destroyed groups, time-outs, regions."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch.works.under_way import UnderWay
from fanin.torch.works.work import CollectiveWork
from ranks import Me, wait_until
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager

# Sums of these are not over while the next line of Python runs.
LENGTHS = (6_000_000, 0, 4_000_000)


def issue(me: Me, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Starts sums that nobody waits for; the last tensor's is copied back when it is done."""
    tensors = [torch.full((length,), me.rank + 1, dtype=torch.int32) for length in lengths]
    tensors.append(torch.full((lengths[-1] // 1000, 1000), me.rank + 1, dtype=torch.int32).t())
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    return tensors


def summed(me: Me, tensors: list[torch.Tensor]) -> list[bool]:
    expected = me.world_size * (me.world_size + 1) // 2
    return [bool((tensor == expected).all()) for tensor in tensors]


def behind_barriers(me: Me, how: str) -> list[bool]:
    tensors = issue(me)
    if how == "monitored":
        dist.monitored_barrier()
    elif how == "asynchronous":
        barrier = dist.barrier(async_op=True)
        # Other collectives keep their place in the ranks' order.
        root = torch.tensor([me.rank + 5])
        dist.broadcast(root, src=1)
        assert root.item() == 6
        barrier.wait()
        assert barrier.is_completed()
    elif how == "future":
        dist.barrier(async_op=True).get_future().wait()
    else:
        dist.barrier()
    return summed(me, tensors)


def behind_barriers_on_both(me: Me, how: str) -> Any:
    return me.on_both(behind_barriers, how)


@pytest.mark.parametrize("how", ["blocking", "asynchronous", "future", "monitored"])
def test_a_barrier_comes_after_all_reduces_in_flight(launch: Launch, how: str) -> None:
    for gloo, ours in launch(behind_barriers_on_both, 2, how).results():
        assert ours == [True] * 4
        # Gloo's monitored barrier comes after nothing.
        assert gloo == ours or how == "monitored"


def early_barrier(me: Me) -> bool:
    """A barrier that is not waited for does not block, whoever is missing."""
    me.init()
    tensor = torch.full((1000,), me.rank, dtype=torch.int32)
    if me.rank == 1:
        me.hear()
    dist.all_reduce(tensor, async_op=True)
    barrier = dist.barrier(async_op=True)
    me.say(barrier.is_completed())
    barrier.wait()
    return bool((tensor == 1).all())


def test_an_asynchronous_barrier_does_not_wait_when_it_is_called(launch: Launch) -> None:
    ranks = launch(early_barrier, 2)
    assert ranks.hear(0) is False
    ranks.tell(1, "go")
    ranks.hear(1)
    assert ranks.results() == [True, True]


def failed_before(me: Me) -> str:
    me.init(timeout=timedelta(seconds=20))
    if me.rank == 1:
        me.hear()
    work = dist.all_reduce(torch.ones(3 + me.rank), async_op=True)
    assert work is not None
    if me.rank == 0:
        barrier = dist.barrier(async_op=True)
        assert barrier is not None
        me.say("the barrier has begun, and the all-reduce is in flight")
        with pytest.raises(errors.CollectiveMismatch):
            barrier.wait()
    else:
        with pytest.raises(errors.CollectiveMismatch):
            work.wait()
        dist.barrier()
    dist.barrier()  # rank 0 was told, and the ranks are still in step
    return "on"


def test_a_barrier_raises_what_an_all_reduce_in_flight_ended_with(launch: Launch) -> None:
    ranks = launch(failed_before, 2)
    ranks.hear(0)
    ranks.tell(1, "go")
    assert ranks.results() == ["on", "on"]


def synchronized(me: Me) -> list[bool]:
    me.init()
    tensor = torch.full(LENGTHS[:1], me.rank + 1, dtype=torch.int32)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.synchronize()
    return summed(me, [tensor])


def test_synchronizing_with_a_work_waits_for_it(launch: Launch) -> None:
    assert launch(synchronized, 2).results() == [[True]] * 2


def destroyed(me: Me) -> list[bool]:
    me.init()
    # A slow machine, too, is to be done with them in the seconds that destroying waits.
    tensors = issue(me, (600_000, 0, 400_000))
    dist.destroy_process_group()
    return summed(me, tensors)


def test_a_destroyed_group_completes_what_all_ranks_have_begun(launch: Launch) -> None:
    assert launch(destroyed, 2).results() == [[True] * 4] * 2


# Regions


def broken_region(me: Me) -> None:
    me.init()
    group: Any = dist.group.WORLD

    def region(error: Exception | None) -> list[torch.Tensor]:
        tensors = [torch.full((2,), me.rank + i) for i in range(3)]
        with _coalescing_manager(device=torch.device("cpu")):
            for tensor in tensors:
                dist.broadcast(tensor, src=1)
            if error is not None:
                raise error
        return tensors

    with pytest.raises(ZeroDivisionError):
        region(ZeroDivisionError())

    # The region was never closed. It keeps nothing of what comes after it.
    gone = []
    for _ in range(600):
        tensor = torch.ones(3)
        gone.append(weakref.ref(tensor))
        group.allreduce([tensor]).wait()
    del tensor
    gc.collect()
    assert sum(ref() is not None for ref in gone) < 300
    # And the next one covers its own works, all of them.
    assert [tensor.tolist() for tensor in region(None)] == [[1, 1], [2, 2], [3, 3]]


def test_a_region_that_an_exception_ends_keeps_nothing_of_later_works(launch: Launch) -> None:
    launch(broken_region, 2).results()


# Time-outs of single calls


def options_of(kind: Any, seconds: float, **fields: Any) -> Any:
    options = kind()
    options.timeout = timedelta(seconds=seconds)
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def impatient(me: Me, backend: str, call: str) -> tuple[str, str, list[str]]:
    """Rank 1 does not come; the group's own timeout is half an hour."""
    me.init(backend)
    if me.rank == 1:
        me.hear()
        return "", "", []
    group: Any = dist.group.WORLD
    tensor = torch.ones(5)
    asks: dict[str, Any] = {
        "all_reduce": lambda: group.allreduce([tensor], options_of(c10d.AllreduceOptions, 0.3)),
        "blocking": lambda: group.allreduce(
            [tensor], options_of(c10d.AllreduceOptions, 0.3, asyncOp=False)
        ),
        "broadcast": lambda: group.broadcast(
            [tensor], options_of(c10d.BroadcastOptions, 0.3, rootRank=1)
        ),
        "barrier": lambda: group.barrier(options_of(c10d.BarrierOptions, 0.3)),
    }
    work = asks[call]()
    later = group.allreduce([torch.ones(2)]) if call == "all_reduce" else None
    if call == "all_reduce":
        future = work.get_future()
        with pytest.raises(RuntimeError):
            future.wait()
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    wait_until(work.is_completed, "the work is over")
    after = []
    for what in (later, lambda: group.allreduce([torch.ones(2)])):
        if call != "all_reduce" or what is None:
            continue
        with pytest.raises(RuntimeError) as raised:
            (what() if callable(what) else what).wait()
        after.append(f"{type(raised.value).__name__}: {raised.value}")
    return type(caught.value).__name__, str(caught.value), after


@pytest.mark.parametrize("call", ["all_reduce", "blocking", "broadcast", "barrier"])
@pytest.mark.parametrize("backend", ["gloo", "fanin"])
def test_a_call_has_a_timeout_of_its_own(launch: Launch, backend: str, call: str) -> None:
    ranks = launch(impatient, 2, backend, call)
    kind, message, after = ranks.result(0)
    if backend == "fanin" and call in ("all_reduce", "blocking"):
        assert kind == "AllReduceTimeout"
        assert "not over after 0.3 s" in message
        assert "ranks not heard from: 1" in message
        for text in after:  # as on Gloo the group is over, and says why
            assert text.startswith("Closed: ")
            assert "not over after 0.3 s" in text
    ranks.tell(1, "go")
    ranks.result(1)


def patient(me: Me) -> list[float]:
    me.init()
    group: Any = dist.group.WORLD
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.2))
    tensor = torch.ones(3)
    if me.rank == 1:
        me.hear()
    work = group.allreduce([tensor], options_of(c10d.AllreduceOptions, 50))
    if me.rank == 0:
        with pytest.raises(errors.AllReduceTimeout):
            work.wait(timedelta(seconds=1))  # longer than the group's timeout
        me.say("waited")
    work.wait()
    return tensor.tolist()


def test_a_call_may_take_longer_than_the_groups_timeout(launch: Launch) -> None:
    ranks = launch(patient, 2)
    assert ranks.hear(0) == "waited"
    ranks.tell(1, "go")
    assert ranks.results() == [[2.0] * 3] * 2


def given_back(me: Me) -> None:
    me.init()
    group: Any = dist.group.WORLD
    gone = []
    for _ in range(3):
        tensor = torch.ones(1000)
        gone.append(weakref.ref(tensor))
        group.allreduce([tensor], options_of(c10d.AllreduceOptions, 1000)).wait()
        del tensor
    gc.collect()
    wait_until(lambda: not any(ref() is not None for ref in gone), "the tensors are let go")
    wait_until(
        lambda: all(thread.name != "fanin-timeouts" for thread in threading.enumerate()),
        "the thread of the time-outs ends",
    )


def test_a_timeout_of_its_own_keeps_nothing_of_a_call_that_is_over(launch: Launch) -> None:
    launch(given_back, 2).results()


def barred(me: Me, how: str) -> str:
    me.init()
    if me.rank == 1:
        me.hear()
        return ""
    group: Any = dist.group.WORLD
    group.allreduce([torch.ones(3)], options_of(c10d.AllreduceOptions, 0.3))
    barrier: Any = dist.barrier(async_op=True) if how == "asynchronous" else None
    with pytest.raises(errors.AllReduceTimeout) as caught:
        (dist.barrier if barrier is None else barrier.wait)()
    me.say("raised")
    return str(caught.value)


@pytest.mark.parametrize("how", ["blocking", "asynchronous"])
def test_a_barrier_after_an_all_reduce_that_ended_the_group_waits_for_nobody(
    launch: Launch, how: str
) -> None:
    ranks = launch(barred, 2, how)
    assert ranks.hear(0) == "raised"
    ranks.tell(1, "go")
    assert "not over after 0.3 s" in ranks.result(0)
    ranks.result(1)


class Idle(CollectiveWork):
    """A work of which nothing is under way."""

    def _late(self, limit: float) -> errors.AllReduceTimeout:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    def _make_future(self) -> Any:
        raise NotImplementedError


def test_the_network_hears_the_last_timeout_also_if_a_work_ends_while_it_is_told() -> None:
    """As it does where the garbage collector comes between."""
    told: list[float] = []

    def tell(seconds: float) -> None:
        if not told:
            under_way.over(work)
        told.append(seconds)

    under_way = UnderWay(5, tell, lambda: None)
    work = Idle([], [], under_way)
    under_way.begin(work, 1000)
    assert told[-1] == 5
