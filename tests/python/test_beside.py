"""What ATP and GOAT do not have, by the ranks' own services beside them; and when Gloo has it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, switch_here
from fanin import _fanin, _membership, _services, errors
from fanin import _handshake as handshake
from fanin._join import join
from fanin._settings import Settings
from fanin.torch import Options
from fanin.torch.backend import FaninBackend, backend_of
from ranks import DEADLINE, Me
from test_sharded import BOUND, STEPS, fully_sharded, furthest
from torch.distributed.distributed_c10d import _coalescing_manager

# No switch: the ranks sum themselves.
ALONE = ""
LENGTHS = (1, 300, 20_003)
LACKED = (torch.float64, torch.int64, torch.int8, torch.uint8)
SUMMED = (*LACKED, torch.float32, torch.float16, torch.bfloat16, torch.int32)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.5, torch.bfloat16: 4.0}


@pytest.fixture(params=["atp", "goat"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def at(protocol: str) -> Iterator[str]:
    with switch_here(protocol=protocol) as running:
        yield running.address


def init(me: Me, machines: str | None = None, protocol: str = "atp", **said: Any) -> None:
    """Each rank is a machine of its own; or on the one whose letter stands at its place."""
    name = me.rank if machines is None else machines[me.rank]
    said = {"machine": f"machine {name}", "protocol": protocol} | said
    me.init(timeout=timedelta(minutes=10), pg_options=Options(**said))


def backend() -> FaninBackend:
    return backend_of(None)


def on_gloo() -> int:
    """How many collectives this rank has done on Gloo."""
    return int(backend()._gloo._get_sequence_number_for_group())


def by_own_services() -> int:
    """How many collectives this rank has done by own services beside the group's protocol."""
    own = backend()._own.made
    assert own is None or own._client is not None
    told = {} if own is None or own._client is None else own._client.statistics()
    return int(told.get("completed", 0) + told.get("others_completed", 0))


def by_protocol() -> int:
    client: Any = backend()._channel._client
    told = client.statistics()
    return int(told["completed"] + told["others_completed"])


def drawn(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    noise = torch.randn(length, generator=generator, dtype=torch.float64).mul(50)
    # A negative number has no place in uint8 but by way of an integer.
    return noise.to(dtype) if dtype.is_floating_point else noise.long().to(dtype)


def expected(n: int, length: int, dtype: torch.dtype, average: bool) -> torch.Tensor:
    """The exact sum; integers wrap around, and are then divided and rounded towards zero."""
    parts = [drawn(rank, length, dtype) for rank in range(n)]
    if dtype.is_floating_point:
        total = torch.stack(parts).double().sum(0)
        return total / n if average else total
    whole = torch.stack(parts).long().sum(0).to(dtype)
    return whole.div(n, rounding_mode="trunc") if average else whole


def is_right(found: torch.Tensor, right: torch.Tensor) -> bool:
    if not found.is_floating_point():
        return torch.equal(found, right)
    return bool((found.double() - right).abs().max() <= TOLERANCE[found.dtype])


def sums(me: Me, machines: str, protocol: str, said: dict[str, Any]) -> int:
    init(me, machines, protocol, **said)
    gloo: Any = dist.new_group(backend="gloo")
    n, done = me.world_size, 0
    assert backend()._own.made is None
    for dtype in SUMMED:
        for length in LENGTHS:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                average = op == dist.ReduceOp.AVG
                right = expected(n, n * length, dtype, average)
                whole = drawn(me.rank, n * length, dtype)
                if dtype in LACKED:
                    tensor = whole.clone()
                    dist.all_reduce(tensor, op=op)
                    assert is_right(tensor, right), (dtype, op, tensor, right)
                    done += 1
                slices = list(right.chunk(n))
                output = torch.empty(length, dtype=dtype)
                dist.reduce_scatter_single(output, whole, op=op)
                assert is_right(output, slices[me.rank])
                listed = torch.empty(length, dtype=dtype)
                dist.reduce_scatter(listed, list(whole.chunk(n)), op=op)
                assert torch.equal(listed, output)
                root = length % n
                tensor = whole.clone()
                dist.reduce(tensor, root, op=op)
                if me.rank == root:
                    assert is_right(tensor, right)
                else:
                    assert torch.equal(tensor, whole), "the others keep what they had"
                done += 3
                if not average:
                    dist.all_reduce(whole, group=gloo)
                    assert is_right(whole, right), "Gloo agrees"
                assert (on_gloo(), by_own_services()) == (0, done)
    # They are there now, and move, too.
    for dtype in (torch.bool, torch.float32, torch.complex64):
        parts = [drawn(rank, 700, torch.float64).to(dtype) for rank in range(n)]
        gathered = [torch.empty_like(parts[0]) for _ in range(n)]
        dist.all_gather(gathered, parts[me.rank])
        assert all(map(torch.equal, gathered, parts))
        flat = torch.empty(n * 700, dtype=dtype)
        dist.all_gather_single(flat, parts[me.rank])
        assert torch.equal(flat, torch.cat(parts))
        dist.broadcast(parts[me.rank], 1)
        assert torch.equal(parts[me.rank], gathered[1])
        done += 3
    assert (on_gloo(), by_own_services(), by_protocol()) == (0, done, 0)
    # What the protocol has is still the protocol's.
    for dtype in (torch.float32, torch.int32):
        dist.all_reduce(torch.ones(5, dtype=dtype))
    assert (on_gloo(), by_own_services(), by_protocol()) == (0, done, 2)
    own = backend()._own.made
    assert own is not None
    assert own.encrypts == backend().encrypts == (said.get("security") == "encrypt")
    assert backend()._own._count == 1, "one job for all of it"
    return done


@pytest.mark.parametrize(
    ("machines", "said"),
    [("abc", {}), ("aab", {}), ("ab", {"wire_dtype": "bfloat16", "security": "encrypt"})],
    ids=["machines", "two of one", "other settings"],
)
def test_what_a_protocol_does_not_sum_own_services_do(
    launch: Launch, at: str, protocol: str, machines: str, said: dict[str, Any]
) -> None:
    ranks = launch(sums, len(machines), machines, protocol, said, at=at)
    first, *others = ranks.results()
    assert first > 100
    assert others == [first] * len(others)


def coalesced(me: Me) -> None:
    init(me)
    tensors = [torch.full((3,), float(me.rank), dtype=torch.float64) for _ in range(3)]
    dist.all_reduce_coalesced(tensors)
    assert all(tensor.tolist() == [1.0] * 3 for tensor in tensors)
    with _coalescing_manager() as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(5))
    manager.wait()
    assert all(tensor.tolist() == [2.0] * 3 for tensor in tensors)
    outputs = [torch.zeros(4) for _ in range(2)]
    with _coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.reduce_scatter_single(output, torch.ones(8))
    manager.wait()
    assert all(output.tolist() == [2.0] * 4 for output in outputs)
    assert on_gloo() == 0
    # One that neither has.
    most = torch.full((3,), float(me.rank), dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most.tolist() == [1.0] * 3
    assert on_gloo() == 1


def test_several_at_once_are_summed_as_one_is(launch: Launch, atp: str) -> None:
    launch(coalesced, 2, at=atp).results()


def only_moved(me: Me) -> None:
    init(me)
    tensor = torch.full((4,), float(me.rank))
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1.0] * 4
    dist.all_gather([torch.empty(4) for _ in range(2)], tensor)
    assert on_gloo() == 2
    assert backend()._own.made is None


def test_what_is_only_moved_is_worth_no_job_beside(launch: Launch, atp: str) -> None:
    launch(only_moved, 2, at=atp).results()


def lacks_nothing(me: Me, said: dict[str, Any]) -> None:
    init(me, **said)
    for dtype in LACKED:
        tensor = torch.ones(1000, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [me.world_size] * 1000
    output = torch.empty(10)
    dist.reduce_scatter_single(output, torch.ones(10 * me.world_size))
    assert output.tolist() == [me.world_size] * 10
    if me.world_size > 1:
        assert on_gloo() == 0
        assert by_protocol() == len(LACKED) + 1
    assert backend()._own.made is None


def test_a_job_with_a_bound_has_all_of_it(launch: Launch, switch: str) -> None:
    bound = {"protocol": "switchml", "loss_bound": 0.02}
    launch(lacks_nothing, 2, bound, at=switch).results()


def test_one_rank_needs_no_services(launch: Launch, atp: str) -> None:
    launch(lacks_nothing, 1, {}, at=atp).results()


def on_one_machine(me: Me) -> None:
    init(me, "aa")
    output = torch.empty(10)
    dist.reduce_scatter_single(output, torch.ones(20))
    assert by_own_services() == 0, "shared memory has them"
    tensor = torch.tensor([2**53 + 1, me.rank])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2**54 + 2, 1]
    assert (by_own_services(), on_gloo()) == (1, 0)


def test_ranks_of_one_machine_sum_other_types_in_its_memory(launch: Launch) -> None:
    launch(on_one_machine, 2, at=ALONE).results()


# Why there are no own services: what fails, and on which ranks.


def cannot_host(*_: Any) -> Any:
    raise OSError("no port is left")


def cannot_join(*_: Any) -> Any:
    raise errors.PoolExhausted("no memory is left")


def cannot_stay(*args: Any) -> Any:
    joined = join(*args)
    # The others have joined, too, and know of nothing.
    joined.close()
    raise errors.FaninError("too late")


def cannot_anything(*_: Any) -> Any:
    raise MemoryError("none left")


def is_cut_off(*_: Any) -> str:
    return "a firewall"


Patch = tuple[Any, str, Any, tuple[int, ...]]
REASONS: dict[str, Patch] = {
    "rank 1 cannot host a service: no port is left": (_membership, "host", cannot_host, (1,)),
    r"(rank 1: )?no memory is left": (_membership, "join", cannot_join, (1,)),
    r"(rank 2: )?MemoryError: none left": (_membership, "join", cannot_anything, (2,)),
    r"(rank 1: )?too late": (_membership, "join", cannot_stay, (1,)),
    r".* does not reach the service of .* \(a firewall\)": (_fanin, "cut_off", is_cut_off, (2,)),
    "3 machines, and services of their own sum for 2 at most": (
        _services,
        "PLACES_MAX",
        2,
        (0, 1, 2),
    ),
}


def without(me: Me, reason: str) -> tuple[list[float], str]:
    init(me)
    module, name, fails, ranks = REASONS[reason]
    said = io.StringIO()
    found = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        if me.rank in ranks:
            patch.setattr(module, name, fails)
        for use in range(3):
            tensor = torch.full((5,), float(me.rank + use), dtype=torch.float64)
            dist.all_reduce(tensor)
            found.append(tensor[0].item())
            dist.reduce(torch.ones(3), 0)
            dist.all_reduce(torch.ones(3))
            assert on_gloo() == 2 * (use + 1)
    assert backend()._own.made is None
    assert backend()._own._count == 1, "once and for all"
    return found, said.getvalue()


@pytest.mark.parametrize("reason", REASONS)
def test_if_one_rank_cannot_all_take_gloo_and_say_why_once(
    launch: Launch, atp: str, reason: str
) -> None:
    results = launch(without, 3, reason, at=atp).results()
    assert [found for found, _ in results] == [[3.0, 6.0, 9.0]] * 3
    (said, *others) = [said for _, said in results]
    assert others == ["", ""]
    told = [line for line in said.splitlines() if "summed by Gloo" in line]
    assert len(told) == 1
    assert re.match(f"fanin: rank 0: what atp does not sum .* cannot do it: {reason}", told[0])


def dies(me: Me, where: str) -> int:
    """Rank 1 dies while own services are joined, and the others hear it from the group."""
    init(me)
    dist.all_reduce(torch.ones(3))
    if me.rank == 1:
        gather = handshake.gather

        def gather_or_die(*args: Any) -> Any:
            return os._exit(9) if args[3] == where else gather(*args)

        def die(*_: Any) -> Any:
            os._exit(9)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake, "gather", gather_or_die)
            if where == "join":
                patch.setattr(_membership, "join", die)
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
    with pytest.raises(errors.RankLost) as caught:
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
    for dtype in (torch.float32, torch.float64):
        with pytest.raises((errors.RankLost, errors.RankLeft)):
            dist.all_reduce(torch.ones(3, dtype=dtype))
    assert on_gloo() == 0
    return caught.value.rank


@pytest.mark.parametrize("where", ["place", "service", "join", "own services"])
def test_a_rank_that_dies_as_own_services_are_joined_is_named(
    launch: Launch, atp: str, where: str
) -> None:
    # The group's timeout is ten minutes.
    ranks = launch(dies, 3, where, at=atp)
    assert [ranks.result(rank) for rank in (0, 2)] == [1, 1]


def left_alone(me: Me, shrinks: bool) -> Any:
    """Rank 1 dies, or leaves, while the others have begun a sum by own services."""
    init(me)
    dist.reduce(torch.ones(3), 0)
    me.say("there")
    if me.rank == 1:
        if me.hear() == "leave":
            dist.destroy_process_group()
            me.hear()
        return None
    with pytest.raises((errors.RankLost, errors.RankLeft)) as caught:
        dist.reduce(torch.ones(3), 0)
    for dtype in (torch.float64, torch.float32):
        with pytest.raises((errors.RankLost, errors.RankLeft)):
            dist.all_reduce(torch.ones(3, dtype=dtype))
    lost: Any = caught.value
    if not shrinks:
        me.say(lost.rank)
        return type(lost).__name__
    fanin.torch.shrink()
    tensor = torch.full((3,), float(me.rank), dtype=torch.float64)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    assert (by_own_services(), on_gloo()) == (1, 0)
    return lost.rank


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_rank_that_is_killed_ends_both_jobs(launch: Launch, atp: str, shrinks: bool) -> None:
    ranks = launch(left_alone, 3, shrinks, at=atp)
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.kill(1)
    if not shrinks:
        assert [ranks.hear(rank) for rank in (0, 2)] == [1, 1]
    results = [ranks.result(rank) for rank in (0, 2)]
    assert results == ([1, 1] if shrinks else ["RankLost"] * 2)


def test_a_rank_that_leaves_ends_both_jobs(launch: Launch, atp: str) -> None:
    ranks = launch(left_alone, 3, False, at=atp)
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.tell(1, "leave")
    assert [ranks.hear(rank) for rank in (0, 2)] == [1, 1]
    assert [ranks.result(rank) for rank in (0, 2)] == ["RankLeft"] * 2
    ranks.tell(1, "end")
    ranks.result(1)


def destroyed(me: Me) -> str:
    """Rank 0 destroys the group while it waits for own services that rank 1 never joins."""
    init(me)
    dist.all_reduce(torch.ones(3))
    if me.rank == 1:
        me.hear()
        return ""
    raised: list[BaseException] = []
    begun = threading.Event()
    make = FaninBackend._make_own

    def made(self: FaninBackend, store: Any) -> Any:
        begun.set()
        return make(self, store)

    def begin() -> None:
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
        except BaseException as error:
            raised.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaninBackend, "_make_own", made)
        thread = threading.Thread(target=begin)
        thread.start()
        assert begun.wait(DEADLINE)
        dist.destroy_process_group()
        thread.join(DEADLINE)
    (error,) = raised
    return f"{type(error).__name__}: {error}"


def test_a_group_can_be_destroyed_while_own_services_are_joined(launch: Launch, atp: str) -> None:
    ranks = launch(destroyed, 2, at=atp)
    assert ranks.result(0).startswith("Closed: the process group was destroyed")
    ranks.tell(1, "end")
    ranks.result(1)


def alone_in_time(me: Me) -> None:
    """Only rank 0 begins a sum by own services; the group's timeout holds there, too."""
    init(me)
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    backend().set_timeout(timedelta(seconds=1 if me.rank == 0 else 600))
    if me.rank == 0:
        with pytest.raises(errors.AllReduceTimeout) as late:
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
        assert late.value.missing_ranks == [1]
        # The group is over: this rank is a collective ahead.
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(errors.Closed, match="the group ended, here, because"):
                dist.all_reduce(torch.ones(3, dtype=dtype))
        me.say("late")
    else:
        with pytest.raises(errors.RankLeft):
            dist.all_reduce(torch.ones(3))


def test_the_groups_timeout_holds_and_ends_both_jobs(launch: Launch, atp: str) -> None:
    ranks = launch(alone_in_time, 2, at=atp)
    assert ranks.hear(0) == "late"
    ranks.results()


def ended_before(me: Me) -> None:
    init(me)
    dist.all_reduce(torch.ones(3))
    if me.rank == 0:
        me.hear()
        backend()._channel.end("the test says so")
    else:
        me.say("there")
    ended = "the group ended, here, because the test says so" if me.rank == 0 else "rank 0 left"
    for _ in range(2):
        with pytest.raises((errors.Closed, errors.RankLeft), match=ended):
            dist.all_reduce(torch.ones(3, dtype=torch.float64))


def test_a_group_that_is_over_joins_no_own_services(launch: Launch, atp: str) -> None:
    ranks = launch(ended_before, 2, at=atp)
    assert ranks.hear(1) == "there"
    ranks.tell(0, "go")
    ranks.results()


def waits(me: Me) -> None:
    init(me)
    dist.all_reduce(torch.ones(3, dtype=torch.int64))
    tensor = torch.ones(2_000_000, dtype=torch.int64)
    for _ in range(3):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        dist.barrier()
        # Not `is_completed`, which takes what is done: the barrier has taken it.
        assert not backend()._channel.under_way()
        work.wait()
    assert tensor.tolist() == [me.world_size**3] * len(tensor)
    # A group that is destroyed waits, too.
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    dist.destroy_process_group()
    work.wait()
    assert tensor[0].item() == me.world_size**4


def test_a_barrier_waits_for_sums_by_own_services(launch: Launch, atp: str) -> None:
    launch(waits, 2, at=atp).results()


def in_order(me: Me) -> list[str]:
    """Callbacks of both jobs' sums; each of them begins others."""
    init(me)
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    order: list[str] = []
    futures = []

    def follow(name: str) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            order.append(name)
            tensor = torch.full((3,), float(len(order)), dtype=torch.float64)
            dist.all_reduce(tensor)
            output = torch.empty(2)
            dist.reduce_scatter_single(output, torch.full((4,), float(len(order))))
            order.append(f"{tensor[0].item():g} {output[0].item():g}")

        return callback

    for step in range(3):
        for dtype, length in ((torch.float32, 1_000_000), (torch.float64, 3)):
            work: Any = dist.all_reduce(torch.ones(length, dtype=dtype), async_op=True)
            futures.append(work.get_future().then(follow(f"{dtype} {step}")))
    for future in futures:
        future.wait()
    inner = backend()._of_callbacks.made
    assert inner is not None
    assert inner._own.made is not None
    assert (on_gloo(), inner._gloo._get_sequence_number_for_group()) == (0, 0)
    assert (backend()._own._count, inner._own._count) == (1, 1)
    return order


def test_callbacks_run_in_the_order_of_both_jobs_sums_and_begin_more(
    launch: Launch, atp: str
) -> None:
    expected = []
    for step in range(3):
        for dtype in ("torch.float32", "torch.float64"):
            expected.append(f"{dtype} {step}")
            expected.append(f"{2 * len(expected)} {2 * len(expected)}")
    assert launch(in_order, 2, at=atp).results() == [expected] * 2


def planned_anew(me: Me) -> None:
    init(me)
    for plans in range(3):
        tensor = torch.ones(3, dtype=torch.int64)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2] * 3
        assert (backend()._own._count, by_own_services()) == (plans + 1, 1)
        fanin.torch.replan(me.switch)
        assert backend()._own.made is None
    dist.all_reduce(torch.ones(3))
    assert by_protocol() == 1


def test_a_new_plan_has_own_services_of_its_own(launch: Launch, atp: str) -> None:
    launch(planned_anew, 2, at=atp).results()


def sharded(me: Me, backend: str) -> Any:
    if backend == "gloo":
        me.init("gloo")
        whole, *_ = fully_sharded(me, (2,))
        return whole, 0
    init(me)
    with pytest.MonkeyPatch.context() as patch:
        # The services of its collectives are not those that the group began with.
        patch.setattr("test_sharded.others_on_switch", lambda _: 10**9)
        whole, scattered, _ = fully_sharded(me, (2,))
    group: Any = dist.group.WORLD
    assert group is not None
    assert by_own_services() >= scattered
    return whole, scattered


def test_fully_sharded_training_equals_gloos(launch: Launch, atp: str) -> None:
    gloo = launch(sharded, 2, "gloo").results()
    for ours, theirs in zip(launch(sharded, 2, "fanin", at=atp).results(), gloo, strict=True):
        assert furthest(ours[0], theirs[0]) <= BOUND
        assert ours[1] == 3 * STEPS


def test_own_services_keep_what_is_not_the_protocols() -> None:
    kept: dict[str, Any] = {
        "job": "train",
        "security": "encrypt",
        "trace": "/tmp/trace.json",
        "page": "127.0.0.1:4880",
        "rate": 10**9,
        "machine": "m",
        "tls_ca": "/etc/ca.pem",
        "secret_file": "/etc/secret",
    }
    others: dict[str, Any] = {
        "switch": "10.0.0.9:4800",
        "protocol": "goat",
        "in_flight": 4096,
        "sub_models": "1000,1000",
        "wire_dtype": "bfloat16",
        "congestion_control": False,
    }
    assert Settings(**kept, **others).of_own_services() == Settings(**kept)
