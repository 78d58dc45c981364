"""Horovod's elastic training: states, samples, and ranks that meet anew."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import fanin.horovod as hvd
import pytest
import torch
from conftest import Launch, free_address
from fanin import _connections as connections
from fanin.horovod.errors import HostsUpdatedInterrupt
from fanin.horovod.world import end
from layers import flat
from ranks import Me
from test_horovod import network
from torch import nn, optim


def test_samples_that_are_done_come_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
    order = list(sampler)
    assert sorted(order) == list(range(10))
    sampler.record_batch(0, 2)
    sampler.record_indices(order[5:6])
    done = {*order[:2], order[5]}
    assert sampler.processed_indices == sorted(done)
    assert list(sampler) == order, "until it is shared anew"
    other = hvd.elastic.ElasticSampler(range(10), seed=3)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == [sample for sample in order if sample not in done]
    assert len(other) == 7
    other.set_epoch(1)
    assert sorted(other) == list(range(10))
    assert list(other) != order
    hvd.shutdown()


def test_a_state_goes_back_to_what_was_saved() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    state = hvd.elastic.TorchState(model, optimizer, step=1)
    saved = flat(model)
    state.step = 2
    state.optimizer.param_groups[0]["lr"] = 0.1
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state.model = nn.Linear(3, 3)
    state.restore()
    assert state.model is model
    torch.testing.assert_close(flat(model), saved)
    assert (state.step, optimizer.param_groups[0]["lr"]) == (1, 0.5)
    state.step = 3
    state.save()
    state.step = 4
    state.restore()
    assert state.step == 3


def test_a_scheduler_goes_back_to_what_was_saved() -> None:
    optimizer = optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = hvd.elastic.TorchState(optimizer=optimizer, lr_scheduler=scheduler)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    state.restore()
    assert state.lr_scheduler is scheduler
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def with_schedulers(me: Me, ours: bool) -> list[float]:
    hvd.init()
    model = network(me.rank)
    optimizer: Any = optim.SGD(model.parameters(), lr=[1.0, 7.0][me.rank])
    if ours:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedulers = optim.lr_scheduler
    scheduler = schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer, 1.0), schedulers.StepLR(optimizer, 1, gamma=0.5)],
        milestones=[1],
    )
    if me.rank == 0:
        for _ in range(2):
            with optimizer.skip_synchronize() if ours else contextlib.nullcontext():
                optimizer.step()
            scheduler.step()
    state = hvd.elastic.TorchState(model, optimizer, lr_scheduler=scheduler)
    state.sync()
    assert state.lr_scheduler is scheduler
    assert scheduler.last_epoch == 2
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(2):
        optimizer.step()
        state.lr_scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    hvd.shutdown()
    return rates


@pytest.mark.parametrize("ours", [False, True], ids=["plain optimizer", "DistributedOptimizer"])
def test_schedulers_are_loaded_and_stay_bound_to_their_optimizers(
    launch: Launch, ours: bool
) -> None:
    assert launch(with_schedulers, 2, ours).results() == [[0.5, 0.25, 0.125]] * 2


def with_what_pickle_does_not_take(me: Me) -> list[str]:
    hvd.init()
    ours = (lambda: None) if me.rank == 0 else "of rank 1"
    theirs = (lambda: None) if me.rank == 1 else "of rank 0"
    state = hvd.elastic.TorchState(network(me.rank), schedule=ours)
    told = []
    for call in (
        state.sync,
        lambda: hvd.broadcast_object(ours),
        lambda: hvd.allgather_object(theirs),
        hvd.elastic.run(lambda _: None).__get__(state),  # which would not try again
    ):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        told.append(str(caught.value))
    assert hvd.allgather_object(me.rank) == [0, 1], "all go on"
    hvd.shutdown()
    return told


def test_what_cannot_be_pickled_is_told_to_all_ranks(launch: Launch) -> None:
    first, second = launch(with_what_pickle_does_not_take, 2).results()
    assert first == second
    assert "rank 0's object cannot be pickled: " in first[0]
    assert "lambda" in first[1]
    assert "rank 1's object cannot be pickled: " in first[2]
    assert first[3] == first[0]


def test_hosts_interrupt_once_and_say_if_some_are_only_lost() -> None:
    told = hvd.elastic.HostUpdateResult
    state = hvd.elastic.ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, x=1)
    state.commit()
    for at, changes, alone in (
        (1.0, [told.removed], True),
        (2.0, [told.removed, told.added], False),
        (3.0, [told.added], False),
    ):
        for change in changes:
            state.on_hosts_updated(at, change)
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is alone
        state.commit()
    state.on_hosts_updated(4.0, told.added)
    state.on_reset()
    state.commit()


def test_a_meeting_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    connect, met = connections.connect, [OSError("a rank went while all met"), None, None]

    def meet(*given: Any) -> Any:
        failure = met.pop(0)
        if failure is not None:
            raise failure
        return connect(*given)

    monkeypatch.setattr(connections, "connect", meet)
    state = hvd.elastic.ObjectState(steps=0)
    resets = [hvd.HorovodInternalError("while it adapted"), None]

    def adapt() -> None:
        failure = resets.pop(0)
        if failure is not None:
            raise failure

    state.register_reset_callbacks([adapt])

    @hvd.elastic.run
    def train(state: Any) -> int:
        state.steps += 1
        if state.steps == 1:
            state.commit()
            raise hvd.HorovodInternalError("somebody is gone")
        return int(state.steps)

    assert train(state) == 2
    assert (met, resets) == ([], [])
    hvd.shutdown()


def after_a_failed_one(me: Me) -> float:
    if me.rank == 0:
        # As an init_process_group that failed on this rank alone has left it.
        torch.distributed.distributed_c10d._world.group_count = 1
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return total


def test_ranks_meet_though_some_have_failed_to_meet_before(launch: Launch) -> None:
    assert launch(after_a_failed_one, 2).results() == [2.0, 2.0]


def disagreeing(me: Me) -> tuple[int, str]:
    hvd.init()
    calls = 0

    @hvd.elastic.run
    def train(_: Any) -> None:
        nonlocal calls
        calls += 1
        assert calls == 1, "it would come to the same"
        hvd.allreduce(torch.ones(2 + me.rank), name="x")

    with pytest.raises(hvd.HorovodInternalError) as caught:
        train(hvd.elastic.ObjectState(steps=0))
    hvd.shutdown()
    return calls, str(caught.value)


def test_a_mistake_is_not_tried_again(launch: Launch) -> None:
    for calls, told in launch(disagreeing, 2).results():
        assert calls == 1
        assert "allreduce 'x': ranks disagree about the shape" in told


def with_the_store_of_rank_0(me: Me, port: str) -> str:
    os.environ["MASTER_PORT"] = port
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    hvd.init()
    me.say("there")
    if me.rank == 0:
        me.hear()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.init()
    return str(caught.value)


def test_nobody_meets_anew_where_the_store_was_of_the_killed_rank(launch: Launch) -> None:
    ranks = launch(with_the_store_of_rank_0, 3, free_address().rpartition(":")[2])
    for rank in range(3):
        ranks.hear(rank)
    ranks.kill(0)
    for rank in (1, 2):
        assert "it must be the launcher's" in ranks.result(rank)


def elastic(me: Me) -> dict[str, Any]:
    hvd.init()
    model = network(me.rank)
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.TorchState(
        model, optim.SGD(model.parameters(), lr=0.1), sampler=sampler, step=0, sizes=[]
    )
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total").item()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            if state.step == 2 and me.rank == 1 and hvd.size() == 3:
                me.say("dies")
                me.hear()
            if state.step == 2:
                hvd.barrier()
            state.sizes = [*state.sizes, int(total)]
            state.step += 1
            if state.step == 1:
                state.sampler.record_batch(0, 1)
            state.commit()

    train(state)
    result = {
        "rank": hvd.rank(),
        "sizes": state.sizes,
        "resets": resets,
        "model": flat(model),
        "left": list(state.sampler),
    }
    hvd.shutdown()
    return result


def test_a_training_goes_on_without_a_killed_rank_from_its_last_commit(launch: Launch) -> None:
    ranks = launch(elastic, 3)
    assert ranks.hear(1) == "dies"
    ranks.kill(1)
    first, second = ranks.result(0), ranks.result(2)
    assert (first["rank"], second["rank"]) == (0, 1)
    for got in (first, second):
        assert got["sizes"] == [3, 3, 2, 2]
        assert got["resets"] == [2]
        # Rank 0's parameters, four steps later: the one that failed counts once.
        torch.testing.assert_close(got["model"], flat(network(0)) + 4.0)
    assert first["left"] == [3, 5, 7, 9, 11]
    assert second["left"] == [4, 6, 8, 10, 3], "what three ranks had is not given again"


def ended(me: Me) -> list[int]:
    hvd.init()
    state = hvd.elastic.ObjectState(sizes=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while len(state.sizes) < 3:
            if state.sizes and me.rank == 1:
                end()  # as a process does that ends, by an exception for example
                return
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
            state.sizes = [*state.sizes, int(total)]
            state.commit()

    train(state)
    hvd.shutdown()
    return list(state.sizes)


def test_a_training_goes_on_without_a_rank_that_ended(launch: Launch) -> None:
    assert launch(ended, 3).results() == [[3, 2, 2], [3], [3, 2, 2]]


def told_of_hosts(me: Me) -> list[int]:
    hvd.init()
    state = hvd.elastic.ObjectState(began=0, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.began += 1
        while state.step < 3:
            state.step += 1
            if state.step == 2 and me.rank == 0 and state.began == 1:
                state.on_hosts_updated(1.0, hvd.elastic.HostUpdateResult.added)
            state.commit()

    train(state)
    hvd.shutdown()
    return [state.began, state.step]


def test_new_hosts_interrupt_at_a_commit_and_nothing_is_lost(launch: Launch) -> None:
    assert launch(told_of_hosts, 2).results() == [[2, 3], [2, 3]]


def some_go_on(me: Me) -> tuple[list[int], int] | str:
    if me.rank == 1:
        return "not in it"
    hvd.init(comm=[3, 2, 0])
    state = hvd.elastic.ObjectState(sizes=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while len(state.sizes) < 3:
            if state.sizes and me.rank == 3:
                end()
                return
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
            state.sizes = [*state.sizes, int(total)]
            state.commit()

    train(state)
    rank = hvd.rank() if hvd.is_initialized() else -1
    hvd.shutdown()
    return list(state.sizes), rank


def test_some_of_the_ranks_go_on_without_one_of_them(launch: Launch) -> None:
    results = launch(some_go_on, 4).results()
    assert results == [([3, 2, 2], 1), "not in it", ([3, 2, 2], 0), ([3], -1)]
