"""Asynchronous training by deltas: what services, workers and a parameter server come to."""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from fanin.torch import DeltaOptimizer
from fanin.torch.optimizers.delta import Deltas, by_dtype
from fanin.torch.optimizers.delta_services import equal, on_all
from layers import flat, give, layer
from ranks import Failure, Me, wait_until
from torch import nn, optim

Make = Callable[[list[torch.Tensor]], optim.Optimizer]
WORKERS = 3


@pytest.fixture
def service() -> Iterator[SwitchProcess]:
    """`fanin parameters`, which keeps nothing."""
    with SwitchProcess(command="parameters") as process:
        yield process


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[SwitchProcess]:
    """`fanin parameters`, which can be killed and started again with what it had."""
    with SwitchProcess("--snapshots", str(tmp_path / "kept"), command="parameters") as process:
        yield process


# Theorem 2.


class ParameterServer:
    """Asynchronous Parallel: it has the parameters and, for each worker, an optimizer."""

    def __init__(self, parameters: torch.Tensor, make: Make) -> None:
        self._latest = parameters.clone()
        self._of_workers = [parameters.clone() for _ in range(WORKERS)]
        self._optimizers = [make([own]) for own in self._of_workers]

    def push(self, worker: int, gradient: torch.Tensor) -> torch.Tensor:
        own = self._of_workers[worker]
        own.copy_(self._latest)
        own.grad = gradient
        self._optimizers[worker].step()
        self._latest = own.clone()
        return self._latest


def played(service: str, seed: int, make: Make) -> tuple[torch.Tensor, torch.Tensor]:
    """The same order of exchanges, with deltas at a service and with gradients at a server."""
    drawing = random.Random(seed)
    begun = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    models = [begun.clone() for _ in range(WORKERS)]
    key = seed.to_bytes(16, "big")
    workers = [
        Deltas(make([model]), equal([service]), key, number, WORKERS, 60.0)
        for number, model in enumerate(models)
    ]
    workers[0].create()
    for worker in workers:
        worker.pull()
    server = ParameterServer(begun, make)
    at_server = [begun] * WORKERS
    for _ in range(40):
        number = drawing.randrange(WORKERS)
        # The gradient is of the parameters that the worker has, some steps old, as a loss's
        # gradient is.
        models[number].grad = models[number] * 0.5 + number
        workers[number].step(workers[number].optimizer.step)
        at_server[number] = server.push(number, at_server[number] * 0.5 + number)
        torch.testing.assert_close(models[number], at_server[number], rtol=1e-12, atol=1e-12)
    for worker in workers:
        worker.leave()
    return models[number], at_server[number]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: optim.SGD(parameters, lr=0.1),
        lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
        lambda parameters: optim.Adam(parameters, lr=0.01),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_theorem_2_a_server_that_runs_the_optimizer_has_the_same(
    service: SwitchProcess, make: Make
) -> None:
    for seed in range(10):
        played(service.address, seed, make)


# What ranks see.


def unequal(me: Me, service: str) -> dict[str, Any]:
    me.init()
    model = layer(me.rank)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service)
    begun = flat(model)
    for _ in range(2 * me.rank + 1):
        optimizer.zero_grad()
        give(model, 1.0)
        optimizer.step()
    optimizer.close()
    with pytest.raises(ValueError, match="closed"):
        optimizer.step()
    return {"begun": begun, "ended": flat(model), "lost": optimizer.lost}


def test_ranks_do_unequal_numbers_of_steps_and_end_with_the_same(
    launch: Launch, service: SwitchProcess
) -> None:
    with SwitchProcess(command="parameters") as other:
        ranks = launch(unequal, 3, f"{service.address}, {other.address}").results()
    begun = flat(layer(0))
    assert torch.equal(ranks[0]["begun"], begun), "rank 0 began before it saw others"
    for got in ranks:
        assert torch.equal(got["ended"], ranks[0]["ended"])
        assert got["lost"] == 0
        torch.testing.assert_close(got["ended"], begun - 9.0)


def while_one_dies(me: Me, service: str) -> Any:
    me.init()
    model = layer(0)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service)
    give(model, 1.0)
    optimizer.step()
    if me.rank == 1:
        me.say("in")
        me.hear()
    me.hear()
    for _ in range(5):
        optimizer.step()
    me.say(flat(model))
    optimizer.close()


def test_who_dies_is_missed_by_nobody_before_the_end(
    launch: Launch, service: SwitchProcess
) -> None:
    ranks = launch(while_one_dies, 2, service.address)
    assert ranks.hear(1) == "in"
    dead = ranks.processes[1]
    assert dead.pid is not None
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    ranks.tell(0, "go on")
    torch.testing.assert_close(ranks.hear(0), flat(layer(0)) - 7.0)
    ended = ranks.outcome(0)
    assert isinstance(ended, Failure)
    assert ended.kind == "RankLost"


def while_services_restart(me: Me, service: str) -> torch.Tensor:
    me.init()
    model = layer(0)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service)
    me.say("begun")
    me.hear()
    give(model, 1.0)
    optimizer.step()
    optimizer.close()
    return flat(model)


def test_parameters_survive_a_service_that_is_killed(launch: Launch, kept: SwitchProcess) -> None:
    ranks = launch(while_services_restart, 2, kept.address)
    for rank in range(2):
        assert ranks.hear(rank) == "begun"
    kept.kill()
    for rank in range(2):
        ranks.tell(rank, "step")
    kept.start()
    ended = ranks.results()
    assert torch.equal(ended[0], ended[1])
    torch.testing.assert_close(ended[0], flat(layer(0)) - 2.0)
    folder = Path(kept.options[1])
    wait_until(lambda: not list(folder.glob("*.parameters")), "it is over, and forgotten")


def test_a_service_without_its_snapshot_ends_the_training_with_the_cure(
    launch: Launch, service: SwitchProcess
) -> None:
    ranks = launch(while_services_restart, 2, service.address)
    for rank in range(2):
        assert ranks.hear(rank) == "begun"
    service.kill()
    service.start()
    for rank in range(2):
        ranks.tell(rank, "step")
        ended = ranks.outcome(rank)
        assert isinstance(ended, Failure)
        assert ended.kind == "ParametersRefused"
        assert "--snapshots FOLDER" in ended.message


def saved(kept: SwitchProcess) -> dict[Path, bytes]:
    """What a service has on its disk."""
    return {file: file.read_bytes() for file in Path(kept.options[1]).glob("*.parameters")}


def kill_without(kept: SwitchProcess, older: dict[Path, bytes]) -> None:
    """Kill a service (SIGKILL), and start it with what it had saved, on a slow machine too."""
    kept.kill()
    for file, data in older.items():
        file.write_bytes(data)
    kept.start()


def test_steps_that_a_killed_service_had_not_saved_are_told_by_a_pull(kept: SwitchProcess) -> None:
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0)
    worker = Deltas(inner, equal([kept.address]), b"k" * 16, 0, 1, 60.0)
    worker.create()
    worker.pull()
    older = saved(kept)
    assert older
    give(model, 1.0)
    for _ in range(3):
        worker.step(inner.step)
    kill_without(kept, older)
    worker.pull()
    assert torch.equal(flat(model), flat(layer(0)))
    assert worker.lost == 3
    worker.step(inner.step)
    assert worker.lost == 3, "they are counted once"
    torch.testing.assert_close(flat(model), flat(layer(0)) - 1.0)


def while_ranks_pull(me: Me, service: str) -> dict[str, Any]:
    me.init()
    model = layer(0)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service)
    me.say("begun")
    me.hear()
    give(model, 1.0)
    optimizer.step()
    pull = optimizer._deltas.pull

    def in_turn() -> None:
        if me.rank == 1:
            me.hear()
        pull()
        me.say("pulled")

    optimizer._deltas.pull = in_turn
    optimizer.close()
    return {"ended": flat(model), "lost": optimizer.lost}


def test_all_end_with_the_same_when_a_service_is_killed_between_their_last_pulls(
    launch: Launch, kept: SwitchProcess
) -> None:
    ranks = launch(while_ranks_pull, 2, kept.address)
    for rank in range(2):
        assert ranks.hear(rank) == "begun"
    older = saved(kept)
    for rank in range(2):
        ranks.tell(rank, "step")
    assert ranks.hear(0) == "pulled"
    kill_without(kept, older)
    ranks.tell(1, "pull")
    assert ranks.hear(1) == "pulled"
    first, second = ranks.results()
    assert torch.equal(first["ended"], second["ended"])
    assert second["lost"] == 1, "its own step"


def test_a_service_that_cannot_save_at_its_end_says_so_by_its_exit_status(
    kept: SwitchProcess,
) -> None:
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0)
    worker = Deltas(inner, equal([kept.address]), b"k" * 16, 0, 1, 60.0)
    worker.create()
    worker.pull()
    shutil.rmtree(kept.options[1])
    give(model, 1.0)
    worker.step(inner.step)
    assert kept.process is not None
    kept.process.terminate()
    assert kept.process.wait() != 0


def with_other_services(me: Me, services: str, other: str) -> None:
    me.init()
    inner = optim.SGD(layer(0).parameters(), lr=1.0)
    mine = services if me.rank == 0 else ",".join(reversed(services.split(",")))
    with pytest.raises(errors.ParametersRefused, match="the same order on all ranks"):
        DeltaOptimizer(inner, mine)
    with pytest.raises(ValueError, match="rank 1 names 1 parameter services, and rank 0 2"):
        DeltaOptimizer(inner, services if me.rank == 0 else other)
    with pytest.raises(ValueError, match="HOST:PORT"):
        DeltaOptimizer(inner, other if me.rank == 0 else "nowhere")


def test_ranks_that_name_other_services_are_all_told(
    launch: Launch, service: SwitchProcess
) -> None:
    with SwitchProcess(command="parameters") as other:
        both = f"{service.address},{other.address}"
        launch(with_other_services, 2, both, service.address).results()


def with_nan(me: Me, service: str) -> dict[str, Any]:
    me.init()
    model = layer(0)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service)
    give(model, float("nan") if me.rank == 1 else 1.0)
    before = flat(model)
    if me.rank == 1:
        with pytest.raises(FloatingPointError, match="nothing was sent"):
            optimizer.step()
        assert torch.equal(flat(model), before)
        give(model, 2.0)
    optimizer.step()
    optimizer.close()
    return {"ended": flat(model)}


def test_nan_of_one_rank_reaches_no_other(launch: Launch, service: SwitchProcess) -> None:
    for got in launch(with_nan, 2, service.address).results():
        torch.testing.assert_close(got["ended"], flat(layer(0)) - 3.0)


def refused(me: Me, address: str) -> None:
    me.init()
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="HOST:PORT"):
        DeltaOptimizer(inner, "")
    with pytest.raises(errors.SwitchUnreachable, match="fanin parameters --listen"):
        DeltaOptimizer(inner, address, timeout=0.3)
    with pytest.raises(errors.ParametersRefused, match="it is no parameter service"):
        DeltaOptimizer(inner, me.switch)
    with pytest.raises(ValueError, match=r"keep it in float32"):
        DeltaOptimizer(optim.SGD(model.bfloat16().parameters(), lr=1.0), address)
    other = nn.Linear(3 + me.rank, 2)
    with pytest.raises(ValueError, match="all ranks need the same model"):
        DeltaOptimizer(optim.SGD(other.parameters(), lr=1.0), address)


def test_what_cannot_be_is_refused_on_all_ranks(launch: Launch) -> None:
    launch(refused, 2, "127.0.0.1:1").results()


class UnsendableError(Exception):
    """One that no other process can make."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def with_an_unsendable_error(me: Me, local: bool) -> str:
    me.init()
    assert dist.group.WORLD is not None

    class LocalError(Exception):
        """One that no other process knows."""

    def work() -> None:
        if me.rank == 1:
            raise LocalError("a lock: is held") if local else UnsendableError("a lock", "is held")

    with pytest.raises(Exception, match="a lock: is held") as caught:
        on_all(dist.group.WORLD, work)
    return type(caught.value).__name__


@pytest.mark.parametrize("local", [True, False])
def test_an_error_that_cannot_be_sent_is_told_to_all(launch: Launch, local: bool) -> None:
    ranks = launch(with_an_unsendable_error, 3, local).results()
    assert ranks == ["RuntimeError", "LocalError" if local else "UnsendableError", "RuntimeError"]


def as_an_optimizer(me: Me, service: str) -> dict[str, Any]:
    """Trains with a schedule, a scaler and a checkpoint in its midst, and without fanin."""
    me.init()
    found = []
    for shared in (True, False):
        model = layer(0)
        inner = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        optimizer: Any = DeltaOptimizer(inner, service) if shared else inner
        assert optim.SGD in type(optimizer).mro()
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        hooked: list[int] = []
        optimizer.register_step_post_hook(lambda *_, into=hooked: into.append(1))
        state: dict[str, Any] = {}
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            assert all(each.grad is None or not each.grad.any() for each in model.parameters())
            # Only rank 0 changes the parameters, so that the ranks' order does not count.
            give(model, 0.0 if me.rank else 4.0 * (step + 1))
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                for each in optimizer.param_groups:
                    each["lr"] = 99.0
                optimizer.state.clear()
                optimizer.load_state_dict(state)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        assert len(hooked) == 4
        if shared:
            with pytest.raises(ValueError, match="DeltaOptimizer has made the optimizer already"):
                DeltaOptimizer(optimizer, service)
            optimizer.close()
        found.append((flat(model), optimizer.param_groups[0]["lr"], bool(state["state"])))
    return {"shared": found[0], "alone": found[1]}


def test_it_is_an_optimizer_as_others_are(launch: Launch, service: SwitchProcess) -> None:
    got, other = launch(as_an_optimizer, 2, service.address).results()
    torch.testing.assert_close(got["shared"][0], got["alone"][0])
    assert got["shared"][1:] == got["alone"][1:] == (0.0625, True)
    assert torch.equal(got["shared"][0], other["shared"][0])


def of_two_dtypes(me: Me, service: str) -> list[torch.Tensor]:
    me.init()
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    single = nn.Parameter(torch.zeros(3))
    inner = optim.SGD([double, single], lr=1.0)
    optimizer = DeltaOptimizer(inner, service)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = double.sum() + single.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found: torch.Tensor = loss.detach()
        return found

    assert float(optimizer.step(closure)) <= 0.0
    optimizer.close()
    more = nn.Parameter(torch.zeros(1))
    another = DeltaOptimizer(inner, service)
    with pytest.raises(ValueError, match="make another one"):
        another.add_param_group({"params": [more]})
    inner.add_param_group({"params": [more]})
    with pytest.raises(ValueError, match="make a new DeltaOptimizer"):
        another.step()
    return [double.detach(), single.detach()]


def test_dtypes_have_models_of_their_own_and_parameters_stay_the_same_ones(
    launch: Launch, service: SwitchProcess
) -> None:
    for double, single in launch(of_two_dtypes, 2, service.address).results():
        assert double.dtype == torch.float64
        assert (double == -2.0).all()
        assert (single == -2.0).all()


def of_one_double(me: Me, services: str) -> list[torch.Tensor]:
    me.init()
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)), nn.Parameter(torch.zeros(9))]
    optimizer = DeltaOptimizer(optim.SGD(parameters, lr=1.0), services)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.close()
    return [parameter.detach() for parameter in parameters]


def test_a_dtype_with_fewer_elements_than_services_is_at_some_of_them(
    launch: Launch, service: SwitchProcess
) -> None:
    with SwitchProcess(command="parameters") as other:
        for double, single in launch(
            of_one_double, 2, f"{service.address},{other.address}"
        ).results():
            assert (double == -2.0).all()
            assert (single == -2.0).all()


def test_devices_make_no_other_models_as_ranks_may_have_others() -> None:
    here, there = torch.zeros(2), torch.zeros(3, device="meta")
    double = torch.zeros(1, dtype=torch.float64)
    assert [[each.numel() for each in of] for of in by_dtype([here, double, there])] == [
        [2, 3],
        [1],
    ]
