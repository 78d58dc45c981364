"""Exchanges of deltas under the next batch: what is in, how often, and of what age."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Launch, SwitchProcess
from fanin import _fanin, errors
from fanin.torch import DeltaOptimizer
from fanin.torch.optimizers.delta import Deltas
from fanin.torch.optimizers.delta_services import equal
from layers import flat, give, layer
from ranks import Failure, Me, wait_until
from torch import nn, optim

Make = Callable[[list[torch.Tensor]], optim.Optimizer]
WORKERS = 3
MAKES: dict[str, Make] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01),
}


@pytest.fixture
def service() -> Iterator[SwitchProcess]:
    """`fanin parameters`, which keeps nothing."""
    with SwitchProcess(command="parameters") as process:
        yield process


class Held:
    """A worker's services, whose answers come when the test says so, or when waited for."""

    def __init__(self, services: _fanin.Parameters) -> None:
        self._services = services
        self._delta: bytes | None = None
        self._answer: tuple[bytes, int] | None = None
        self.told: Callable[[], None] = lambda: None
        """Called once a delta is in."""

    def begin_exchange(self, delta: bytes) -> Held:
        assert self._delta is None, "one at a time"
        assert self._answer is None, "the answer before is taken"
        self._delta = delta
        return self

    def exchange(self, delta: bytes | None) -> tuple[bytes, int]:
        assert self._delta is None, "nothing is under way"
        return self._services.exchange(delta)

    def leave(self) -> None:
        self._services.leave()

    def land(self) -> None:
        """Let the delta that is under way come in."""
        if self._delta is not None:
            self._answer = self._services.exchange(self._delta)
            self._delta = None
            self.told()

    def wait(self) -> tuple[bytes, int]:
        self.land()
        assert self._answer is not None
        answer, self._answer = self._answer, None
        return answer


class Worker:
    """A worker with an exchange under its next batch, and one of a parameter server beside it.

    The server runs the optimizer when a gradient arrives. Its worker goes on meanwhile, with the
    parameters that it had last and its own step, by an optimizer of its own.
    """

    def __init__(
        self, number: int, begun: torch.Tensor, make: Make, deltas: Deltas, server: Server
    ) -> None:
        self.number, self.deltas, self.server = number, deltas, server
        (self.parameters,) = deltas.parameters
        flat = deltas._flats[0]
        self.held = Held(flat.services)
        flat.services = self.held  # type: ignore[assignment]
        self.held.told = self._arrive
        self._gradient = self._answered = torch.zeros(0)
        self.expected = begun.clone()
        self._optimizer = make([self.expected])
        self._is_under_way = False

    def _arrive(self) -> None:
        self._answered = self.server.push(self.number, self._gradient)

    def step(self) -> None:
        # As a loss's, the gradient is of the parameters that the worker has.
        self.parameters.grad = self.parameters * 0.5 + self.number
        gradient = self.expected * 0.5 + self.number
        before = self.server.pushes
        self.deltas.step(self.deltas.optimizer.step)
        assert self.server.pushes <= before + 1
        if self._is_under_way:
            self.expected.copy_(self._answered)
        self.expected.grad = self._gradient = gradient
        self._optimizer.step()
        self._is_under_way = True
        torch.testing.assert_close(self.parameters, self.expected, rtol=1e-12, atol=1e-12)


class Server:
    """Asynchronous Parallel: it has the parameters and, for each worker, an optimizer."""

    def __init__(self, parameters: torch.Tensor, make: Make) -> None:
        self.latest = parameters.clone()
        self._of_workers = [parameters.clone() for _ in range(WORKERS)]
        self._optimizers = [make([own]) for own in self._of_workers]
        self.pushes = 0

    def push(self, worker: int, gradient: torch.Tensor) -> torch.Tensor:
        own = self._of_workers[worker]
        own.copy_(self.latest)
        own.grad = gradient
        self._optimizers[worker].step()
        self.latest = own.clone()
        self.pushes += 1
        return self.latest


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_theorem_2_with_exchanges_under_the_next_batch(service: SwitchProcess, make: Make) -> None:
    for seed in range(10):
        drawing = random.Random(seed)
        begun = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        server = Server(begun, make)
        of_key = seed.to_bytes(16, "big")
        workers = []
        for number in range(WORKERS):
            services = equal([service.address])
            optimizer = make([begun.clone()])
            deltas = Deltas(optimizer, services, of_key, number, WORKERS, 60.0, overlap=True)
            if number == 0:
                deltas.create()
            deltas.pull()
            workers.append(Worker(number, begun, make, deltas, server))
        steps = 0
        for _ in range(100):
            worker = drawing.choice(workers)
            if drawing.random() < 0.5:
                worker.held.land()
            else:
                worker.step()
                steps += 1
        for worker in workers:
            worker.deltas.settle()
        assert server.pushes == steps, f"seed {seed}: each step is in once"
        for worker in workers:
            worker.deltas.pull()
            torch.testing.assert_close(worker.parameters, server.latest, rtol=1e-12, atol=1e-12)
            worker.deltas.leave()


def one(model: nn.Module, service: str, worker: int = 0, workers: int = 1) -> Deltas:
    """A worker of a training, with an exchange under the next batch."""
    inner = optim.SGD(model.parameters(), lr=1.0)
    deltas = Deltas(inner, equal([service]), b"o" * 16, worker, workers, 60.0, overlap=True)
    if worker == 0:
        deltas.create()
    deltas.pull()
    return deltas


def test_a_step_of_another_rank_is_seen_one_exchange_later(service: SwitchProcess) -> None:
    mine, theirs = layer(0), layer(0)
    first, second = (
        one(model, service.address, number, 2) for number, model in enumerate((mine, theirs))
    )
    begun = flat(mine)
    give(mine, 1.0)
    give(theirs, 2.0)
    first.step(first.optimizer.step)
    torch.testing.assert_close(flat(mine), begun - 1.0)
    first.settle()
    second.step(second.optimizer.step)
    torch.testing.assert_close(flat(theirs), begun - 2.0)
    second.settle()
    torch.testing.assert_close(flat(theirs), begun - 3.0)
    first.step(first.optimizer.step)
    torch.testing.assert_close(flat(mine), begun - 2.0)
    first.settle()
    torch.testing.assert_close(flat(mine), begun - 4.0)


def test_what_a_program_changes_under_an_exchange_is_in_the_next_one(
    service: SwitchProcess,
) -> None:
    model = layer(0)
    worker = one(model, service.address)
    begun = flat(model)
    give(model, 1.0)
    worker.step(worker.optimizer.step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(8.0)
    worker.settle()
    torch.testing.assert_close(flat(model), begun + 7.0)
    worker.step(worker.optimizer.step)
    worker.pull()
    torch.testing.assert_close(flat(model), begun + 6.0)


def test_nan_is_not_sent_and_what_was_under_way_stays(service: SwitchProcess) -> None:
    model = layer(0)
    worker = one(model, service.address)
    begun = flat(model)
    give(model, 1.0)
    worker.step(worker.optimizer.step)
    give(model, float("nan"))
    with pytest.raises(FloatingPointError, match="nothing was sent"):
        worker.step(worker.optimizer.step)
    torch.testing.assert_close(flat(model), begun - 1.0)
    give(model, 2.0)
    worker.step(worker.optimizer.step)
    worker.pull()
    torch.testing.assert_close(flat(model), begun - 3.0)


def test_a_closure_sees_the_parameters_of_the_exchange_before(service: SwitchProcess) -> None:
    model = layer(0)
    worker = one(model, service.address)
    begun = flat(model)
    seen = []

    def closure() -> float:
        seen.append(flat(model))
        give(model, 1.0)
        return 0.0

    for _ in range(2):
        worker.step(lambda: worker.optimizer.step(closure))
    torch.testing.assert_close(seen[1], begun - 1.0)


def test_an_interrupt_under_an_exchange_loses_nothing(service: SwitchProcess) -> None:
    model = layer(0)
    worker = one(model, service.address)
    begun = flat(model)
    give(model, 1.0)
    assert service.process is not None
    pid = service.process.pid
    os.kill(pid, signal.SIGSTOP)
    # On a busy machine it answers for a while yet.
    wait_until(lambda: _is_stopped(pid), "the service is stopped")
    try:
        worker.step(worker.optimizer.step)
        before = signal.signal(signal.SIGALRM, _interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                worker.settle()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    finally:
        os.kill(pid, signal.SIGCONT)
    worker.step(worker.optimizer.step)
    worker.pull()
    torch.testing.assert_close(flat(model), begun - 2.0)
    assert worker.lost == 0


def test_parameters_that_are_half_taken_are_never_sent(
    service: SwitchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layer(0)
    worker = one(model, service.address)
    give(model, 1.0)
    worker.step(worker.optimizer.step)
    monkeypatch.setattr(type(worker._flats[0]), "_write", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.settle()
    monkeypatch.undo()
    with pytest.raises(errors.Closed):
        worker.step(worker.optimizer.step)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_after_a_failed_exchange_no_step_is_possible(service: SwitchProcess) -> None:
    model = layer(0)
    worker = one(model, service.address)
    give(model, 1.0)
    service.kill()
    service.start()
    worker.step(worker.optimizer.step)
    with pytest.raises(errors.ParametersRefused, match="--snapshots FOLDER"):
        worker.step(worker.optimizer.step)
    with pytest.raises(errors.Closed):
        worker.step(worker.optimizer.step)


def test_steps_that_a_killed_service_had_not_saved_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with SwitchProcess("--snapshots", str(folder), command="parameters") as service:
        model = layer(0)
        worker = one(model, service.address)
        older = shutil.copytree(folder, tmp_path / "older")
        give(model, 1.0)
        for _ in range(3):
            worker.step(worker.optimizer.step)
        worker.settle()
        assert worker.lost == 0
        service.kill()
        for file in older.glob("*.parameters"):
            shutil.copy(file, folder)
        worker.step(worker.optimizer.step)
        service.start()
        worker.settle()
        assert worker.lost == 3
        torch.testing.assert_close(flat(model), flat(layer(0)) - 1.0)
        worker.pull()
        assert worker.lost == 3, "they are counted once"


# Ranks, from outside.


def unequal(me: Me, service: str) -> dict[str, Any]:
    me.init()
    model = layer(me.rank)
    optimizer = DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), service, overlap=True)
    begun = flat(model)
    for _ in range(2 * me.rank + 1):
        optimizer.zero_grad()
        give(model, 1.0)
        optimizer.step()
    optimizer.close()
    return {"begun": begun, "ended": flat(model)}


def test_close_has_all_steps_of_all_ranks(launch: Launch, service: SwitchProcess) -> None:
    ranks = launch(unequal, 3, service.address).results()
    for got in ranks:
        assert torch.equal(got["ended"], ranks[0]["ended"])
        torch.testing.assert_close(got["ended"], flat(layer(0)) - 9.0)


def while_the_service_goes(me: Me, service: str) -> Any:
    me.init()
    model = layer(0)
    inner = optim.SGD(model.parameters(), lr=1.0)
    optimizer = DeltaOptimizer(inner, service, overlap=True, timeout=1.0)
    give(model, 1.0)
    me.say("begun")
    me.hear()
    optimizer.step()
    optimizer.close()


def test_close_tells_all_what_became_of_the_last_exchange(
    launch: Launch, service: SwitchProcess
) -> None:
    ranks = launch(while_the_service_goes, 2, service.address)
    for rank in range(2):
        assert ranks.hear(rank) == "begun"
    service.kill()
    for rank in range(2):
        ranks.tell(rank, "step")
    for rank in range(2):
        ended = ranks.outcome(rank)
        assert isinstance(ended, Failure)
        assert ended.kind == "SwitchUnreachable"
    wait_until(lambda: not any(each.is_alive() for each in ranks.processes), "they end")
