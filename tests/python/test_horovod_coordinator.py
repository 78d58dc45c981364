"""What rank 0 decides for Horovod's interface, without any process; and plain arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fanin.horovod.adasum import adasum
from fanin.horovod.agreed import Agreed
from fanin.horovod.coordinator import Coordinator
from fanin.horovod.engine import Handle, Outbox
from fanin.horovod.engine_settings import EngineSettings
from fanin.horovod.execution import Groups, Own, reduces
from fanin.horovod.requests import (
    Batch,
    Decision,
    Form,
    Joined,
    Kind,
    Over,
    ReduceOp,
    Refused,
    Repeat,
    Request,
)
from fanin.horovod.world import Position


def form(*shape: int, dtype: torch.dtype = torch.float32) -> Form:
    return Form(shape, dtype, "cpu")


def asks(rank: int, name: str, *shape: int, **fields: Any) -> Request:
    kind = fields.pop("kind", Kind.ALLREDUCE)
    dtype = fields.pop("dtype", torch.float32)
    return Request(rank, kind, name, tensors=(form(*shape, dtype=dtype),), **fields)


def names(batch: object) -> list[str]:
    assert isinstance(batch, Batch)
    return [operation.request.name for operation in batch.operations]


def test_what_all_ranks_have_asked_for_is_decided_in_the_order_in_which_it_is_complete() -> None:
    coordinator = Coordinator(2, reduces)
    for name in ("a", "b", "c"):
        coordinator.hear(asks(0, name, 4, root=ord(name), kind=Kind.BROADCAST))
    assert coordinator.decide() == []
    for name in ("c", "a"):
        coordinator.hear(asks(1, name, 4, root=ord(name), kind=Kind.BROADCAST))
    refused = coordinator.decide()
    assert [each.key[2] for each in refused if isinstance(each, Refused)] == ["c", "a"]
    for rank, order in enumerate(("xyz", "zxy")):
        for name in order:
            coordinator.hear(asks(rank, name, 4))
    (batch,) = coordinator.decide()
    assert names(batch) == ["z", "x", "y"]


def test_what_is_alike_is_fused_up_to_a_size() -> None:
    coordinator = Coordinator(1, reduces)
    half = EngineSettings.fused_bytes_max // 8
    for name, elements in (("a", 3), ("b", half), ("c", half), ("d", 1)):
        coordinator.hear(asks(0, name, elements))
    coordinator.hear(asks(0, "min", 3, op=ReduceOp.Min))
    coordinator.hear(Request(0, Kind.BARRIER, "barrier"))
    assert list(map(names, coordinator.decide())) == [["a", "b"], ["c", "d"], ["min"], ["barrier"]]


@pytest.mark.parametrize(
    ("theirs", "aspect"),
    [
        (asks(1, "x", 4, dtype=torch.float64), "dtype"),
        (asks(1, "x", 4, kind=Kind.ALLGATHER, sparse=True), "layout"),
        (asks(1, "x", 5), "shape"),
        (asks(1, "x", 2, 2), "number of dimensions"),
        (asks(1, "x", 4, op=ReduceOp.Max), "op"),
        (asks(1, "x", 4, scales=(2.0, 1.0)), "factors"),
        (Request(1, Kind.ALLREDUCE, "x", tensors=(form(4), form(4))), "number of tensors"),
        (Request(1, Kind.ALLREDUCE, "x", tensors=(Form((4,), torch.float32, "cuda"),)), "device"),
    ],
)
def test_a_disagreement_names_the_ranks_and_what_they_have(theirs: Request, aspect: str) -> None:
    coordinator = Coordinator(2, reduces)
    coordinator.hear(asks(0, "x", 4))
    coordinator.hear(theirs)
    (refused,) = coordinator.decide()
    assert isinstance(refused, Refused)
    assert f"allreduce 'x': ranks disagree about the {aspect}" in refused.reason
    assert "rank 0 has" in refused.reason
    assert "rank 1" in refused.reason
    coordinator.hear(asks(0, "x", 4))
    coordinator.hear(asks(1, "x", 4))
    assert names(coordinator.decide()[0]) == ["x"], "the name can be used again"


def test_who_joined_is_not_waited_for_and_the_last_one_is_told() -> None:
    coordinator = Coordinator(3, reduces)
    coordinator.hear(asks(0, "x", 4))
    coordinator.hear(asks(1, "x", 4))
    coordinator.hear(Request(2, Kind.JOIN))
    assert names(coordinator.decide()[0]) == ["x"]
    for kind, op in ((Kind.ALLGATHER, ReduceOp.Sum), (Kind.ALLREDUCE, ReduceOp.Min)):
        for rank in (0, 1):
            coordinator.hear(asks(rank, "y", 4, kind=kind, op=op))
        (refused,) = coordinator.decide()
        assert isinstance(refused, Refused)
        assert "rank 2 joined" in refused.reason
    coordinator.hear(Request(1, Kind.JOIN))
    coordinator.hear(Request(0, Kind.JOIN))
    assert coordinator.decide() == [Joined(0)]
    coordinator.hear(asks(0, "z", 4))
    coordinator.hear(asks(1, "z", 4))
    assert coordinator.decide() == [], "it is waited for again"


def test_process_sets_are_known_by_their_ranks() -> None:
    coordinator = Coordinator(3, reduces)

    def all_ask(kind: Kind, ranks: tuple[int, ...], name: str) -> Any:
        for rank in range(3):
            coordinator.hear(Request(rank, kind, name, ranks=ranks))
        (decision,) = coordinator.decide()
        return decision

    made = all_ask(Kind.ADD_PROCESS_SET, (0, 2), "1")
    assert made.operations[0].number == 1
    for wrong in ((), (0, 3), (1, 1), (0, 2)):
        assert isinstance(all_ask(Kind.ADD_PROCESS_SET, wrong, "2"), Refused), wrong
    coordinator.hear(asks(2, "x", 4, process_set=1))
    coordinator.hear(asks(0, "x", 4, process_set=1))
    assert names(coordinator.decide()[0]) == ["x"], "rank 1 is not waited for"
    all_ask(Kind.REMOVE_PROCESS_SET, (0, 2), "3")
    assert isinstance(all_ask(Kind.REMOVE_PROCESS_SET, (0, 2), "4"), Refused)
    coordinator.hear(asks(2, "x", 4, process_set=1))
    (refused,) = coordinator.decide()
    assert isinstance(refused, Refused)


def test_what_waits_for_a_process_set_is_refused_when_the_set_is_removed() -> None:
    now = 0.0
    coordinator = Coordinator(3, reduces, lambda: now)
    for rank in range(3):
        coordinator.hear(Request(rank, Kind.ADD_PROCESS_SET, "1", ranks=(0, 2)))
    coordinator.decide()
    coordinator.hear(asks(2, "x", 4, process_set=1))
    for rank in range(3):
        coordinator.hear(Request(rank, Kind.REMOVE_PROCESS_SET, "2", ranks=(0, 2)))
    refused, removed = coordinator.decide()
    assert isinstance(refused, Refused)
    assert refused.key == (1, Kind.ALLREDUCE, "x")
    assert "process set 1 is not there any more" in refused.reason
    assert isinstance(removed, Batch)
    now = EngineSettings.stall_seconds + 1.0
    assert coordinator.stalled() == []
    assert not coordinator.waiting


def test_who_is_waited_for_long_is_named_once() -> None:
    now = 0.0
    coordinator = Coordinator(3, reduces, lambda: now)
    coordinator.hear(asks(1, "x", 4))
    now = EngineSettings.stall_seconds + 1.0
    (told,) = coordinator.stalled()
    assert "allreduce 'x' waits for ranks 0 and 2" in told
    assert "rank 1 asked" in told
    assert coordinator.stalled() == []


def test_the_end_comes_after_what_all_have_asked_for() -> None:
    coordinator = Coordinator(1, reduces)
    coordinator.hear(asks(0, "x", 4))
    coordinator.hear(Request(0, Kind.SHUTDOWN))
    batch, over = coordinator.decide()
    assert names(batch) == ["x"]
    assert isinstance(over, Over)


def test_ranks_are_counted_on_machines_and_across_them() -> None:
    machines = ["a", "b", "a", "b", "b"]
    positions = [Position.of(rank, machines) for rank in range(5)]
    assert [p.local_rank for p in positions] == [0, 0, 1, 1, 2]
    assert [p.local_size for p in positions] == [2, 3, 2, 3, 3]
    assert [p.cross_rank for p in positions] == [0, 1, 0, 1, 0]
    assert [p.cross_size for p in positions] == [2, 2, 2, 2, 1]
    assert not positions[0].homogeneous


class Name(str):
    """A machine's name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


def test_a_position_among_many_machines_takes_as_many_steps_as_there_are_ranks() -> None:
    machines = [Name(f"machine {number}") for number in range(500) for _ in range(2)]
    Name.compared = 0
    position = Position.of(999, machines)
    assert (position.local_rank, position.cross_rank, position.cross_size) == (1, 499, 500)
    assert Name.compared <= 10 * len(machines)


class OnDevice:
    """A result in a device's memory, and who has said to use it."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self) -> None:
        self.used_on: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.used_on.append(stream)


def test_a_result_on_a_device_is_kept_for_the_stream_of_who_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of the caller on {device}")
    handle = Handle(asks(0, "x", 1), Own([], in_place=False), lambda own, _: own.results[0])
    result: Any = OnDevice()
    handle.own.results.append(result)
    handle.complete()
    assert handle.wait() is result
    assert result.used_on == ["of the caller on cuda:0"]


def test_adasum_averages_what_is_parallel_and_adds_what_is_not() -> None:
    x, y = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])
    torch.testing.assert_close(adasum([x, x]), x)
    torch.testing.assert_close(adasum([x, y]), x + y)
    torch.testing.assert_close(adasum([x, x, y, y]), x + y)
    torch.testing.assert_close(adasum([x, torch.zeros(2)]), x)


def test_who_joined_adds_zeros_on_the_device_that_it_named() -> None:
    groups = Groups(dist.ProcessGroup(0, 1), 0, 1, 0)
    theirs = Form((2,), torch.float32, "cuda")
    assert groups.device_of(theirs) == torch.device("cuda")
    groups.joined_on = 1
    assert groups.device_of(theirs) == torch.device("cuda", 1)
    assert groups.zeros(form(2)).device == torch.device("cpu")


def test_of_what_is_ready_the_largest_priority_goes_first() -> None:
    coordinator = Coordinator(1, reduces)
    for name, priority in (("a", 0), ("b", -3), ("c", 7), ("d", 0)):
        coordinator.hear(asks(0, name, 4, priority=priority))
    assert list(map(names, coordinator.decide())) == [["c", "a", "d", "b"]]


class Follower:
    """A rank: what it has agreed on, and what it has not told yet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.agreed = Agreed()
        self.outbox = Outbox()

    def asks(self, request: Request) -> None:
        self.outbox.put(request, self.agreed.number(request))

    def tells(self, coordinator: Coordinator) -> None:
        mask, requests = self.outbox.take()
        if mask:
            coordinator.hear_again(self.rank, mask)
        for request in requests:
            coordinator.hear(request)

    def hears(self, decisions: list[Decision]) -> list[Decision]:
        whole = self.agreed.whole(decisions)
        self.agreed.learn(whole)
        return whole


def outcome(decisions: list[Decision]) -> tuple[list[Any], list[Any]]:
    """What was decided, in no order: operations with their forms, and what was refused."""
    done = [
        (operation.request.key, operation.request.tensors)
        for decision in decisions
        if isinstance(decision, Batch)
        for operation in decision.operations
    ]
    refused = [each.key for each in decisions if isinstance(each, Refused)]
    return sorted(done, key=str), sorted(refused, key=str)


@pytest.mark.parametrize("seed", range(40))
def test_numbers_decide_what_full_words_decide(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randrange(1, 5)
    agreed = Agreed()
    by_numbers, in_full = Coordinator(ranks, reduces, agreed=agreed), Coordinator(ranks, reduces)
    followers = [Follower(rank) for rank in range(ranks)]
    followers[0].agreed = agreed  # rank 0 has the coordinator's
    of_name = dict.fromkeys("abcdefgh", 4)
    under_way: list[set[str]] = [set() for _ in followers]
    joined: set[int] = set()
    numbers_told = 0
    for _ in range(300):
        rank = draw.randrange(ranks)
        name = draw.choice(list(of_name))
        if draw.random() < 0.03:
            of_name[name] = draw.choice((4, 8))
        if draw.random() < 0.02 and rank not in joined and not under_way[rank]:
            joined.add(rank)
            followers[rank].tells(by_numbers)
            for coordinator in (by_numbers, in_full):
                coordinator.hear(Request(rank, Kind.JOIN))
        elif name not in under_way[rank] and rank not in joined:
            elements = of_name[name] if draw.random() < 0.98 else 12
            request = asks(rank, name, elements)
            under_way[rank].add(name)
            followers[rank].asks(request)
            in_full.hear(request)
        if draw.random() < 0.5:
            for follower in draw.sample(followers, ranks):
                follower.tells(by_numbers)
            got, expected = by_numbers.decide(), in_full.decide()
            assert outcome(got) == outcome(expected)
            numbers_told += sum(isinstance(each, Repeat) for each in by_numbers.shortened)
            for follower in followers[1:]:
                assert outcome(follower.hears(by_numbers.shortened)) == outcome(got)
            done, refused = outcome(got)
            for key in [*(each for each, _ in done), *refused]:
                for each in under_way:
                    each.discard(key[2])
            if any(isinstance(each, Joined) for each in got):
                joined.clear()
            assert by_numbers.waiting == in_full.waiting
    assert ranks > 3 or numbers_told > 0


def test_what_is_asked_by_number_and_waited_for_is_told_and_ends_the_job() -> None:
    now = 0.0
    settings = EngineSettings(stall_seconds=10, shutdown_seconds=20)
    coordinator = Coordinator(2, reduces, lambda: now, settings=settings)
    for _ in range(2):
        for rank in (0, 1):
            coordinator.hear(asks(rank, "a", 4))
        coordinator.decide()
    coordinator.hear_again(1, 1)
    assert coordinator.waiting
    assert coordinator.stalled() == []
    now = 11.0
    (told,) = coordinator.stalled()
    assert "waits for rank 0: rank 1 asked for it" in told
    assert coordinator.stalled() == []
    now = 21.0
    assert coordinator.stalled() == []
    (over,) = coordinator.decide()
    assert isinstance(over, Over)
    assert "waits for rank 0" in over.reason


def test_a_number_that_was_waited_for_is_still_good() -> None:
    now = 0.0
    coordinator = Coordinator(2, reduces, lambda: now)
    for _ in range(2):
        for rank in (0, 1):
            coordinator.hear(asks(rank, "a", 4))
        coordinator.decide()
    coordinator.hear_again(1, 1)
    now = 100.0
    assert len(coordinator.stalled()) == 1
    coordinator.hear_again(0, 1)
    assert list(map(names, coordinator.decide())) == [["a"]]
    for rank in (0, 1):
        coordinator.hear_again(rank, 1)
    assert list(map(names, coordinator.decide())) == [["a"]]
    assert coordinator.shortened == [Repeat((0,))]
    assert not coordinator.waiting


@pytest.mark.parametrize("stall", [60.0, float("inf")])
def test_the_job_ends_in_time_also_by_numbers(stall: float) -> None:
    now = 0.0
    settings = EngineSettings(stall_seconds=stall, shutdown_seconds=30)
    coordinator = Coordinator(2, reduces, lambda: now, settings=settings)
    for _ in range(2):
        for rank in (0, 1):
            coordinator.hear(asks(rank, "a", 4))
        coordinator.decide()
    coordinator.hear_again(1, 1)
    now = 31.0
    assert coordinator.stalled() == []
    (over,) = coordinator.decide()
    assert isinstance(over, Over)


def test_names_that_never_come_again_take_no_numbers() -> None:
    coordinator = Coordinator(1, reduces)
    for step in range(3000):
        coordinator.hear(asks(0, f"loss.{step}", 1))
        coordinator.hear(asks(0, "gradient", 4))
        coordinator.decide()
    coordinator.hear_again(0, 1)
    assert list(map(names, coordinator.decide())) == [["gradient"]]


def test_the_engine_takes_horovods_variables() -> None:
    said = {
        "HOROVOD_FUSION_THRESHOLD": "1000",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
    }
    assert EngineSettings.of(said) == EngineSettings(1000, 0.0025, 7.0, 9.0)
    assert EngineSettings.of({}) == EngineSettings()
    assert EngineSettings.of({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_seconds == float("inf")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME is 'soon': give a number"):
        EngineSettings.of({"HOROVOD_CYCLE_TIME": "soon"})
