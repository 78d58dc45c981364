"""Device tensors on their way over host memory, with a stand-in for the device's copies.

Ranks, switch, threads and sums are real; `fake_device` copies in place of CUDA.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import test_all_reduce
import test_collectives
import test_ddp
import test_delegated
import test_futures
import torch
import torch.distributed as dist
import wire_dtypes
from conftest import Launch
from fake_device import FakeDevice, Mark, plug_in
from fanin import _fanin, errors
from fanin.torch.backend.channel import Channel
from fanin.torch.device import staging
from fanin.torch.works import collectives
from fanin.torch.works.work import Request
from ranks import DEADLINE, Me, wait_until

ELEMENTS = 1000
"""Of a segment in these tests: tensors of thousands of elements go through every corner."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SEGMENT_BYTES", 4 * ELEMENTS)
    monkeypatch.setattr(staging, "BUFFERS_MAX", 4)


SOON = timedelta(seconds=DEADLINE)


class Job:
    """Both ranks of a job in this process, each with a device of its own."""

    def __init__(self, switch: str, name: str, patch: pytest.MonkeyPatch) -> None:
        def join(rank: int) -> _fanin.Client:
            return _fanin.Client([(switch, 1.0, None, None)], name, rank, 2, timeout=DEADLINE)

        with ThreadPoolExecutor(2) as pool:
            self.clients = list(pool.map(join, (0, 1)))
        self.devices = plug_in(patch)
        self.channels = [Channel(client) for client in self.clients]

    def close(self) -> None:
        for device in self.devices:
            if device.producer is not None:
                device.producer.event.set()
            device.out.go()
            device.into.go()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def job(
    switch: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    made = Job(switch, request.node.name, monkeypatch)
    yield made
    made.close()


def integers(length: int, rank: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32) * (rank + 1)


def start(channel: Channel, tensor: torch.Tensor) -> Any:
    return channel.all_reduce([tensor], average=False, notify=True)


def wait_for_length(copies: list[int], length: int) -> None:
    wait_until(lambda: len(copies) == length, f"copy {length} is made")


def test_a_segment_is_on_the_network_while_the_next_is_copied_out(job: Job) -> None:
    slow, other = job.devices
    slow.out.stop()
    slow.into.stop()
    tensors = [integers(3 * ELEMENTS, rank) for rank in (0, 1)]
    works = [start(channel, t) for channel, t in zip(job.channels, tensors, strict=True)]
    wait_until(lambda: len(other.copied_out) == 3, "rank 1 copies everything out")
    assert slow.copied_out == []
    for copied in (1, 2, 3):
        slow.out.step()
        # Its sum is back at rank 1 before rank 0 has copied the next one out.
        wait_for_length(other.copied_in, copied)
        assert len(slow.copied_out) == copied
        assert not works[0].is_completed()
    # The network is done, and the future: the device is not, and whoever waits does.
    wait_until(lambda: works[0]._settled, "the network is done")
    assert not works[0].is_completed()
    assert slow.copied_in == []
    slow.into.go()
    assert works[0].wait()
    assert works[0].is_completed()
    assert slow.blocked_streams == 1
    assert works[1].wait()
    for tensor in tensors:
        assert torch.equal(tensor, integers(3 * ELEMENTS, 2))


def test_host_memory_is_bounded_and_a_buffer_is_not_overwritten_before_it_is_copied_in(
    job: Job,
) -> None:
    slow, other = job.devices
    slow.into.stop()
    length = 40 * ELEMENTS + 17
    tensors = [integers(length, rank) for rank in (0, 1)]
    works = [start(channel, t) for channel, t in zip(job.channels, tensors, strict=True)]
    # Its four buffers hold sums that are not copied in: the fifth copy out waits, on the device.
    wait_until(lambda: len(slow.copied_out) == 4, "rank 0 fills its buffers")
    wait_until(lambda: len(other.copied_in) == 4, "rank 1 gets these sums")
    assert slow.copied_in == []
    assert len(slow.copied_out) == 4
    slow.into.go()
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor, integers(length, 2))
    assert [len(device.buffers) for device in job.devices] == [4, 4]
    assert slow.copied_out == [ELEMENTS] * 40 + [17]


def test_what_makes_the_tensor_is_waited_for_by_the_device_not_by_the_caller(job: Job) -> None:
    late = job.devices[0]
    late.producer = Mark()
    tensors = [torch.zeros(ELEMENTS, dtype=torch.int32), integers(ELEMENTS, 1)]
    works = [start(channel, t) for channel, t in zip(job.channels, tensors, strict=True)]
    with pytest.raises(errors.AllReduceTimeout, match="nothing of it has left") as raised:
        works[0].wait(timedelta(milliseconds=20))
    assert (raised.value.tensor, raised.value.waited) == (None, 0.02)

    def too_short() -> errors.AllReduceTimeout:
        with pytest.raises(errors.AllReduceTimeout) as raised:
            works[1].wait(timedelta(milliseconds=20))
        return raised.value

    wait_until(lambda: too_short().missing_ranks == [0], "rank 0 is missed")
    error = too_short()
    assert "not heard from: 0" in str(error)
    assert error.tensor == errors.Tensor(0, ELEMENTS, "int32", "sum")
    assert (error.switch, error.waited) == (job.clients[1].switch, 0.02)
    tensors[0].copy_(integers(ELEMENTS, 0))  # the late kernel
    late.producer.event.set()
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor, integers(ELEMENTS, 2))


def test_host_tensors_keep_their_place_behind_device_tensors(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int32 is on the device here, float32 is not. The ranks' devices differ in speed."""
    for device in job.devices:
        monkeypatch.setattr(device, "takes", lambda tensor: tensor.dtype == torch.int32)
    slow = job.devices[0]
    slow.out.stop()
    on_device = [integers(3 * ELEMENTS, rank) for rank in (0, 1)]
    on_host = [torch.ones(7 * ELEMENTS) for _ in (0, 1)]
    asked = threading.Event()
    stage = job.channels[0]._staging
    assert stage is not None
    flush = stage.flush

    def told_flush() -> None:
        asked.set()
        flush()

    monkeypatch.setattr(stage, "flush", told_flush)

    def both(rank: int) -> None:
        first = start(job.channels[rank], on_device[rank])
        second = start(job.channels[rank], on_host[rank])
        first.wait()
        second.wait()

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(both, rank) for rank in (0, 1)]
        assert asked.wait(DEADLINE)
        assert job.clients[0].statistics()["outstanding"] == 0
        slow.out.go()
        for future in done:
            future.result(DEADLINE)
    for tensor in on_device:
        assert torch.equal(tensor, integers(3 * ELEMENTS, 2))
    for tensor in on_host:
        assert (tensor == 2).all()


def test_one_rank_may_have_its_tensor_on_the_host_if_it_is_one_segment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.devices[1], "takes", lambda _: False)
    tensors = [integers(ELEMENTS, rank) for rank in (0, 1)]
    works = [start(channel, t) for channel, t in zip(job.channels, tensors, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor, integers(ELEMENTS, 2))
    # Longer ones are not alike, as only the device's are cut.
    works = [start(channel, integers(2 * ELEMENTS, 0)) for channel in job.channels]
    for work in works:
        with pytest.raises(errors.CollectiveMismatch):
            work.wait()


def test_futures_complete_and_their_callbacks_may_wait_for_other_all_reduces(job: Job) -> None:
    def nested(channel: Channel) -> Callable[[Any], Any]:
        def callback(future: Any) -> torch.Tensor:
            inner: torch.Tensor = start(channel, future.value()[0]).get_future().wait()[0]
            return inner

        return callback

    tensors = [integers(3 * ELEMENTS, rank) for rank in (0, 1)]
    futures = [
        start(channel, tensor).get_future().then(nested(channel))
        for channel, tensor in zip(job.channels, tensors, strict=True)
    ]
    for future in futures:
        assert torch.equal(future.wait(), 2 * integers(3 * ELEMENTS, 2))
    # Asked for when all is over.
    works = [start(channel, torch.ones(3)) for channel in job.channels]
    for work in works:
        work.wait()
        assert work.get_future().done()
        assert work.get_future().value()[0].tolist() == [2] * 3


def fail_by_closing(job: Job) -> None:
    job.channels[0].close()


def fail_copying_out(job: Job) -> None:
    job.devices[0].fail_copies_out = True


def fail_copying_in(job: Job) -> None:
    job.devices[0].fail_copies_in = True


FAILURES: list[tuple[Callable[[Job], None], type[Exception]]] = [
    (fail_by_closing, errors.Closed),
    (fail_copying_out, RuntimeError),
    (fail_copying_in, RuntimeError),
]


@pytest.mark.parametrize(("fail", "kind"), FAILURES)
def test_a_failure_in_the_middle_is_told_once_and_gives_the_buffers_back(
    job: Job, fail: Callable[[Job], None], kind: type[Exception]
) -> None:
    device = job.devices[0]
    device.out.stop()
    tensors = [integers(10 * ELEMENTS, rank) for rank in (0, 1)]
    mine, theirs = (start(job.channels[rank], tensors[rank]) for rank in (0, 1))
    next_one = start(job.channels[0], integers(5, 0))
    told: list[str] = []
    for name, work in (("first", mine), ("next", next_one)):
        work.get_future().then(lambda _, name=name: told.append(name))
    device.out.step()
    wait_until(lambda: len(device.copied_in) == 1, "the first segment is through")
    if fail is fail_by_closing:
        closing = threading.Thread(target=fail, args=(job,))
        closing.start()
        device.out.go()
        closing.join()
    else:
        fail(job)
        device.out.go()
    with pytest.raises(kind) as raised:
        mine.wait(SOON)
    if fail is not fail_by_closing:
        assert str(raised.value) == "the device is broken"
    assert mine.is_completed()
    assert not mine.is_success()
    assert isinstance(mine.exception(), kind)
    if fail is fail_copying_in:
        # Only this rank's copy is lost: the order of the segments is not.
        device.fail_copies_in = False
        other = start(job.channels[1], integers(5, 0))
        theirs.wait(SOON)
        other.wait(SOON)
        next_one.wait(SOON)
        assert torch.equal(tensors[1], integers(10 * ELEMENTS, 2))
    else:
        with pytest.raises(RuntimeError):
            next_one.wait(SOON)
        with pytest.raises(errors.RankLeft):  # long before the timeout
            theirs.wait(SOON)
    wait_until(lambda: sorted(told) == ["first", "next"], "both futures are told")
    job.channels[0].close()
    assert told.count("first") == 1
    stage = job.channels[0]._staging
    assert stage is not None
    assert stage._unsubmitted == 0
    assert not stage._queue
    assert not stage._free


def test_buffers_are_back_after_a_failed_copy(job: Job) -> None:
    stage = job.channels[0]._staging
    assert stage is not None
    for fails in (True, False):
        job.devices[0].fail_copies_in = fails
        works = [start(channel, integers(9 * ELEMENTS, 0)) for channel in job.channels]
        if fails:
            with pytest.raises(RuntimeError, match="broken"):
                works[0].wait()
        else:
            works[0].wait()
        works[1].wait()
        assert len(stage._free) == stage._buffers <= 4


def test_after_closing_no_thread_is_left_and_all_reduces_fail(job: Job) -> None:
    for channel in job.channels:
        start(channel, integers(ELEMENTS, 0))
    stages = [channel._staging for channel in job.channels]
    threads = [stage._thread for stage in stages if stage is not None]
    assert all(thread is not None and thread.is_alive() for thread in threads)
    for channel in job.channels:
        channel.close()
    assert not any(thread is not None and thread.is_alive() for thread in threads)
    work = start(job.channels[0], integers(3 * ELEMENTS, 0))
    with pytest.raises(errors.Closed):
        work.wait()
    with pytest.raises(RuntimeError, match="Closed"):
        work.get_future().wait()


def test_a_channel_that_nobody_refers_to_ends_its_thread(job: Job) -> None:
    works = [start(channel, integers(ELEMENTS, 0)) for channel in job.channels]
    for work in works:
        work.wait()
    stage = job.channels[0]._staging
    assert stage is not None
    thread, channel = stage._thread, weakref.ref(job.channels[0])
    assert thread is not None
    del work, works, stage
    job.channels.pop(0)
    gc.collect()
    assert channel() is None
    assert not thread.is_alive()


def test_memory_is_let_go_when_the_work_is_done(job: Job) -> None:
    tensors = [integers(3 * ELEMENTS, rank).clone() for rank in (0, 1)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    works = [start(channel, t) for channel, t in zip(job.channels, tensors, strict=True)]
    del tensors
    for work in works:
        work.wait()
    del work, works
    gc.collect()
    wait_until(lambda: all(ref() is None for ref in gone), "the tensors are gone")


def test_cutting_covers_every_element_once_whatever_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        per = 4 * ELEMENTS // dtype.itemsize
        for length in (0, 1, per - 1, per, per + 1, 5 * per):
            whole = torch.arange(length).to(dtype)
            cuts = staging.cut(Request([whole], "float32"))
            parts = [part.memory[0] for part in cuts]
            assert torch.equal(torch.cat(parts), whole)
            assert [part.numel() for part in parts[:-1]] == [per] * (len(parts) - 1)
            assert len(parts) == max(1, -(-length // per))
    # If there are several tensors, each segment has a stretch of each; if they are moved, the
    # bytes.
    several = [torch.arange(700) + rank for rank in range(3)]
    cuts = staging.cut(Request(several, None, "all_gather"))
    for rank, whole in enumerate(several):
        pieces = [part.memory[rank] for part in cuts]
        assert torch.equal(torch.cat(pieces), whole.view(torch.uint8))
    assert all(sum(piece.nbytes for piece in part.memory) <= 4 * ELEMENTS for part in cuts)
    assert len(cuts) == 5


def test_memory_is_not_written_to_before_the_device_was_done_with_it(job: Job) -> None:
    busy = job.devices[1].producer = Mark()
    tensors = [torch.full((ELEMENTS,), 1.0 + rank) for rank in (0, 1)]
    works = [
        channel.start([tensor], [collectives.broadcast(tensor, 0, rank)], notify=True)
        for rank, (channel, tensor) in enumerate(zip(job.channels, tensors, strict=True))
    ]
    with pytest.raises(errors.AllReduceTimeout, match="a broadcast of device tensors was not over"):
        works[0].wait(timedelta(seconds=0.2))
    assert tensors[1][0] == 2.0
    busy.event.set()
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(SOON)
        assert (tensor == 1.0).all()
    # The root only gives, and the other only gets.
    assert [len(device.copied_out) for device in job.devices] == [1, 0]
    assert [len(device.copied_in) for device in job.devices] == [0, 1]


# The suites of host tensors, on the device. Each body runs in processes of its own.


def on_a_device(me: Me, body: Callable[..., Any], *args: Any) -> Any:
    return in_segments(me, 4 * ELEMENTS, body, *args)


def in_segments(me: Me, size_bytes: int, body: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "SEGMENT_BYTES", size_bytes)
        devices = plug_in(patch)
        try:
            result = body(me, *args)
        finally:
            copied = sum(len(device.copied_out) for device in devices)
        assert copied > 0, "nothing went through the device"
        return result


BODIES = [
    test_all_reduce.awkward,
    test_all_reduce.outstanding,
    test_futures.chains,
    test_futures.settled_first,
    test_delegated.coalesced,
    test_delegated.functional,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_programs_of_host_tensors_run_on_the_device(
    launch: Launch, body: Callable[[Me], Any]
) -> None:
    launch(on_a_device, 2, body).results()


@pytest.mark.parametrize(
    ("body", "machines", "args"),
    [
        (test_collectives.moves, "abc", ()),
        (test_collectives.moves, "aba", ()),
        (test_collectives.sums, "abc", ({},)),
        (test_collectives.sums, "aaa", ({},)),
        (test_collectives.odd_memory, "abc", ()),
        (test_collectives.odd_memory, "aaa", ()),
        (test_collectives.asynchronous, "aba", ()),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else None),
)
def test_the_other_collectives_run_on_the_device(
    launch: Launch, body: Callable[..., Any], machines: str, args: tuple[Any, ...]
) -> None:
    run = in_segments, len(machines), 50_000, body, machines, *args
    assert launch(*run, at=test_collectives.ALONE).results()


@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*test_all_reduce.FLOATS, torch.int32], ids=str)
def test_every_dtype_is_the_same_on_all_ranks_and_close_to_the_sum(
    launch: Launch, dtype: torch.dtype, average: bool
) -> None:
    lengths = [1, ELEMENTS, ELEMENTS + 1, 10 * ELEMENTS + 3]
    body = wire_dtypes.reduce, None, lengths, dtype, average
    by_rank = launch(on_a_device, wire_dtypes.WORLD_SIZE, *body).results()
    test_all_reduce.are_right(by_rank, lengths, dtype, average)


@pytest.mark.parametrize("hook", ["none", "powersgd", "fanin"])
def test_ddp_trains_on_the_device_as_with_host_tensors(launch: Launch, hook: str) -> None:
    backend = "gloo" if hook == "fanin" else "fanin"
    ours = launch(on_a_device, 2, test_ddp.train, backend, hook).results()
    host = launch(test_ddp.train, 2, backend, hook).results()
    assert test_ddp.differences(ours[0], ours[1]) == 0
    assert test_ddp.differences(ours[0], host[0]) <= test_ddp.BOUNDS[hook]


def broken_at_the_end(me: Me) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        devices = plug_in(patch)
        me.init()
        devices[0].fail_copies_in = me.rank == 0
        if me.rank == 1:
            me.hear()
        dist.all_reduce(torch.ones(3), async_op=True)
        me.say("begun")
        dist.destroy_process_group()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fanin")]


def test_a_group_is_left_also_if_what_was_under_way_ends_with_an_error_of_the_device(
    launch: Launch,
) -> None:
    ranks = launch(broken_at_the_end, 2)
    assert ranks.hear(0) == "begun"
    ranks.tell(1, "go")
    assert ranks.hear(1) == "begun"
    assert ranks.results() == [[], []]


def alone(me: Me) -> list[float]:
    me.init()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0].tolist() == [1.0] * 3
    work.wait()
    assert work.is_completed()
    return tensor.tolist()


def alone_on_a_device(me: Me) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        plug_in(patch)
        return alone(me)


def test_a_group_of_one_rank(launch: Launch) -> None:
    assert launch(alone_on_a_device, 1, at="").results() == [[1.0] * 3]


def cuda_alone(me: Me) -> float:
    me.init("cpu:gloo,cuda:fanin")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.sum().item()


def test_the_backend_may_be_chosen_for_cuda_alone(launch: Launch) -> None:
    """Also where there is no CUDA device: a program may use the host's tensors only."""
    assert launch(cuda_alone, 2).results() == [6.0, 6.0]


def inference(me: Me) -> list[float]:
    me.init()
    with torch.inference_mode():
        tensor = torch.ones(3 * ELEMENTS)
        dist.all_reduce(tensor)
        transposed = torch.ones(30, 50)
        dist.all_reduce(transposed.t())
    return [tensor.sum().item(), transposed.sum().item()]


def test_tensors_of_inference_mode(launch: Launch) -> None:
    expected = [6.0 * ELEMENTS, 3000.0]
    assert launch(on_a_device, 2, inference).results() == [expected] * 2


def killed(me: Me) -> str:
    me.init(timeout=timedelta(seconds=DEADLINE))
    dist.all_reduce(torch.ones(3))
    me.say("ready")
    me.hear()
    work = dist.all_reduce(torch.ones(100 * ELEMENTS), async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match="RankLost"):
        work.get_future().wait()
    with pytest.raises(errors.RankLost):
        work.wait()
    dist.destroy_process_group()
    return ",".join(t.name for t in threading.enumerate() if t.name.startswith("fanin"))


def test_a_killed_rank_fails_the_others_and_leaves_no_thread(launch: Launch) -> None:
    ranks = launch(on_a_device, 3, killed)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "go")
    assert [ranks.result(rank) for rank in (0, 1)] == ["", ""]


def test_the_fake_device_runs_behind_the_host() -> None:
    """The stand-in must be able to show a lack of waiting."""
    device = FakeDevice()
    device.out.stop()
    host = torch.zeros(3)
    mark = device.copy_out(torch.ones(3), host, [])
    assert host.tolist() == [0] * 3
    assert not device.reached(mark)
    device.out.go()
    device.block_host(mark)
    assert host.tolist() == [1] * 3
