"""Futures complete in the order of the submissions; what callbacks begin is alike on all ranks."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fake_device import plug_in
from fanin import errors
from fanin.torch.backend import backend_of, delegated_work
from fanin.torch.backend.channel import Channel
from fanin.torch.backend.gloo_tensors import Handed
from fanin.torch.patches import callbacks
from fanin.torch.works.turns import Turns
from ranks import DEADLINE, Me, sums_on_switch, wait_until
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Network:
    """A client of which the test says when each collective is over."""

    rank, world_size, timeout, columns, has_roots = 0, 2, 60.0, 1, True
    dtypes = ("float32",)

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self._over: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, *arguments: Any) -> Any:
        keep, notify = arguments[5:7]
        assert notify
        self.submitted.append(Submitted(keep))
        return self.submitted[-1]

    def next_completion(self) -> Any:
        return self._over.get()

    def end(self, number: int) -> None:
        wait_until(lambda: len(self.submitted) > number, "it is on the network")
        self.submitted[number].over.set()
        self._over.put(self.submitted[number])

    def set_timeout(self, seconds: float) -> None:
        del seconds

    def close(self) -> None:
        for _ in range(10):  # more than there are threads
            self._over.put(None)


class Submitted:
    """A pending collective."""

    def __init__(self, keep: Any) -> None:
        self.keep = keep
        self.over = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        assert self.over.wait(DEADLINE if timeout is None else timeout)

    def done(self) -> bool:
        return self.over.is_set()

    def exception(self) -> None:
        return None


@pytest.fixture(params=["cpu", "device"])
def network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Network, Channel]]:
    if request.param == "device":
        plug_in(monkeypatch)
    client: Any = Network()
    channel = Channel(client)
    yield client, channel
    channel.close()


def begin(channel: Channel) -> Any:
    return channel.all_reduce([torch.ones(3)], average=False, notify=True)


def test_futures_complete_in_the_order_of_submission_whatever_is_over_first(
    network: tuple[Network, Channel],
) -> None:
    client, channel = network
    works = [begin(channel) for _ in range(4)]
    told: list[int] = []
    futures = [
        work.get_future().then(lambda _, number=number: told.append(number))
        for number, work in enumerate(works)
    ]
    for number in (2, 1, 3):
        client.end(number)
        works[number].wait()  # which looks at this work alone
    assert not any(future.done() for future in futures)
    client.end(0)
    for future in futures:
        wait_until(future.done, "the callback was called")
    assert told == [0, 1, 2, 3]


def test_a_future_that_is_asked_for_late_waits_for_its_turn_too(
    network: tuple[Network, Channel],
) -> None:
    client, channel = network
    first, second, third = (begin(channel) for _ in range(3))
    told: list[str] = []
    client.end(1)
    wait_until(lambda: second not in channel.under_way(), "a thread has taken it")
    after = second.get_future().then(lambda _: told.append("second"))
    first.get_future().then(lambda _: told.append("first"))
    client.end(0)
    wait_until(after.done, "the callback was called")
    assert told == ["first", "second"]
    # A work that is done has its future at once.
    client.end(2)
    third.wait()
    assert third.get_future().done()


def test_a_callback_that_waits_for_a_later_one_lets_those_up_to_it_go_first(
    network: tuple[Network, Channel],
) -> None:
    client, channel = network
    works = [begin(channel) for _ in range(4)]
    futures = [work.get_future() for work in works]
    told: list[str] = []

    def waits(_: Any) -> None:
        futures[2].wait()
        told.append("first")

    def note(name: str) -> Callable[[Any], None]:
        return lambda _: told.append(name)

    ends = [
        futures[0].then(waits),
        futures[1].then(note("second")),
        futures[2].then(note("third")),
        futures[3].then(note("fourth")),
    ]
    for number in (3, 2, 0):
        client.end(number)
    wait_until(lambda: bool(channel.turns._paused), "the first one's callback waits")
    assert told == []
    client.end(1)
    for end in ends:
        wait_until(end.done, "the callback was called")
    assert told == ["second", "third", "first", "fourth"]


class Done:
    """A work that is done, and whose callback is this."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver = deliver

    def passes(self) -> bool:
        return False


def started(
    outer: Turns, first: Callable[[], None], second: Callable[[], None]
) -> threading.Thread:
    """Return the thread on which the first one's callback waits. The second one is done then."""
    callbacks.install()
    works: list[Any] = [Done(first), Done(second)]
    for work in works:
        outer.begin(work)
    thread = threading.Thread(target=lambda: outer.done(works[0], here=True), daemon=True)
    thread.start()
    wait_until(lambda: bool(outer._paused), "it waits")
    outer.done(works[1], here=True)
    return thread


def test_a_callback_that_waits_for_what_it_began_lets_no_other_go_first() -> None:
    outer, inner = Turns(), Turns()
    outer.add_inner(inner)
    told: list[str] = []
    of_callback: torch.futures.Future[None] = torch.futures.Future()
    nested: Any = Done(lambda: of_callback.set_result(None))

    def first() -> None:
        inner.begin(nested)
        of_callback.wait()
        told.append("first")

    thread = started(outer, first, lambda: told.append("second"))
    outer._go_on()  # whoever comes by does nothing
    assert told == []
    inner.done(nested, here=True)
    thread.join(DEADLINE)
    assert told == ["first", "second"]


def crossed(me: Me, op: dist.ReduceOp.RedOpType) -> list[list[float]]:
    """Rank 0's callback begins its collective before the program's next one, and rank 1's after."""
    me.init()
    first, nested, second = (torch.full((5,), value + me.rank) for value in (1.0, 10.0, 100.0))
    begun = threading.Event()  # in the callback, on rank 0; by the program, on rank 1
    nested_work: list[Any] = []

    def callback(_: Any) -> None:
        if me.rank == 1:
            assert begun.wait(DEADLINE)
        nested_work.append(dist.all_reduce(nested, op=op, async_op=True))
        if me.rank == 0:
            begun.set()

    if me.rank == 0:
        me.hear()  # that rank 1's callback is in its place
    work: Any = dist.all_reduce(first, async_op=True)
    called = work.get_future().then(callback)
    if me.rank == 1:
        me.say("in place")
    else:
        assert begun.wait(DEADLINE)
    second_work: Any = dist.all_reduce(second, op=op, async_op=True)
    if me.rank == 1:
        begun.set()
    called.wait()
    for each in (second_work, nested_work[0]):
        each.wait()
    dist.barrier()
    return [sorted(set(each.tolist())) for each in (first, nested, second)]


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX], ids=["summed", "on Gloo"])
def test_what_callbacks_begin_is_not_taken_for_what_the_program_begins_meanwhile(
    launch: Launch, op: Any
) -> None:
    ranks = launch(crossed, 2, op)
    assert ranks.hear(1) == "in place"
    ranks.tell(0, "go")
    both = [[21.0], [201.0]] if op == dist.ReduceOp.SUM else [[11.0], [101.0]]
    assert ranks.results() == [[[3.0], *both]] * 2


@pytest.mark.parametrize("on_gloo", [False, True], ids=["summed", "on Gloo"])
def test_a_callback_whose_wait_ends_while_turns_look_goes_on_first(on_gloo: bool) -> None:
    """What it waits for is complete, and nothing else is under way, between two of their looks."""
    outer, inner = Turns(), Turns()
    outer.add_inner(inner)
    told: list[str] = []
    ended = threading.Event()

    class Ends(torch.futures.Future[None]):
        """A future that is completed just after turns have learned that it is not."""

        def done(self) -> bool:
            before = super().done()
            if outer._paused:
                end()
            return before

    of_callback = Ends()
    nested: Any = OnGloo() if on_gloo else Done(lambda: of_callback.set_result(None))

    def end() -> None:
        if ended.is_set():
            return
        ended.set()
        if on_gloo:
            of_callback.set_result(None)
            nested.over = True
        else:
            inner.done(nested, here=True)

    def first() -> None:
        inner.beside(nested) if on_gloo else inner.begin(nested)
        of_callback.wait()
        told.append("first")

    thread = started(outer, first, lambda: told.append("second"))
    end()
    thread.join(DEADLINE)
    wait_until(lambda: len(told) == 2, "both were called")
    assert told == ["first", "second"]


class OnGloo:
    """A work that Gloo ends when the test says so; it must not be waited for."""

    def __init__(self) -> None:
        self.over = False

    def has_told(self) -> bool:
        return self.over

    def is_completed(self) -> bool:
        raise AssertionError("it waits for services, to name who is gone")


def test_turns_ask_what_is_on_gloo_and_never_block() -> None:
    turns = Turns()
    works = [OnGloo(), OnGloo()]
    for work in works:
        turns.beside(work)
        assert not turns._rests()
    for work in works:
        work.over = True
    assert turns._rests()


def test_turns_go_on_when_what_is_on_gloo_is_over() -> None:
    """A callback waits for the work behind its own, and began something that Gloo has."""
    outer, inner = Turns(), Turns()
    outer.add_inner(inner)
    on_gloo, second = OnGloo(), torch.futures.Future[None]()
    told: list[str] = []

    def first() -> None:
        inner.beside(on_gloo)
        second.wait()
        told.append("first")

    thread = started(outer, first, lambda: second.set_result(None))
    for _ in range(3):
        outer._stir()
        assert not second.done()
    on_gloo.over = True
    thread.join(DEADLINE)
    assert told == ["first"]
    wait_until(lambda: not inner._looks, "the thread that looked is gone")
    assert inner._others == []


class Unasked(Done):
    """A work that is done, and whose future nobody asks for."""

    def passes(self) -> bool:
        return True


@pytest.mark.parametrize("groups", [1, 2])
def test_a_callback_that_waits_for_a_later_one_hears_that_what_it_began_has_ended(
    groups: int,
) -> None:
    """What it began, in its own group and in another one, nobody waits for."""
    outer = Turns()
    inners = [Turns() for _ in range(groups)]
    second = torch.futures.Future[None]()
    begun: list[Any] = [Unasked(lambda: None) for _ in inners]

    def first() -> None:
        for inner, work in zip(inners, begun, strict=True):
            outer.add_inner(inner)
            inner.begin(work)
        second.wait()

    thread = started(outer, first, lambda: second.set_result(None))
    for inner, work in zip(inners, begun, strict=True):
        outer._stir()
        assert not second.done()
        inner.done(work, here=False)
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize("trial", range(10))
@pytest.mark.parametrize("slow", [False, True])
def test_callbacks_that_wait_for_the_same_one_go_on_in_their_order(slow: bool, trial: int) -> None:
    """Each begins one thing after the other then, and waits for it."""
    del trial  # each has other chances
    callbacks.install()
    outer, inner = Turns(), Turns()
    outer.add_inner(inner)
    third: torch.futures.Future[None] = torch.futures.Future()
    told: list[str] = []

    def begin(name: str, turn: int) -> None:
        told.append(name)
        future = torch.futures.Future[None]()
        work: Any = Done(lambda: future.set_result(None))
        inner.begin(work)

        def end() -> None:
            if slow:
                wait_until(lambda: turn in outer._paused, "it waits")
            inner.done(work, here=True)

        threading.Thread(target=end, daemon=True).start()
        future.wait()

    def waits(name: str, turn: int) -> Callable[[], None]:
        def callback() -> None:
            third.wait()
            begin(f"{name} 1", turn)
            begin(f"{name} 2", turn)

        return callback

    works: list[Any] = [Done(waits("first", 1)), Done(waits("second", 2))]
    works.append(Done(lambda: third.set_result(None)))
    for work in works:
        outer.begin(work)
    for work in reversed(works):
        threading.Thread(target=partial(outer.done, work, here=True), daemon=True).start()
    wait_until(lambda: len(told) == 4, "all were begun")
    assert told == ["first 1", "first 2", "second 1", "second 2"]


def through_another_group(me: Me) -> list[list[float]]:
    """Callbacks begin one thing after the other in another group, which has the same ranks."""
    me.init()
    pair: Any = dist.new_group([0, 1])
    tensors = [torch.full((3,), 10.0**n + me.rank) for n in range(4)]

    def callback(n: int) -> Callable[[Any], None]:
        def through(_: Any) -> None:
            for tensor in tensors[n : n + 2]:
                work: Any = dist.all_reduce(tensor, group=pair, async_op=True)
                if me.rank == 1:  # so that only rank 0 waits for the future
                    wait_until(work.is_completed, "it is done")
                work.get_future().wait()

        return through

    works: list[Any] = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    ends = [work.get_future().then(callback(2 * n)) for n, work in enumerate(works)]
    for end in ends:
        end.wait()
    dist.barrier()
    return [sorted(set(tensor.tolist())) for tensor in tensors]


def test_callbacks_keep_their_order_in_other_groups_too(launch: Launch) -> None:
    sums = [[2 * 10.0**n + 1] for n in range(4)]
    assert launch(through_another_group, 2).results() == [sums] * 2


class Gloos:
    """A work of Gloo's, which completes its future before it says that it is done."""

    def __init__(self, *, has_future: bool) -> None:
        self.over = threading.Event()
        self.future: torch.futures.Future[list[torch.Tensor]] | None = None
        if has_future:
            self.future = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self.future is None:
            raise RuntimeError(delegated_work.NO_FUTURE)
        return self.future

    def is_completed(self) -> bool:
        return self.future is not None and self.over.is_set()

    def end(self) -> None:
        if self.future is not None:
            self.future.set_result([])
        self.over.set()


class Owner:
    """The backend of such a work."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def wait(self, inner: Gloos, *_: Any) -> bool:
        assert inner.over.wait(DEADLINE)
        if self.fails:
            raise RuntimeError("it failed")
        return True

    def explain(self, error: Exception, _: Any) -> Exception:
        return error

    def over(self, work: Any) -> None:
        pass


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("has_future", "fails"), [(True, False), (False, False), (False, True)])
def test_what_is_on_gloo_has_told_when_the_callbacks_of_its_futures_have_run(
    asked: bool, has_future: bool, fails: bool
) -> None:
    def play() -> tuple[weakref.ref[Any], Any]:
        gloos: Any = Gloos(has_future=has_future)
        owner: Any = Owner(fails=fails)
        work = delegated_work.DelegatedWork(gloos, owner, Handed(), None)
        work.will_tell()
        told: list[bool] = []
        if asked:
            work.get_future().add_done_callback(lambda _: told.append(work.has_told()))
        assert not work.has_told()
        gloos.end()
        wait_until(work.has_told, "it has")
        assert told == [False] * asked
        return weakref.ref(owner), work.get_future()

    owner, future = play()
    if fails:
        with pytest.raises(RuntimeError, match="it failed"):
            future.wait()
    # Neither the future nor its error keeps the backend.
    wait_until(lambda: gc.collect() >= 0 and owner() is None, "nobody has it")


def chained(me: Me) -> tuple[float, float]:
    """Callbacks of what callbacks began, and a destroyed group, and a new one."""
    sums = []
    for _ in range(2):
        me.init()
        tensor = torch.ones(3)
        again: list[Any] = []

        def begin_again(_: Any, tensor: torch.Tensor = tensor, again: list[Any] = again) -> None:
            work: Any = dist.all_reduce(tensor, async_op=True)
            again.append(work.get_future())
            if len(again) < 4:
                again[-1].then(begin_again).wait()
            else:
                again[-1].wait()

        work: Any = dist.all_reduce(tensor, async_op=True)
        work.get_future().then(begin_again).wait()
        sums.append(tensor[0].item())
        dist.destroy_process_group()
    return sums[0], sums[1]


def test_callbacks_of_what_callbacks_began_may_begin_more(launch: Launch) -> None:
    assert launch(chained, 2).results() == [(32.0, 32.0)] * 2


def alone_in_a_callback(me: Me, end: str) -> str:
    """Rank 0's callback begins what rank 1 never does."""
    me.init()
    asked = threading.Event()

    def callback(_: Any) -> None:
        asked.set()
        dist.all_reduce(torch.ones(3))

    if me.rank == 1:
        me.hear()
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    if me.rank == 1:
        work.wait()
        me.hear()  # until the other one is told
        return ""
    called = work.get_future().then(callback)
    me.say("in place")
    assert asked.wait(DEADLINE)
    me.say("asked")
    if end == "destroyed":
        dist.destroy_process_group()
    with pytest.raises(RuntimeError) as raised:
        called.wait()
    return str(raised.value)


@pytest.mark.parametrize("end", ["destroyed", "killed"])
def test_a_callback_that_waits_for_ranks_that_do_not_come_is_told_when_it_is_in_vain(
    launch: Launch, end: str
) -> None:
    ranks = launch(alone_in_a_callback, 2, end)
    assert ranks.hear(0) == "in place"
    ranks.tell(1, "go")
    assert ranks.hear(0) == "asked"
    if end == "killed":
        ranks.kill(1)
        assert "RankLost: rank 1 is lost" in ranks.result(0)
    else:
        assert "Closed: the process group was destroyed" in ranks.result(0)
        ranks.tell(1, "go")
        ranks.result(1)


def ended_in_callbacks(me: Me) -> int:
    me.init(timeout=timedelta(minutes=10))

    def in_a_callback() -> Any:
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        return work.get_future().then(lambda _: dist.all_reduce(torch.ones(3))).wait()

    in_a_callback()
    if me.rank == 1:
        # As if its connections had failed: rank 0 hears that it is gone, there alone.
        backend_of(None)._of_callbacks.made.abort()  # type: ignore[union-attr]
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))
        me.hear()
        return 0
    with pytest.raises(RuntimeError, match="RankLeft: rank 1 left"):
        in_a_callback()
    with pytest.raises(RuntimeError, match="RankLeft: rank 1 left"):
        in_a_callback()
    with pytest.raises(errors.RankLeft, match="the group ended, here, because rank 1 left") as left:
        dist.all_reduce(torch.ones(3))
    return left.value.rank


def test_a_group_ends_with_what_its_callbacks_begin(launch: Launch) -> None:
    ranks = launch(ended_in_callbacks, 2)
    assert ranks.result(0) == 1
    ranks.tell(1, "leave")
    ranks.result(1)


POWER_STEPS = 200
TOLD_EVERY = 20  # steps, so that a slow machine is not taken for one that hangs
WIDTH = 32


def power_sgd(me: Me, backend: str, one_by_one: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a training with two buckets of equal size.

    `one_by_one`: a bucket's exchange ends before the next one's begins. Gloo needs it: it ends the
    process where the ranks' callbacks do not fall into one order.
    """
    me.init(backend)
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    elements = WIDTH * (WIDTH + 1)
    model = DistributedDataParallel(network, bucket_cap_mb=4 * elements / 2**20)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    buckets: dict[int, int] = {}

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets[bucket.index()] = bucket.buffer().numel()
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if one_by_one:
            future.wait()
        return future

    hook.__annotations__ = {}
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dice = torch.Generator().manual_seed(me.rank)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    losses = []
    for step in range(POWER_STEPS):
        if step % TOLD_EVERY == 0:
            me.say(step)
        x = torch.randn(16, WIDTH, generator=dice)
        optimizer.zero_grad()
        loss = (model(x) - (x @ target).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert buckets == {0: elements, 1: elements}
    # Several buckets a step, but for the first; what callbacks begin is not among them.
    assert (sums_on_switch() >= 2 * POWER_STEPS - 1) == (backend == "fanin")
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_power_sgd_with_two_buckets_is_the_same_on_all_ranks_and_learns_as_on_gloo(
    launch: Launch,
) -> None:
    def trained(backend: str, one_by_one: bool) -> list[Any]:
        ranks = launch(power_sgd, 4, backend, one_by_one)
        for step in range(0, POWER_STEPS, TOLD_EVERY):
            assert [ranks.hear(rank) for rank in range(4)] == [step] * 4
        return ranks.results()

    ours, one_by_one = trained("fanin", False), trained("fanin", True)
    gloo = trained("gloo", True)
    for losses, parameters in ours:
        assert all(map(torch.equal, parameters, one_by_one[0][1]))
        assert losses[-1] < 0.8 * losses[0]  # it learns
    # Gloo adds in another order, and PowerSGD amplifies rounding from step to step.
    for (losses, _), (as_on_gloo, _) in zip(ours, gloo, strict=True):
        assert losses == pytest.approx(as_on_gloo, rel=1e-2)
