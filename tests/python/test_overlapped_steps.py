"""When the parameters of `DistributedOptimizer` step: once, whoever reads them and however."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import DistributedOptimizer, Options
from fanin.torch.backend import backend_of
from ranks import Me, wait_until
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel


def layers(count: int = 3) -> Any:
    """Each a piece of its own, and another on each rank until an optimizer is made."""
    return nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(count)))


def passed(net: Any, value: float = 1.0) -> None:
    net(torch.full((1, 400), float(value))).sum().backward()


def together(me: Me) -> tuple[int, list[bool], list[int]]:
    me.init()
    net = layers()
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    kept = list(net.parameters())
    before = [each.detach().clone() for each in kept]
    passed(net)
    optimizer.step()
    pieces = optimizer._sender.pieces
    wait_until(lambda: all(piece.is_there() for piece in pieces), "all sums are there")
    steps = []
    few, step = optimizer._few, optimizer._few.step

    def counted(groups: Any, state: Any) -> None:
        steps.append(groups)
        step(groups, state)

    few.step = counted
    for number in (2, 0, 1):
        assert net[number].weight.isfinite().all()
    changed = [bool((x != y).any()) for x, y in zip(kept, before, strict=True)]
    return len(steps), changed, [pieces.index(piece) for piece in optimizer._sender.read]


def test_what_is_there_steps_at_once(launch: Launch) -> None:
    for steps, changed, read in launch(together, 2).results():
        assert steps == 1
        assert changed == [True] * 3
        # The order of the next sums comes of it.
        assert read == [2, 0, 1]


def dropped(me: Me) -> Any:
    me.init()
    net = layers(1)

    def train() -> None:
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
        for _ in range(2):
            optimizer.zero_grad()
            passed(net)
            optimizer.step()

    torch.manual_seed(0)
    nn.init.zeros_(net[0].weight)
    train()
    gc.collect()
    return net[0].weight.flatten()[:3].tolist()


def test_the_last_step_is_done_although_nobody_has_the_optimizer(launch: Launch) -> None:
    assert launch(dropped, 2).results() == [[-2.0] * 3] * 2


def all_dropped(me: Me) -> int:
    me.init()

    def train() -> tuple[int, Any]:
        net = layers()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
        passed(net)
        optimizer.step()
        return len(optimizer._pending), weakref.ref(optimizer)

    pending, optimizer = train()
    # Sums that are under way have their memory.
    wait_until(lambda: gc.collect() >= 0 and optimizer() is None, "nobody has the optimizer")
    return pending


def test_a_model_that_nobody_has_is_not_kept_for_its_last_step(launch: Launch) -> None:
    assert launch(all_dropped, 2).results() == [3, 3]


def part(me: Me) -> Any:
    me.init()
    torch.manual_seed(me.rank)
    net = layers(2)
    DistributedOptimizer(optim.SGD(net[1].parameters(), lr=1.0), net)
    return [each.detach().clone() for each in net.parameters()]


def test_all_begin_with_rank_0s_parameters_also_those_that_others_train(launch: Launch) -> None:
    first, second = launch(part, 2).results()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def evaluated(me: Me) -> Any:
    """Reads what has stepped in inference mode, and trains on."""
    me.init("fanin")
    found = []
    for inference in (False, True):
        torch.manual_seed(0)
        net = layers(2)
        optimizer = DistributedOptimizer(optim.AdamW(net.parameters(), lr=0.1), net)
        for _ in range(3):
            optimizer.zero_grad()
            passed(net, me.rank)
            optimizer.step()
            with torch.inference_mode(inference), torch.autocast("cpu", enabled=inference):
                net(torch.ones(1, 400))
        found.append([each.detach().clone() for each in net.parameters()])
        optimizer.close()
    return found


def test_a_step_is_the_same_whatever_its_reader_does(launch: Launch) -> None:
    for plainly, inference in launch(evaluated, 2).results():
        for one, other in zip(plainly, inference, strict=True):
            assert torch.equal(one, other)


class Interrupted(optim.SGD):
    interrupts = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.interrupts:
            raise KeyboardInterrupt


def interrupted(me: Me) -> tuple[float, str]:
    me.init()
    net = layers(1)
    optimizer = DistributedOptimizer(Interrupted(net.parameters(), lr=1.0), net)
    nn.init.zeros_(net[0].weight)
    passed(net)
    optimizer.step()
    optimizer._few._few.interrupts = True
    try:
        net[0].weight.sum()
    except KeyboardInterrupt:
        value = net[0].weight[0, 0].item()
    try:
        passed(net)
    except RuntimeError as error:
        return value, str(error)
    raise AssertionError("it went on")


def test_an_interrupted_step_is_not_done_twice_and_training_does_not_go_on(launch: Launch) -> None:
    for value, error in launch(interrupted, 2).results():
        assert value == -1.0
        assert "load a checkpoint" in error


class Gone:
    """Of a sum that another rank will not come to."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise KeyError("gone")


def counted_out(me: Me) -> tuple[list[str], float]:
    """Reads while nobody knows who has used the parameters, and once that is known."""
    me.init()
    net = layers(1)
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    nn.init.zeros_(net[0].weight)
    passed(net)
    optimizer.step()
    used = optimizer._sender._used
    works, used.works = used.works, [Gone()]
    errors = []
    for _ in range(2):
        try:
            net[0].weight.sum()
        except KeyError as error:
            errors.append(str(error))
    used.works = works
    return errors, net[0].weight[0, 0].item()


def test_a_step_that_was_not_begun_is_not_lost(launch: Launch) -> None:
    for errors, value in launch(counted_out, 2).results():
        assert errors == ["'gone'"] * 2
        assert value == -1.0


def scaled(me: Me) -> Any:
    """With a gradient scaler, whose second step overflows on one rank."""
    me.init("fanin")
    found = []
    for overlapped in (False, True):
        torch.manual_seed(0)
        net = layers(2)
        model: Any = net
        optimizer: Any = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if overlapped:
            optimizer = DistributedOptimizer(optimizer, net)
        else:
            model = DistributedDataParallel(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((1, 400), 0.1 * (1 + me.rank))).sum()
            if step == 1 and me.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if overlapped:
                optimizer.synchronize()
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append(([each.detach().clone() for each in net.parameters()], scaler.get_scale()))
    return found


def test_a_gradient_scaler_does_as_with_ddp(launch: Launch) -> None:
    for (ddp, scale), (ours, our_scale) in launch(scaled, 2).results():
        assert scale == our_scale == 512.0
        for one, other in zip(ddp, ours, strict=True):
            assert other.isfinite().all()
            assert torch.equal(one, other)


def closed(me: Me) -> int:
    me.init()
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        net = layers(1)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
        passed(net)
        optimizer.step()
        optimizer.close()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_closed_optimizer_leaves_no_job(launch: Launch) -> None:
    assert launch(closed, 2).results() == [0, 0]


def of_its_own(me: Me, settings: dict[str, Any], machines: str) -> Any:
    os.environ["FANIN_MACHINE"] = machines[me.rank]
    me.init(pg_options=Options(**settings), timeout=timedelta(seconds=77))
    net = layers()
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    sums = backend_of(optimizer.process_group)
    optimizer.close()
    return sums.options._timeout.total_seconds(), sums.settings.travels_as


@pytest.mark.parametrize(
    ("settings", "machines"),
    [
        ({}, "ab"),
        ({}, "aba"),
        ({"wire_dtype": "shared_exponent"}, "ab"),
        ({"loss_bound": 0.1}, "ab"),
    ],
)
def test_its_sums_are_a_job_of_their_own_as_the_program_says(
    launch: Launch, settings: dict[str, Any], machines: str
) -> None:
    # With the timeout of the program's group: torch's default is half an hour.
    said = (77.0, settings.get("wire_dtype", "native"))
    world_size = len(machines)
    assert launch(of_its_own, world_size, settings, machines).results() == [said] * world_size
