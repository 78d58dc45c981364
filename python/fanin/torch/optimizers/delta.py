"""Asynchronous training at services that only add (BytePS §5, Figure 11b).

A worker steps its own optimizer, sends by how much that changed its parameters, and goes on with
the latest ones. Nobody waits for anybody, and a worker that dies is missed by none. What comes of
it is what a parameter server would have that runs the optimizer, with the same order of exchanges
(Theorem 2), as far as a step is a function of gradients and of what the worker remembers of them.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed

from fanin import _fanin
from fanin.errors import Closed
from fanin.torch.optimizers.asynchronous import agree_on_parameters, parameters_of
from fanin.torch.optimizers.wrapper import Steps, with_steps

T = TypeVar("T")

KEY_BYTES = 16
_DTYPES: dict[torch.dtype, Literal["float32", "float64"]] = {
    torch.float32: "float32",
    torch.float64: "float64",
}


class Deltas:
    """Steps an optimizer, and exchanges what that changed with the services; knows no group."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        services: str,
        key: bytes,
        worker: int,
        workers: int,
        timeout: float,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)
        self._flats = [
            _Flat(
                of,
                _fanin.Parameters(
                    _named(services),
                    # Another model for each dtype, of the same training.
                    bytes([*key[:-1], key[-1] ^ number]),
                    worker,
                    workers,
                    _DTYPES[of[0].dtype],
                    sum(parameter.numel() for parameter in of),
                    timeout=timeout,
                ),
            )
            for number, of in enumerate(by_dtype(self.parameters))
        ]
        self.lost = 0
        self._ended = False

    def create(self) -> None:
        """Make the services' parameters what this worker's are."""
        for flat in self._flats:
            flat.create()

    def pull(self) -> None:
        """Make this worker's parameters the latest ones."""
        self._exchange([None] * len(self._flats))

    def step(self, step: Callable[[], Any]) -> Any:
        """Step the optimizer, and take the latest parameters, with this step in them."""
        if len(parameters_of(self.optimizer)) != len(self.parameters):
            raise ValueError(
                "the optimizer has got other parameters, and the services do not have those: make "
                "a new DeltaOptimizer, on all ranks"
            )
        loss = step()
        deltas = [flat.delta() for flat in self._flats]
        if not all(bool(delta.isfinite().all()) for delta in deltas):
            for flat in self._flats:
                flat.restore()
            raise FloatingPointError(
                "a step made NaN or infinity of parameters, which all workers would get: nothing "
                "was sent, and the parameters are those before it; lower the learning rate, or "
                "skip the batch (the optimizer's state may have it)"
            )
        self._exchange(deltas)
        return loss

    def _exchange(self, deltas: Sequence[Tensor | None]) -> None:
        if self._ended:
            raise Closed("an exchange with the parameter services failed before: begin anew")
        # If one fails, nobody knows whether the services have it. It must not be in twice.
        self._ended = True
        lost = [flat.exchange(delta) for flat, delta in zip(self._flats, deltas, strict=True)]
        self._ended = False
        self.lost += max(lost, default=0)

    def adopt(self, group: distributed.ProcessGroup) -> None:
        """Make this rank's parameters rank 0's, to the bit."""
        for flat in self._flats:
            flat.adopt(group)

    def leave(self) -> None:
        """Be done; the services forget the parameters once all are."""
        for flat in self._flats:
            flat.services.leave()


def DeltaOptimizer(  # noqa: N802 - a class, to who calls it
    optimizer: torch.optim.Optimizer,
    services: str,
    process_group: distributed.ProcessGroup | None = None,
    *,
    timeout: float = 300.0,
) -> Any:
    """Return an optimizer of the same class whose steps are added to parameters that all share.

        model = Net()  # not in DistributedDataParallel
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DeltaOptimizer(inner, "10.0.0.8:4801,10.0.0.9:4801")
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        optimizer.close()

    `services` are where `fanin parameters` runs: the same ones in the same order for all ranks, who
    may know them by other names. Several share the parameters in equal parts. Collective: all ranks
    of `process_group` (None: the default group) make one, with an optimizer of the same parameters,
    and close it. They begin with rank 0's parameters; each has an optimizer, and its state, of its
    own, of any kind. Between the two no rank waits for another one: ranks may do different numbers
    of steps, and where one dies the others go on, but for `close`.

    Every step sends the parameters' size and gets it back, over TCP, and changes them to the
    latest ones. A gradient may be of parameters some steps old: a learning rate that is just small
    enough for one worker may be too large for all together. Weight decay is of the parameters that
    the worker had. Buffers (running means of BatchNorm) stay each rank's own. It is an optimizer as
    others are, for schedulers, gradient scalers and checkpoints, with settings and a state of each
    rank's own.

    A service that is away is waited for, `timeout` seconds at most since it answered last, however
    long a slow link takes for all parameters. Started again with its snapshots it goes on with what
    it saved last, at most some ten seconds ago; `lost` says how many of this rank's steps are
    missing in that, after the next `step`, `pull` or `close`. Those who do not close (dead ranks)
    leave their parameters to the services, which forget them after a day.

    Raises `ValueError` for ranks whose parameters or numbers of services differ, for services that
    are no host:port (on all ranks), for other dtypes than float32 and float64, and for an optimizer
    that is such a one already; `fanin.errors.SwitchUnreachable` where a service does not answer,
    and `fanin.errors.ParametersRefused` where it has lost the parameters, or is named in another
    order by other ranks; from `step` `FloatingPointError` for NaN and infinity, of which nothing is
    sent. From `close` the errors of the group. After an error of a service, or Ctrl-C while one is
    asked, no further step is possible here (`fanin.errors.Closed`), as nobody knows whether the
    last one is in.
    """
    group = process_group or distributed.group.WORLD
    if group is None:
        raise ValueError("there is no group: call init_process_group first")
    made = with_steps(optimizer, DeltaSteps)
    made.prepare(group, services, timeout)
    return made


class DeltaSteps(Steps):
    """What is put before an optimizer's class: what a step has changed goes to services."""

    named = "DeltaOptimizer"

    def prepare(self, group: distributed.ProcessGroup, services: str, timeout: float) -> None:
        """Have the same parameters as all other ranks and the services."""
        self._group = group
        # A gradient scaler unscales, and leaves out only this rank's steps.
        self._step_supports_amp_scaling = False
        size = group.size()
        parameters = parameters_of(self)
        agree_on_parameters(parameters, group)
        for parameter in parameters:
            if parameter.dtype not in _DTYPES:
                raise ValueError(
                    f"a parameter is {parameter.dtype}, in which small changes are lost: keep it "
                    "in float32, and use torch.autocast"
                )
        counts: list[Any] = [None] * size
        distributed.all_gather_object(counts, len(_named(services)), group=group)
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise ValueError(
                    f"rank {rank} names {count} parameter services, and rank 0 {counts[0]}: all "
                    "ranks name the same ones, in the same order"
                )
        told: list[Any] = [secrets.token_bytes(KEY_BYTES) if group.rank() == 0 else None]
        distributed.broadcast_object_list(told, group_src=0, group=group)
        self._deltas = _on_all(
            group, lambda: Deltas(self, services, told[0], group.rank(), size, timeout)
        )
        _on_all(group, self._deltas.create if group.rank() == 0 else lambda: None)
        _on_all(group, self._deltas.pull)
        self._closed = False

    @property
    def lost(self) -> int:
        """How many steps of this rank a service has lost, as it was started again without them."""
        return self._deltas.lost

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return what `closure` did, with the latest parameters in the model."""
        if self._closed:
            raise ValueError("the optimizer is closed")
        step = super().step
        loss = self._deltas.step(step if closure is None else lambda: step(closure))
        # Schedulers look at this, to warn if they are stepped first.
        self._opt_called = True
        return loss

    # Torch puts a class's hooks round a step, once: they are round that of the class behind.
    step.hooked = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the services have the parameters that there were."""
        del param_group
        raise ValueError(
            "a DeltaOptimizer has the parameters that it began with: close it, and make another "
            "one of all parameters, on all ranks"
        )

    def pull(self) -> None:
        """Take the latest parameters, as before the model is tried or saved."""
        if self._closed:
            raise ValueError("the optimizer is closed")
        self._deltas.pull()

    def close(self) -> None:
        """Wait until all ranks have closed, and return with the parameters that all have then."""
        if self._closed:
            return
        self._closed = True
        distributed.barrier(group=self._group)
        # Each hears what it has lost.
        _on_all(self._group, self._deltas.pull)
        # A service that was started again between two ranks' pulls gave them unlike ones.
        self._deltas.adopt(self._group)
        self._deltas.leave()


class _Flat:
    """Parameters of one dtype, on any devices, and the services' parameters as they were last."""

    def __init__(self, parameters: list[Tensor], services: _fanin.Parameters) -> None:
        self._parameters = parameters
        self.services = services
        self._latest = self._now()

    def _now(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().cpu() for parameter in self._parameters])

    def create(self) -> None:
        self.services.create(_bytes(self._now()))

    def delta(self) -> Tensor:
        """By how much the parameters have changed."""
        return self._now() - self._latest

    def exchange(self, delta: Tensor | None) -> int:
        """Take the latest parameters; returns how many steps are lost."""
        latest, lost = self.services.exchange(None if delta is None else _bytes(delta))
        self._latest = torch.frombuffer(bytearray(latest), dtype=self._latest.dtype)
        self.restore()
        return lost

    def adopt(self, group: distributed.ProcessGroup) -> None:
        """Make the parameters rank 0's."""
        values = self._latest.to(self._parameters[0].device)
        distributed.broadcast(values, group_src=0, group=group)
        self._latest = values.cpu()
        self.restore()

    def restore(self) -> None:
        """Make the parameters what the services' were last."""
        pieces = torch.split(self._latest, [each.numel() for each in self._parameters])
        with torch.no_grad():
            for parameter, piece in zip(self._parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))


def _on_all(group: distributed.ProcessGroup, work: Callable[[], T]) -> T:
    """Do something; what is raised on one rank is raised on all, who would wait for it else."""
    told: list[Any] = [None] * group.size()
    try:
        done = work()
    except Exception as raised:
        distributed.all_gather_object(told, _sendable(raised), group=group)
        raise
    distributed.all_gather_object(told, None, group=group)
    for rank, error in enumerate(told):
        if error is not None:
            error.add_note(f"This was on rank {rank}.")
            raise error
    return done


def _sendable(error: Exception) -> Exception:
    """Return an error, or its text where it cannot go to another process and come out there."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _named(services: str) -> list[str]:
    return [service.strip() for service in services.split(",")]


def by_dtype(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return those of one dtype together, on whatever devices: ranks may differ in that."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def _bytes(values: Tensor) -> bytes:
    data: bytes = values.numpy().tobytes()
    return data
