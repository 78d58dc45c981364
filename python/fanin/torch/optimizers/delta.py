"""Asynchronous training at services that only add (BytePS §5, Figure 11b).

A worker steps its own optimizer, sends by how much that changed its parameters, and goes on with
the latest ones. Nobody waits for anybody, and a worker that dies is missed by none. What comes of
it is what a parameter server would have that runs the optimizer, with the same order of exchanges
(Theorem 2), as far as a step is a function of gradients and of what the worker remembers of them.

An exchange may go on under the next batch. The worker then trains on with the parameters that its
own step made. When the answer is taken, what changed here since the delta was sent is added to it:
that is in no delta yet, and the next one has it. So each change is sent once. Only `pull`, `close`
and a step that made NaN drop what a program has changed beside its steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from fanin import _fanin
from fanin.errors import Closed
from fanin.torch.optimizers.asynchronous import agree_on_parameters, parameters_of
from fanin.torch.optimizers.delta_services import Service, equal, gathered, hosted, named, on_all
from fanin.torch.optimizers.wrapper import Steps, with_steps

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
        services: Sequence[Service],
        key: bytes,
        worker: int,
        workers: int,
        timeout: float,
        *,
        overlap: bool = False,
    ) -> None:
        """Connect to nobody yet. With `overlap` exchanges end when the next step begins."""
        self.optimizer = optimizer
        self._overlaps = overlap
        self.parameters = parameters_of(optimizer)
        models = by_dtype(self.parameters)
        self._flats = [
            _Flat(
                of,
                _fanin.Parameters(
                    services,
                    of_dtype,
                    worker,
                    workers,
                    _DTYPES[of[0].dtype],
                    sum(parameter.numel() for parameter in of),
                    timeout=timeout,
                ),
            )
            for of_dtype, of in zip(keys(key, len(models)), models, strict=True)
        ]
        self.lost = 0
        self._ended = False

    def create(self) -> None:
        """Make the services' parameters what this worker's are."""
        for flat in self._flats:
            flat.create()

    def pull(self) -> None:
        """Make this worker's parameters the latest ones."""
        self.settle()
        self._exchange([None] * len(self._flats))

    def settle(self) -> None:
        """Wait for the exchange that is under way, if there is one, and take its answer."""
        self._check()
        try:
            # A Ctrl-C changes nothing: the exchange goes on, and can be waited for again.
            for flat in self._flats:
                flat.wait()
        except Exception:
            self._ended = True
            raise
        # Parameters that are half taken would be sent as a change: a Ctrl-C in here ends it.
        self._ended = True
        lost = [flat.settle() for flat in self._flats]
        self._ended = False
        self.lost += max(lost, default=0)

    def step(self, step: Callable[[], Any]) -> Any:
        """Step the optimizer, and take the latest parameters, with this step in them.

        An exchange under way ends first: the optimizer steps what came of it. With `overlap` the
        parameters are then this step's own until the next one.
        """
        if len(parameters_of(self.optimizer)) != len(self.parameters):
            raise ValueError(
                "the optimizer has got other parameters, and the services do not have those: make "
                "a new DeltaOptimizer, on all ranks"
            )
        self.settle()
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
        if self._overlaps:
            self._begin(deltas)
        else:
            self._exchange(deltas)
        return loss

    def _check(self) -> None:
        if self._ended:
            raise Closed("an exchange with the parameter services failed before: begin anew")

    def _begin(self, deltas: Sequence[Tensor]) -> None:
        self._ended = True  # as below
        for flat, delta in zip(self._flats, deltas, strict=True):
            flat.begin(delta)
        self._ended = False

    def _exchange(self, deltas: Sequence[Tensor | None]) -> None:
        self._check()
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
    services: str | None = None,
    process_group: distributed.ProcessGroup | None = None,
    *,
    spares: str | None = None,
    overlap: bool = False,
    timeout: float = 300.0,
) -> Any:
    """Return an optimizer of the same class whose steps are added to parameters that all share.

        model = Net()  # not in DistributedDataParallel
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DeltaOptimizer(inner)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        optimizer.close()

    One rank of each machine hosts a part of the parameters in its process, until all have closed.
    `spares` are machines that do not train, where `fanin parameters` runs ("10.0.0.8:4801,..").
    They and the ranks' machines have the shares of BytePS' Eqs. 1 and 2. With `services` in place
    of both, the parameters are at those, in equal parts. All ranks name the same services in the
    same order, and may know them by other names.

    Collective: all ranks of `process_group` (None: the default group) make one, with an optimizer
    of the same parameters, and close it. They begin with rank 0's parameters; each has an
    optimizer, and its state, of its own, of any kind. Between the two no rank waits for another
    one, and ranks may do different numbers of steps. If a rank that hosts a part dies, or ends
    without `close`, the others' next steps raise `fanin.errors.RankLost`. If another rank dies, or
    with `services` any rank, the others go on, but for `close`.

    Every step sends the parameters' size and gets it back, over TCP, and changes them to the
    latest ones. With `overlap` it does not wait for that: the exchange goes on under the next
    batch, and the next `step` takes its answer before it steps (`pull` and `close` do, too). Until
    then the model has this rank's own last step and no later ones of others, so gradients are of
    parameters that are one more exchange old. A closure runs after the answer is taken, and hides
    nothing.

    A gradient may be of parameters some steps old: a learning rate that is just small enough for
    one worker may be too large for all together. Weight decay is of the parameters that
    the worker had. Buffers (running means of BatchNorm) stay each rank's own. It is an optimizer as
    others are, for schedulers, gradient scalers and checkpoints, with settings and a state of each
    rank's own.

    A service that is away is waited for, `timeout` seconds at most since it answered last, however
    long a slow link takes for all parameters. Started again with its snapshots it goes on with what
    it saved last, at most some ten seconds ago; `lost` says how many of this rank's steps are
    missing in that, after the next `step`, `pull` or `close`. Those who do not close (dead ranks)
    leave their parameters to the services, which forget them after a day.

    Raises `ValueError` for ranks whose parameters or numbers of services differ, for services that
    are no host:port (on all ranks), for `services` and `spares` together, for other dtypes than
    float32 and float64, and for an optimizer that is such a one already; `OSError` where a rank
    cannot listen; `fanin.errors.SwitchUnreachable` where a service does not answer, and
    `fanin.errors.ParametersRefused` where it has lost the parameters, or is named in another order
    by other ranks; from `step` `FloatingPointError` for NaN and infinity, of which nothing is sent.
    From `close` the errors of the group. After an error of a service no further step is possible
    here (`fanin.errors.Closed`), as nobody knows whether the last one is in; nor is it after Ctrl-C
    while one is asked, except for an exchange under a batch, which goes on.
    """
    if services is not None and spares is not None:
        raise ValueError(
            "services keep all parameters, and spares have a share beside the ranks: name one"
        )
    group = process_group or distributed.group.WORLD
    if group is None:
        raise ValueError("there is no group: call init_process_group first")
    made = with_steps(optimizer, DeltaSteps)
    made.prepare(group, services, spares, overlap, timeout)
    return made


class DeltaSteps(Steps):
    """What is put before an optimizer's class: what a step has changed goes to services."""

    named = "DeltaOptimizer"

    def prepare(
        self,
        group: distributed.ProcessGroup,
        services: str | None,
        spares: str | None,
        overlap: bool,
        timeout: float,
    ) -> None:
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
        said = spares if services is None else services
        names = [] if said is None else named(said)
        _compare(gathered(group, ("spare" if services is None else "parameter", len(names))))
        told: list[Any] = [secrets.token_bytes(KEY_BYTES) if group.rank() == 0 else None]
        distributed.broadcast_object_list(told, group_src=0, group=group)
        # The service in this process, which ends with this optimizer.
        self._own: _fanin.ParameterService | None = None
        keep = equal(names)
        if services is None:
            models = keys(told[0], len(by_dtype(parameters)))
            keep, self._own = hosted(group, names, models)
        self._are_hosted = services is None
        self._deltas = on_all(
            group,
            lambda: Deltas(self, keep, told[0], group.rank(), size, timeout, overlap=overlap),
        )
        on_all(group, self._deltas.create if group.rank() == 0 else lambda: None)
        on_all(group, self._deltas.pull)
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
        try:
            # All steps are in before anybody takes the last parameters.
            on_all(self._group, self._deltas.settle)
            # Each hears what it has lost.
            on_all(self._group, self._deltas.pull)
            # A service that was started again between two ranks' pulls gave them unlike ones.
            self._deltas.adopt(self._group)
            if not self._are_hosted:
                self._deltas.leave()
                return
            # Others may still ask a rank's service, until all have left.
            on_all(self._group, self._deltas.leave)
        finally:
            if self._own is not None:
                self._own.stop()


class _Flat:
    """Parameters of one dtype, on any devices, and the services' parameters as they were last."""

    def __init__(self, parameters: list[Tensor], services: _fanin.Parameters) -> None:
        self._parameters = parameters
        self.services = services
        self._latest = self._now()
        """The parameters from which the next delta is counted. An exchange under way began with
        these."""
        self._stepped = self._latest
        self._under_way: _fanin.Exchanging | None = None
        self._answer: tuple[bytes, int] | None = None

    def _now(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().cpu() for parameter in self._parameters])

    def create(self) -> None:
        self.services.create(_bytes(self._now()))

    def delta(self) -> Tensor:
        """By how much the parameters have changed."""
        self._stepped = self._now()
        return self._stepped - self._latest

    def begin(self, delta: Tensor) -> None:
        """Exchange the delta in the background; the parameters stay."""
        self._under_way = self.services.begin_exchange(_bytes(delta))
        self._latest = self._stepped

    def wait(self) -> None:
        """Wait for the end of what is under way."""
        if self._under_way is not None:
            self._answer = self._under_way.wait()
            self._under_way = None

    def settle(self) -> int:
        """Take the answer that was waited for, if there is one; returns how many steps are lost."""
        if self._answer is None:
            return 0
        (latest, lost), self._answer = self._answer, None
        # A program may change parameters beside steps, as those who clip weights do.
        own = self._now() - self._latest
        self._take(latest)
        if bool(own.any()):
            self._write(self._latest + own)
        return lost

    def exchange(self, delta: Tensor | None) -> int:
        """Take the latest parameters; returns how many steps are lost."""
        latest, lost = self.services.exchange(None if delta is None else _bytes(delta))
        self._take(latest)
        return lost

    def _take(self, latest: bytes) -> None:
        self._latest = torch.frombuffer(bytearray(latest), dtype=self._latest.dtype)
        self.restore()

    def adopt(self, group: distributed.ProcessGroup) -> None:
        """Make the parameters rank 0's."""
        values = self._latest.to(self._parameters[0].device)
        distributed.broadcast(values, group_src=0, group=group)
        self._latest = values.cpu()
        self.restore()

    def restore(self) -> None:
        """Make the parameters what the services' were last."""
        self._write(self._latest)

    def _write(self, values: Tensor) -> None:
        pieces = torch.split(values, [each.numel() for each in self._parameters])
        with torch.no_grad():
            for parameter, piece in zip(self._parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))


def _compare(said: Sequence[tuple[str, int]]) -> None:
    """Raise where a rank names services of another kind than rank 0, or another number of them."""
    kind, count = said[0]
    for rank, (theirs, number) in enumerate(said):
        if (theirs, number) != (kind, count):
            raise ValueError(
                f"rank {rank} names {number} {theirs} services, and rank 0 {count}"
                f"{'' if theirs == kind else f' {kind} services'}: all ranks name the same ones, "
                "in the same order"
            )


def keys(key: bytes, models: int) -> list[bytes]:
    """Return a training's key for each of its models: it has one for each dtype."""
    return [bytes([*key[:-1], key[-1] ^ number]) for number in range(models)]


def by_dtype(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return those of one dtype together, on whatever devices: ranks may differ in that."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def _bytes(values: Tensor) -> bytes:
    data: bytes = values.numpy().tobytes()
    return data
