"""Training that does not wait for the last worker: whose gradients count, and what all end with."""

from __future__ import annotations

import copy
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Launch
from fanin import errors
from fanin._connections import Followers
from fanin.torch import AsynchronousOptimizer
from fanin.torch.optimizers.coordinator import Noise
from layers import flat, give, layer
from ranks import Failure, Me, sums_on_switch, wait_until
from torch import nn, optim
from torch._C._distributed_c10d import HashStore


def in_step(me: Me) -> dict[str, Any]:
    me.init()
    model = layer(me.rank)
    inner = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = AsynchronousOptimizer(inner, wait_for=me.world_size)
    begun = flat(model)
    for step in range(3):
        give(model, float(me.rank + step))
        optimizer.step()
    optimizer.close()
    return {"begun": begun, "ended": flat(model), "epoch": optimizer.epoch}


def test_waiting_for_all_is_synchronous_training(launch: Launch) -> None:
    ranks = launch(in_step, 4).results()
    alone = layer(0)
    inner = optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    begun = flat(alone)
    for step in range(3):
        give(alone, 1.5 + step)
        inner.step()
    for got in ranks:
        assert torch.equal(got["begun"], begun), "all begin with rank 0's"
        assert got["epoch"] == 3
        assert torch.equal(got["ended"], ranks[0]["ended"])
        torch.testing.assert_close(got["ended"], flat(alone))


def one_late(me: Me, steps: int) -> dict[str, Any]:
    me.init()
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=2)
    late = me.rank == 2
    if late:
        me.hear()
    for _ in range(1 if late else steps):
        optimizer.zero_grad()
        give(model, 100.0 if late else 1.0)
        optimizer.step()
    me.say((optimizer.epoch, flat(model)))
    if not late:
        me.hear()
    summed = sums_on_switch(optimizer._sums)
    optimizer.close()
    return {"ended": flat(model), "steps": optimizer.steps, "summed": summed}


def test_nobody_waits_for_who_is_late_and_its_gradient_counts_when_it_comes(launch: Launch) -> None:
    ranks = launch(one_late, 3, 5)
    begun = flat(layer(0))
    for rank in (0, 1):
        epoch, model = ranks.hear(rank)
        assert epoch == 5
        torch.testing.assert_close(model, begun - 5.0)
    ranks.tell(0, "close")  # one is left beside the late one: both are waited for
    ranks.tell(2, "give")
    ranks.tell(1, "close")
    epoch, model = ranks.hear(2)
    assert epoch == 6
    torch.testing.assert_close(model, begun - 105.0)
    results = ranks.results()
    for got in results:
        assert torch.equal(got["ended"], results[0]["ended"])
    assert [got["steps"] for got in results] == [5, 5, 1]
    assert all(got["summed"] >= 5 for got in results), [got["summed"] for got in results]


def by_history(me: Me) -> dict[str, Any]:
    me.init()
    model = layer(0)
    # No noise: Algorithm 2 needs no second gradient, and waits for as few as is fastest.
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=0.01))
    give(model, 1.0)
    optimizer.step()
    if me.rank == 0:
        for _ in range(4):
            give(model, 1.0)
            optimizer.step()
        me.say(optimizer.epoch)
    else:
        me.hear()
    optimizer.close()
    return {"ended": flat(model), "epoch": optimizer.epoch}


def test_algorithm_2_does_not_wait_for_who_brings_nothing(launch: Launch) -> None:
    ranks = launch(by_history, 2)
    assert ranks.hear(0) == 5
    ranks.tell(1, "close")
    results = ranks.results()
    assert torch.equal(results[0]["ended"], results[1]["ended"])
    assert results[1]["epoch"] == 5


def of_two_dtypes(me: Me) -> dict[str, Any]:
    me.init()
    model = nn.ParameterDict(
        {
            "in_float32": nn.Parameter(torch.zeros(5)),
            "in_float64": nn.Parameter(torch.zeros(3, dtype=torch.float64)),
            "unused": nn.Parameter(torch.ones(2)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        }
    )
    inner = optim.SGD(model.parameters(), lr=1.0, weight_decay=0.0)
    optimizer = AsynchronousOptimizer(inner, wait_for=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = model["in_float32"].sum() + model["in_float64"].sum() * (me.rank + 1)
        value.backward()
        loss: torch.Tensor = value.detach()
        return loss

    first = optimizer.step(closure)
    second = optimizer.step(closure)
    optimizer.close()
    return {"losses": (float(first), float(second)), "state": dict(model.state_dict())}


def test_dtypes_closures_and_parameters_without_gradients(launch: Launch) -> None:
    for rank, got in enumerate(launch(of_two_dtypes, 2).results()):
        assert got["losses"] == (0.0, -5.0 - 4.5 * (rank + 1))
        assert torch.equal(got["state"]["in_float32"], torch.full((5,), -2.0))
        assert torch.equal(got["state"]["in_float64"], torch.full((3,), -3.0, dtype=torch.float64))
        assert torch.equal(got["state"]["unused"], torch.ones(2))
        assert torch.equal(got["state"]["frozen"], torch.ones(2))


def from_a_checkpoint(me: Me) -> torch.Tensor:
    me.init()
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if me.rank == 0:
        give(model, 1.0)
        inner.step()
    optimizer = AsynchronousOptimizer(inner, wait_for=2)
    give(model, 1.0)
    optimizer.step()
    optimizer.close()
    return flat(model)


def test_all_begin_with_the_state_of_rank_0s_optimizer(launch: Launch) -> None:
    for ended in launch(from_a_checkpoint, 2).results():
        torch.testing.assert_close(ended, flat(layer(0)) - 1.0 - 1.5)


def test_the_variance_of_gradients_is_measured() -> None:
    # Two gradients of 4 elements, 3 and 1: their mean is 2, and each is 4 off it, in squares.
    noise = Noise(gradient_square=2.0)
    assert noise.participants([1.0, 1.0, 9.0]) == 3, "nothing is known yet"
    noise.add([36.0], 36.0)
    noise.add([36.0, float("inf")], float("nan"))
    assert noise.participants([1.0, 1.0, 9.0]) == 3, "one says nothing, nor what is not finite"
    noise.add([36.0, 4.0], 16.0)
    # 8 by 2: no three reach it. By 16 one alone does.
    assert noise.participants([1.0, 1.0, 9.0]) == 3
    of_more = Noise(gradient_square=16.0)
    of_more.add([36.0, 4.0], 16.0)
    assert of_more.participants([1.0, 1.0, 9.0]) < 3


def scheduled(me: Me) -> torch.Tensor:
    me.init()
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0 if me.rank == 0 else 7.0)
    schedule = optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = AsynchronousOptimizer(inner, wait_for=2)
    for _ in range(2):
        give(model, 1.0)
        optimizer.step()
        if me.rank == 0:
            schedule.step()
        torch.distributed.barrier()
    optimizer.close()
    return flat(model)


def test_the_settings_of_rank_0_hold_on_all(launch: Launch) -> None:
    for ended in launch(scheduled, 2).results():
        torch.testing.assert_close(ended, flat(layer(0)) - 1.5)


def as_an_optimizer(me: Me) -> dict[str, Any]:
    """Trains with a schedule and a scaler, and goes on from a checkpoint."""
    me.init()
    begun: tuple[Any, Any] = ({}, {})
    ended = []
    for resumed in (False, True):
        model = layer(0)
        inner = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        if resumed:
            model.load_state_dict(begun[0])
        optimizer = AsynchronousOptimizer(inner, wait_for=2)
        assert optim.SGD in type(optimizer).mro()
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        if resumed:
            optimizer.load_state_dict(begun[1])
        for step in range(2 if resumed else 0, 4):
            if step == 2 and not resumed:
                # Between two epochs, which all have seen.
                torch.distributed.barrier()
                begun = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                torch.distributed.barrier()
            optimizer.zero_grad(set_to_none=False)
            assert all(each.grad is None or not each.grad.any() for each in model.parameters())
            give(model, 4.0 * (step + me.rank))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            torch.distributed.barrier()
        with pytest.raises(ValueError, match="make another one"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(
            ValueError, match="AsynchronousOptimizer has made the optimizer already"
        ):
            AsynchronousOptimizer(optimizer)
        optimizer.close()
        ended.append(flat(model))
    return {"ended": ended, "state": begun[1]}


def test_it_is_an_optimizer_as_others_are(launch: Launch) -> None:
    ranks = launch(as_an_optimizer, 2).results()
    alone = layer(0)
    inner = optim.SGD(alone.parameters(), lr=1.0, momentum=0.5)
    schedule = optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    for step in range(4):
        if step == 2:
            before = copy.deepcopy(inner.state_dict())
        give(alone, step + 0.5)
        inner.step()
        schedule.step()
    for got in ranks:
        whole, resumed = got["ended"]
        torch.testing.assert_close(whole, flat(alone))
        assert torch.equal(resumed, whole)
        assert got["state"]["param_groups"] == before["param_groups"]
        for number, state in before["state"].items():
            torch.testing.assert_close(got["state"]["state"][number], state)


def stuck(me: Me, last: int, how: str) -> tuple[list[int], float]:
    me.init(timeout=timedelta(seconds=3))
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=3)
    give(model, 1.0)
    optimizer.step()
    if me.rank == last:
        me.hear()  # as a program does whose loader hangs
    try:
        if how == "step":
            optimizer.step()
        optimizer.close()
    except errors.AllReduceTimeout as error:
        me.say(f"{error}")
        return error.missing_ranks, error.waited or 0.0
    return [], 0.0


@pytest.mark.parametrize("how", ["step", "close"])
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_whose_program_is_stuck_is_waited_for_no_longer_than_the_groups_timeout(
    launch: Launch, last: int, how: str
) -> None:
    ranks = launch(stuck, 3, last, how)
    others = [rank for rank in range(3) if rank != last]
    for rank in others:
        assert f"ranks [{last}] gave no gradient within" in ranks.hear(rank)
    ranks.tell(last, "go on")
    assert f"ranks [{last}] gave no gradient within" in ranks.hear(last)
    for missing, waited in ranks.results():
        assert missing == [last]
        assert waited > 3.0


def with_a_stopped_rank_0(me: Me) -> list[int]:
    me.init(timeout=timedelta(seconds=3))
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=2)
    give(model, 1.0)
    optimizer.step()
    me.say("stepped")
    me.hear()
    try:
        optimizer.step()
    except errors.AllReduceTimeout as error:
        return error.missing_ranks
    except errors.RankLost as error:
        return [error.rank]
    return []


def test_a_rank_0_that_is_stopped_is_not_waited_for_for_ever(launch: Launch) -> None:
    ranks = launch(with_a_stopped_rank_0, 2)
    for rank in range(2):
        assert ranks.hear(rank) == "stepped"
    stopped = ranks.processes[0].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    ranks.tell(1, "step")
    assert ranks.result(1) == [0]
    ranks.kill(0)


def interrupted(me: Me) -> dict[str, Any]:
    me.init()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=2)
    if me.rank == 0:
        me.hear()
    else:

        def interrupt() -> None:
            wait_until(lambda: optimizer._said is not None, "it waits")
            os.kill(os.getpid(), signal.SIGINT)

        give(model, 3.0)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        interrupting.join()
        # The program begins its loop again, and puts other gradients into the same tensors.
        optimizer.zero_grad(set_to_none=False)
        me.say("interrupted")
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.fill_(1.0 if me.rank == 0 else 5.0)
        if me.rank == 1 and optimizer.steps == 2:
            break
        optimizer.step()
    optimizer.close()
    return {"ended": flat(model), "steps": optimizer.steps}


def test_the_gradient_of_an_interrupted_step_counts_once(launch: Launch) -> None:
    ranks = launch(interrupted, 2)
    assert ranks.hear(1) == "interrupted"
    ranks.tell(0, "step")
    for got in ranks.results():
        torch.testing.assert_close(got["ended"], flat(layer(0)) - (1.0 + 3.0) / 2 - (1.0 + 5.0) / 2)
        assert got["steps"] == 2


def with_an_unsendable_state(me: Me) -> str:
    me.init()
    inner = optim.SGD(layer(0).parameters(), lr=1.0)
    if me.rank == 0:
        inner.param_groups[0]["of_its_own"] = threading.Lock()
    with pytest.raises(TypeError, match="the state of rank 0's optimizer cannot be sent") as caught:
        AsynchronousOptimizer(inner)
    return str(caught.value)


def test_a_state_that_cannot_be_sent_is_told_to_all(launch: Launch) -> None:
    assert all("lock" in text for text in launch(with_an_unsendable_state, 2).results())


def test_closed_connections_write_into_no_file_of_others_and_close_none(tmp_path: Path) -> None:
    words = Followers(HashStore(), 1, lambda: "127.0.0.1")
    words.wake()
    words.close()
    # They get the numbers that are free now.
    files = [(tmp_path / f"{number}").open("wb", buffering=0) for number in range(8)]
    words.wake()
    words.close()
    for file in files:
        assert os.fstat(file.fileno()).st_size == 0
        file.close()


def killed(me: Me) -> str:
    me.init()
    model = layer(0)
    optimizer = AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), wait_for=3)
    give(model, 1.0)
    optimizer.step()
    me.say("one step")
    if me.rank == me.world_size - 1:
        me.hear()
    try:
        optimizer.step()
    except errors.FaninError as error:
        with pytest.raises(type(error)):
            optimizer.close()
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_killed_ends_the_training_of_all(launch: Launch, gone: int) -> None:
    ranks = launch(killed, 3)
    for rank in range(3):
        ranks.hear(rank)
    ranks.kill(gone)
    for rank in {0, 1, 2} - {gone}:
        if rank == 2:
            ranks.tell(rank, "step")
        assert ranks.result(rank) in ("RankLost",)


class Failing(optim.SGD):
    def step(self, _: Any = None) -> Any:
        raise KeyError("a hook")


def with_a_failing_optimizer(me: Me, failing: int) -> str:
    me.init()
    model = layer(0)
    kind = Failing if me.rank == failing else optim.SGD
    optimizer = AsynchronousOptimizer(kind(model.parameters(), lr=1.0), wait_for=3)
    try:
        for _ in range(2):
            give(model, 1.0)
            optimizer.step()
    except (KeyError, errors.FaninError) as error:
        me.say(type(error).__name__)
        me.hear()  # the process lives on
    return "over"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_optimizer_that_raises_ends_the_training_of_all(launch: Launch, failing: int) -> None:
    ranks = launch(with_a_failing_optimizer, 3, failing)
    said = [ranks.hear(rank) for rank in range(3)]
    assert said[failing] == "KeyError"
    assert {said[rank] for rank in range(3) if rank != failing} <= {"RankLost", "RankLeft"}
    for rank in range(3):
        ranks.tell(rank, "end")


def wrong(me: Me) -> list[Any]:
    me.init()
    model = layer(0)
    found: list[Any] = []
    for keywords in ({"wait_for": 0}, {"wait_for": 3}, {"gradient_square": 0.0}):
        with pytest.raises(ValueError, match=r"must be above 0|1 to 2") as caught:
            AsynchronousOptimizer(optim.SGD(model.parameters(), lr=1.0), **keywords)
        found.append(str(caught.value))
    with pytest.raises(ValueError, match="LBFGS"):
        AsynchronousOptimizer(optim.LBFGS(model.parameters()))
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = AsynchronousOptimizer(optim.SGD(table.parameters(), lr=1.0), wait_for=1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    optimizer.close()
    optimizer.close()
    with pytest.raises(ValueError, match="closed"):
        optimizer.step()
    AsynchronousOptimizer(optim.SGD(nn.Linear(1 + me.rank, 2).parameters(), lr=1.0))
    return found


def test_what_cannot_be_is_said(launch: Launch) -> None:
    outcomes = launch(wrong, 2)
    for rank in range(2):
        got = outcomes.outcome(rank)
        assert isinstance(got, Failure)
        assert got.kind == "ValueError", got.text
        assert "rank 1 has 2 parameters" in got.message


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        AsynchronousOptimizer(optim.SGD(layer(0).parameters(), lr=1.0))
