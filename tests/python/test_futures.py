"""Works and futures: chains, callbacks that wait for other collectives, polling."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import _fanin, errors
from fanin.torch.backend.channel import Channel
from ranks import DEADLINE, Me, wait_until
from torch._C._distributed_c10d import Work

Future = torch.futures.Future


def future_of(tensor: torch.Tensor) -> Any:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


def chains(me: Me) -> None:
    me.init()
    n = me.world_size
    value = future_of(torch.ones(3)).then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    assert value.wait().tolist() == [2 * n + 1] * 3

    # Strided: the future's tensors hold the sum as well.
    assert future_of(torch.ones(4, 4, dtype=torch.int32).t()).wait()[0].sum() == 16 * n

    def nested(future: Any) -> torch.Tensor:
        """PowerSGD does this: a callback that blocks on another all-reduce."""
        inner = future_of(future.value()[0]).wait()[0]
        outer: torch.Tensor = future_of(inner).wait()[0]
        return outer

    for _ in range(8):
        assert future_of(torch.ones(5, dtype=torch.int32)).then(nested).wait()[0].item() == n**3

    # A callback that waits for a future that exists already, and completes after its own.
    first, second = (torch.ones(3, dtype=torch.int32) for _ in range(2))
    started = threading.Event()
    late: list[Any] = []
    here = threading.get_ident()

    def blocked(_: Any) -> Any:
        if threading.get_ident() == here:
            return 3 * n  # the first was done before anybody could follow it
        started.wait()
        return late[0].wait()[0].sum().item()

    waiting = future_of(first).then(blocked)
    late.append(future_of(second))
    started.set()
    assert waiting.wait() == late[0].wait()[0].sum().item() == 3 * n


def test_chains_and_callbacks_that_wait_for_other_all_reduces(launch: Launch) -> None:
    launch(chains, 2).results()


def observe(me: Me) -> dict[str, Any]:
    """What a program can see of works and futures."""
    n = me.world_size
    seen: dict[str, Any] = {}
    tensor = torch.full((5,), 2.0)
    seen["a synchronous call returns"] = dist.all_reduce(tensor)
    seen["and has summed"] = tensor.tolist() == [2.0 * n] * 5

    work: Any = dist.all_reduce(tensor, async_op=True)
    seen["wait"] = [work.wait(), work.wait(timedelta(seconds=5))]
    seen["sum"] = tensor.tolist() == [2.0 * n * n] * 5
    seen["state"] = [work.is_completed(), work.is_success(), work.exception()]
    future = work.get_future()
    seen["a future asked for after the end"] = future.wait()[0].data_ptr() == tensor.data_ptr()

    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    values = future.wait()
    seen["value"] = [type(values), len(values), values[0].data_ptr() == tensor.data_ptr()]
    seen["future"] = [type(future), future.done(), future.value()[0] is not None]
    # Not before a wait: Gloo completes the future first.
    seen["both are done"] = [work.wait(), work.is_completed()]

    order: list[str] = []
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()

    def noted(name: str, value: Any) -> Any:
        order.append(name)
        return value

    first = future.then(lambda f: noted("first", f.value()[0].shape))
    second = first.then(lambda f: noted("second", f.value().numel()))
    failing = future.then(lambda _: 1 // 0)
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    seen["chain"] = [second.wait(), first.wait(), list(order), called.wait(10)]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failing.wait()
    seen["collected"] = len(torch.futures.wait_all([future, first, second]))

    # Several at once, waited for in the other order; one waits for less time than there is.
    tensors = [torch.full((length,), float(me.rank)) for length in (1, 70_000, 3)]
    works: Any = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    seen["many"] = [bool((tensor == n * (n - 1) / 2).all()) for tensor in tensors]
    outputs = [torch.empty(2) for _ in range(n)]
    work = dist.all_gather(outputs, torch.full((2,), float(me.rank)), async_op=True)
    seen["delegated"] = [work.wait(), outputs[1].tolist(), work.is_success()]
    return seen


def observe_on_both(me: Me) -> Any:
    return me.on_both(observe)


def test_a_program_sees_the_same_works_and_futures_as_on_gloo(launch: Launch) -> None:
    for gloo, ours in launch(observe_on_both, 2).results():
        assert ours == gloo
        assert ours["value"] == [list, 1, True]
        assert ours["chain"] == [5, torch.Size([5]), ["first", "second"], True]
        assert ours["sum"]
        assert all(ours["many"])


def settled_first(me: Me) -> None:
    """However the end of a work is learned first, its future is completed as well."""
    me.init()
    for learn in ("wait", "poll"):
        for _ in range(200):
            work = dist.all_reduce(torch.ones(3, dtype=torch.int32), async_op=True)
            assert work is not None
            future: Any = work.get_future()
            called = threading.Event()
            then = future.then(lambda _, called=called: called.set())
            if learn == "wait":
                work.wait()
            else:
                wait_until(work.is_completed, "is_completed() turns true")
            wait_until(future.done, f"the future is completed after a {learn}")
            wait_until(then.done, f"the callback runs after a {learn}")
            assert called.is_set()
            assert future.value()[0].tolist() == [me.world_size] * 3


def test_a_future_is_completed_also_if_somebody_waits_for_the_work(launch: Launch) -> None:
    launch(settled_first, 2).results()


@pytest.fixture
def channels(switch: str, request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    """Both ranks of a job, in this process."""
    with ThreadPoolExecutor(2) as pool:
        clients = pool.map(
            lambda rank: _fanin.Client([(switch, 1.0, None, None)], request.node.name, rank, 2),
            (0, 1),
        )
        made = [Channel(client) for client in clients]
    yield made
    for channel in made:
        channel.close()


def test_without_a_thread_for_followers_futures_are_still_completed(
    channels: list[Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [*channels]

    def start_few(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    for _ in range(5):
        futures = [
            channel.all_reduce([torch.ones(2)], average=False, notify=True).get_future()
            for channel in channels
        ]
        for future in futures:
            wait_until(future.done, "the future is completed")
            assert future.value()[0].tolist() == [2, 2]
    assert not left


def test_a_future_of_a_work_that_nobody_was_to_be_notified_of(channels: list[Channel]) -> None:
    first, second = channels
    tensors = [torch.ones(3), torch.ones(4).to(torch.bfloat16)]
    early = first.all_reduce(tensors, average=True, notify=False).get_future()
    assert not early.done()
    work = second.all_reduce([t.clone() for t in tensors], average=True, notify=False)
    wait_until(early.done, "the future is completed")
    work.wait()
    late = work.get_future()
    assert late.done()
    assert [t.shape for t in late.value()] == [t.shape for t in early.value()]


def test_a_work_that_is_done_and_that_nobody_looked_at_is_not_late(
    channels: list[Channel],
) -> None:
    first, second = channels
    tensor = torch.full((3, 2), 4, dtype=torch.int32).t()
    work: Any = first.all_reduce([tensor], average=False, notify=False)
    assert isinstance(work.late(1), errors.AllReduceTimeout)
    second.all_reduce([torch.ones(2, 3, dtype=torch.int32)], average=False, notify=False).wait()
    wait_until(lambda: all(pending.done() for pending in work._pendings()), "the sum is there")
    assert work.late(1) is None
    assert (tensor == 5).all()


def polling(me: Me) -> None:
    me.init()
    if me.rank == 1:
        me.hear()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    if me.rank == 0:
        assert not work.is_completed()
        with pytest.raises(errors.AllReduceTimeout):
            work.wait(timedelta(milliseconds=50))
        me.say("rank 0 waited")
    wait_until(work.is_completed, "is_completed() turns true")
    assert work.is_success()
    assert work.exception() is None
    assert work.wait()
    # A delegated one, too.
    delegated = dist.all_reduce(torch.ones(3, dtype=torch.float64), async_op=True)
    assert delegated is not None
    wait_until(delegated.is_completed, "is_completed() of a delegated work turns true")


def test_a_work_can_be_polled_and_its_wait_can_run_out_of_time(launch: Launch) -> None:
    ranks = launch(polling, 2)
    assert ranks.hear(0) == "rank 0 waited"
    ranks.tell(1, "go")
    ranks.results()


def others_polled(me: Me) -> tuple[int, int]:
    """How often a poll of Gloo's own works asks them for anything, beside a group of ours."""
    me.init()
    pair: Any = dist.new_group(backend="gloo")
    asked: list[Any] = []
    original = Work.get_future

    def counted(work: Work) -> Any:
        asked.append(work)
        return original(work)

    Work.get_future = counted  # type: ignore[method-assign, assignment]
    tensor = torch.ones(3)
    works: list[Any] = [
        dist.isend(tensor, dst=1 - me.rank, group=pair),
        dist.irecv(torch.empty(3), src=1 - me.rank, group=pair),
        dist.all_reduce(torch.ones(3), group=pair, async_op=True),
    ]
    for work in works:
        for _ in range(100):
            work.is_completed()
    of_gloo = len(asked)
    for work in works:
        work.wait()
    ours: Any = dist.all_reduce(tensor, async_op=True)
    ours.wait()
    assert ours.is_completed()
    return of_gloo, len(asked)


def test_works_of_other_backends_are_left_alone(launch: Launch) -> None:
    for of_gloo, of_both in launch(others_polled, 2).results():
        assert of_gloo == 0
        assert of_both == 1


def dropped(me: Me) -> int:
    me.init()
    for _ in range(50):
        dist.all_reduce(torch.ones(100_000), async_op=True)  # nobody keeps tensor or work
    last = torch.ones(1, dtype=torch.int32)
    dist.all_reduce(last)
    return int(last.item())


def test_works_that_nobody_waits_for_keep_their_memory(launch: Launch) -> None:
    assert launch(dropped, 2).results() == [2, 2]


def quiet(me: Me) -> list[str]:
    me.init()
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    return [t.name for t in threading.enumerate() if t.name.startswith("fanin")]


def test_synchronous_all_reduces_start_no_thread(launch: Launch) -> None:
    assert launch(quiet, 2).results() == [[], []]


def closed(me: Me) -> str:
    me.init()
    work = dist.all_reduce(torch.ones(3), async_op=True) if me.rank == 0 else None
    if work is None:
        me.hear()
        return "left"
    future = work.get_future()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="Closed"):
        future.wait()
    with pytest.raises(errors.Closed):
        work.wait()
    return "closed"


def test_destroying_the_group_fails_what_is_outstanding(launch: Launch) -> None:
    ranks = launch(closed, 2)
    assert ranks.result(0) == "closed"
    ranks.tell(1, "go")
    assert ranks.result(1) == "left"


class Canary:
    """Something of the program's that can be watched."""


def fail(me: Me, group: Any) -> weakref.ref[Canary]:
    """A program that catches the error and holds work, future and error until it returns."""
    canary = Canary()
    work: Any = dist.all_reduce(torch.ones(3 + me.rank), group=group, async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="CollectiveMismatch"):
        future.wait()
    with pytest.raises(errors.CollectiveMismatch) as first:
        work.wait()
    with pytest.raises(errors.CollectiveMismatch) as second:
        work.wait()
    assert str(first.value) == str(second.value)
    assert first.value.tensor == second.value.tensor is not None
    return weakref.ref(canary)


def failures(me: Me) -> None:
    me.init()
    gone = [fail(me, dist.new_group()) for _ in range(3)]
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_a_failed_all_reduce_keeps_nothing_of_the_program(launch: Launch) -> None:
    """The error's traceback has the program's frames, and these have the work and the future."""
    launch(failures, 2).results()


def test_a_channel_may_be_closed_by_the_garbage_collector_wherever_that_runs(switch: str) -> None:
    channel = Channel(_fanin.Client([(switch, 1.0, None, None)], "collected", 0, 1))
    channel.all_reduce([torch.ones(3)], average=False, notify=True).wait()
    completions = channel._completions
    assert completions is not None

    def collect() -> None:
        with completions._lock:
            channel.close()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
