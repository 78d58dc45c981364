"""Training that does not wait for the last worker (GOAT §V).

A worker's `step` ends as soon as its gradient is in the model, whoever else was slower. An *epoch*
sums the gradients of those who were ready first; a late gradient counts in the epoch in which it
arrives, and its worker gets the model then. Algorithm 2 chooses how many an epoch waits for.

The paper's server has the model and the optimizer. Here each rank has both, in a thread that takes
part in every epoch, with zeros where its worker is not ready. All add the same sum to the same
parameters, so that all copies are equal, and no machine has a server's load. Who takes part, rank 0
decides: it hears who is ready, and tells all.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from fanin import _fanin
from fanin.errors import FaninError
from fanin.torch.backend import same_ranks
from fanin.torch.channel import LOSS_TIMEOUT
from fanin.torch.words import Followers, Gone, Leader, connect

PULSE = 1.0
"""Seconds after which an epoch of nobody shows that all ranks are still there."""
SMOOTHING = 0.9
"""Of what is measured of gradients, which part of the earlier epochs' is kept."""
ENOUGH = 0.25
"""Of all workers, which part could just reach what is to be reached, where nobody says what is."""


@dataclass(frozen=True)
class _Said:
    """A worker's word to rank 0: its gradient's squares are there, or it has left."""

    rank: int
    squares: float | None


@dataclass(frozen=True)
class _Epoch:
    """Rank 0's word to all: whose gradients count, and how the optimizer is set."""

    participants: frozenset[int] | None
    """None: all have left."""
    settings: list[dict[str, Any]]


class AsynchronousOptimizer:
    """Steps an optimizer with the gradients of whoever is ready, and not of all ranks.

        model = Net()  # not in DistributedDataParallel
        optimizer = AsynchronousOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        while optimizer.epoch < 1000:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        optimizer.close()

    Collective: all ranks of `process_group` (None: the default group) make one, with an optimizer
    of the same parameters, and close it. They begin with rank 0's parameters and its optimizer's
    state, and have the same ones, to the bit, after `close`. Ranks may do different numbers of
    steps. A parameter that has no gradient is stepped with zeros.

    `wait_for` is the number of workers that an epoch waits for, at least; None lets GOAT's
    Algorithm 2 choose it before each, by how long each worker took last. It needs the variance of
    the workers' gradients, which is measured, and the mean square of the gradient that is to be
    reached, `gradient_square`: None takes what the gradients of a quarter of the workers could
    just reach, which is our choice. The first epoch waits for all.

    Gradients are averaged over those that took part. A gradient may be of a model some epochs old,
    as with every asynchronous training: a learning rate that is just small enough for all workers
    together may be too large. The optimizer is rank 0's: what a scheduler sets there holds on all
    ranks. Buffers (running means of BatchNorm) stay each rank's own.

    Raises `ValueError` for ranks whose parameters differ in shape or dtype, sparse gradients, an
    optimizer that computes gradients itself (LBFGS), a `wait_for` that is not 1 to the number of
    ranks; and from `step` and `close` the errors of `fanin.errors`
    once a rank is gone: the training ends then, on all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        process_group: distributed.ProcessGroup | None = None,
        *,
        wait_for: int | None = None,
        gradient_square: float | None = None,
    ) -> None:
        group = process_group or distributed.group.WORLD
        if group is None:
            raise ValueError("there is no group: call init_process_group first")
        size = group.size()
        if wait_for is not None and not 1 <= wait_for <= size:
            raise ValueError(f"wait_for is {wait_for}, and there are {size} ranks: 1 to {size}")
        if gradient_square is not None and not gradient_square > 0:
            raise ValueError(f"gradient_square is {gradient_square}, and must be above 0")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS computes gradients several times a step, and here they come from all ranks: "
                "take another optimizer"
            )
        self._rank = group.rank()
        self._parameters = [
            p for each in optimizer.param_groups for p in each["params"] if p.requires_grad
        ]
        self._sums = same_ranks(group)
        agree_on_parameters(self._parameters, self._sums)
        self._flats = [_Flat(of) for of in alike(self._parameters)]
        self._set = optimizer
        self._optimizer = _on_copies(optimizer, self._flats)
        state: list[Any] = [self._optimizer.state_dict() if self._rank == 0 else None]
        distributed.broadcast_object_list(state, group_src=0, group=self._sums)
        self._optimizer.load_state_dict(state[0])
        name = f"epochs/{self._sums.group_name}"
        words = connect(PrefixStore(name, _get_default_store()), self._rank, size)
        self._words: _Coordinator | Leader = (
            _Coordinator(size, words, wait_for, gradient_square)
            if isinstance(words, Followers)
            else words
        )
        self._changed = threading.Condition()
        self._epoch = 0
        self._steps = 0
        self._waiting = False
        self._closed = False
        self._over = False
        self._error: Exception | None = None
        for flat in self._flats:
            flat.begin(self._sums)
        self._thread = threading.Thread(target=self._follow, name="fanin-epochs", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """How often the model has changed, as far as this rank has seen it."""
        return self._epoch

    @property
    def steps(self) -> int:
        """How many gradients of this rank are in the model."""
        return self._steps

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Give the parameters' gradients, and return once they are in, with the model as it is.

        Returns what `closure` did, which computes them anew if there is one.
        """
        if self._closed:
            raise ValueError("the optimizer is closed")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        squares = 0.0
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    "a gradient is sparse, and an epoch adds dense ones: make the layer with "
                    "sparse=False"
                )
            squares += float(parameter.grad.detach().double().square().sum())
        self._take_part(squares)
        self._steps += 1
        # What schedulers look at, to warn who steps them first.
        self._set._opt_called = True  # type: ignore[attr-defined]
        return loss

    def close(self) -> None:
        """Take part until all ranks have closed, and return with the model that all have then."""
        if self._closed:
            return
        self._closed = True
        self._take_part(None)
        self._thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, which is the same on all ranks after `close`."""
        return self._optimizer.state_dict()

    def _take_part(self, squares: float | None) -> None:
        """Say what there is to rank 0, and wait until it is in: a gradient, or the end."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting = True
        try:
            self._words.say(_Said(self._rank, squares))
        except (Gone, OSError):  # the thread that follows says why
            self._thread.join()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._over or not self._waiting
            )
            if self._error is not None:
                raise self._error

    def _leave(self) -> None:
        """Close all connections, so that nobody waits for this rank. Once."""
        self._words.close()
        with contextlib.suppress(ValueError):  # destroyed with all others
            distributed.destroy_process_group(self._sums)
        del self._sums  # Gloo's connections last as long as somebody has the group

    def _follow(self) -> None:
        """Take part in all epochs."""
        try:
            while self._play(self._next()):
                pass
        except Exception as error:
            explained = self._explained(error)
            with self._changed:
                self._error = explained
                self._changed.notify_all()
        self._leave()

    def _next(self) -> _Epoch:
        if isinstance(self._words, _Coordinator):
            return self._words.begin(self._set)
        return cast(_Epoch, self._words.hear())

    def _play(self, epoch: _Epoch) -> bool:
        """Add an epoch's gradients to this rank's copy; false after the last one."""
        if epoch.participants is None:
            with self._changed:
                for flat in self._flats:
                    flat.give()
                self._over = True
                self._changed.notify_all()
            return False
        taken = self._rank in epoch.participants
        if not epoch.participants:
            distributed.all_reduce(torch.zeros(1), group=self._sums)
            return True
        squares = 0.0
        for flat in self._flats:
            if taken:
                flat.gather()
            else:
                flat.values.zero_()
            distributed.all_reduce(flat.values, group=self._sums)
            flat.values /= len(epoch.participants)
            if isinstance(self._words, _Coordinator):
                squares += float(flat.values.double().square().sum())
        for each, values in zip(self._optimizer.param_groups, epoch.settings, strict=True):
            each.update(values)
        self._optimizer.step()
        if isinstance(self._words, _Coordinator):
            self._words.measure(epoch.participants, squares)
        with self._changed:
            self._epoch += 1
            if taken:
                for flat in self._flats:
                    flat.give()
                self._waiting = False
                self._changed.notify_all()
        return True

    def _explained(self, error: Exception) -> Exception:
        """Return why, as the ranks' job knows it, where a connection of its own is gone."""
        if isinstance(error, FaninError) or not isinstance(error, (Gone, RuntimeError)):
            return error
        try:
            work = distributed.all_reduce(torch.zeros(1), group=self._sums, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=LOSS_TIMEOUT))
        except FaninError as cause:
            return cause
        except RuntimeError:
            pass
        return RuntimeError(str(error))


class _Flat:
    """Parameters of one dtype and device: what is summed in one piece, copies for the optimizer."""

    def __init__(self, parameters: list[Tensor]) -> None:
        first = parameters[0]
        elements = sum(parameter.numel() for parameter in parameters)
        self.values = torch.zeros(elements, dtype=first.dtype, device=first.device)
        """What is summed: the copies' gradients, one behind the other."""
        self._parameters = parameters
        self._copies = [parameter.detach().clone() for parameter in parameters]
        pieces = torch.split(self.values, [parameter.numel() for parameter in parameters])
        for copy, piece in zip(self._copies, pieces, strict=True):
            copy.grad = piece.view(copy.shape)

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return each parameter with its copy."""
        return zip(self._parameters, self._copies, strict=True)

    def gather(self) -> None:
        """Put the parameters' gradients in; zero where there is none."""
        for parameter, copy in self.pairs():
            assert copy.grad is not None
            if parameter.grad is None:
                copy.grad.zero_()
            else:
                copy.grad.copy_(parameter.grad)

    def begin(self, group: distributed.ProcessGroup) -> None:
        """Make the copies, and with them the parameters, what rank 0's are."""
        for copy in self._copies:
            assert copy.grad is not None
            copy.grad.copy_(copy)
        distributed.broadcast(self.values, group_src=0, group=group)
        for copy in self._copies:
            assert copy.grad is not None
            copy.copy_(copy.grad)
        self.give()

    def give(self) -> None:
        """Make the parameters what the copies are."""
        with torch.no_grad():
            for parameter, copy in self.pairs():
                parameter.copy_(copy)
        if self.values.is_cuda:  # whoever reads them has another stream
            torch.cuda.current_stream(self.values.device).synchronize()


class _Coordinator:
    """Decides on rank 0 whose gradients count: of those who are ready, when there are enough."""

    def __init__(
        self, size: int, words: Followers, wait_for: int | None, gradient_square: float | None
    ) -> None:
        self._size = size
        self._words = words
        self._wait_for = wait_for
        self._noise = _Noise(gradient_square)
        self._own: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._ready: dict[int, float] = {}
        self._left: set[int] = set()
        # Since when each worker has had its model, and how long it took last.
        self._given = dict.fromkeys(range(size), time.monotonic())
        self._took: dict[int, float] = {}

    def say(self, said: _Said) -> None:
        """Take rank 0's own word, from its trainer's thread."""
        self._own.put(said)
        self._words.wake()

    def begin(self, optimizer: torch.optim.Optimizer) -> _Epoch:
        """Wait until an epoch can begin, and tell all ranks of it."""
        participants = self._next()
        epoch = _Epoch(participants, [_settings(each) for each in optimizer.param_groups])
        self._words.tell(epoch)
        return epoch

    def close(self) -> None:
        """Let go of all connections."""
        self._words.close()

    def _next(self) -> frozenset[int] | None:
        """Return whose epoch begins: nobody's to see that all are there; None once all left."""
        while len(self._left) < self._size:
            enough = self._enough()
            heard = [*self._words.hear(0.0 if enough else PULSE), *self._said()]
            if not heard:
                return frozenset(self._ready) if enough else frozenset()
            for said in heard:
                self._note(said)
        return None

    def _said(self) -> Iterable[_Said]:
        while not self._own.empty():
            yield self._own.get()

    def measure(self, participants: frozenset[int], mean_squares: float) -> None:
        """Learn from an epoch that is over, by the squares of its mean gradient."""
        squares = [self._ready.pop(rank) for rank in participants]
        self._noise.add(squares, mean_squares)
        now = time.monotonic()
        for rank in participants:
            self._given[rank] = now

    def _note(self, said: _Said) -> None:
        if said.squares is None:
            self._left.add(said.rank)
        else:
            self._ready[said.rank] = said.squares
            self._took[said.rank] = time.monotonic() - self._given[said.rank]

    def _enough(self) -> bool:
        """Whether as many are ready as an epoch waits for, or all who are still there."""
        there = self._size - len(self._left)
        return len(self._ready) >= min(max(1, self._needed()), there) > 0

    def _needed(self) -> int:
        if self._wait_for is not None:
            return self._wait_for
        now = time.monotonic()
        there = [rank for rank in range(self._size) if rank not in self._left]
        if any(rank not in self._took for rank in there):
            return self._size
        # Who is late already takes that long at least.
        late = {rank: now - self._given[rank] for rank in there if rank not in self._ready}
        took = [max(self._took[rank], late.get(rank, 0.0), 1e-9) for rank in there]
        return self._noise.participants(took)


class _Noise:
    """How far the workers' gradients are apart: σ² of GOAT's Eq. 36, measured."""

    def __init__(self, gradient_square: float | None) -> None:
        self._aim = gradient_square
        self._variance: float | None = None

    def add(self, squares: list[float], mean_squares: float) -> None:
        """Take the squares of an epoch's gradients and of their mean; one alone says nothing."""
        n = len(squares)
        if n < 2 or not math.isfinite(sum(squares) + mean_squares):
            return
        now = max(0.0, (sum(squares) - n * mean_squares) / (n - 1))
        before = now if self._variance is None else self._variance
        self._variance = SMOOTHING * before + (1 - SMOOTHING) * now

    def participants(self, took: list[float]) -> int:
        """Return `K` of Algorithm 2 by the workers' seconds; all of them if none is enough."""
        variance, square = ENOUGH * len(took), 1.0
        if self._aim is not None:
            if self._variance is None:
                return len(took)
            variance, square = self._variance, self._aim
        # By how much the loss is above its least is a factor of all numbers of epochs alike.
        try:
            return len(_fanin.participation(took, len(took), 1.0, variance, square))
        except ValueError:  # the noise of all together is above what is to be reached
            return len(took)


def alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return those of one dtype and device together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())


def _on_copies(optimizer: torch.optim.Optimizer, flats: list[_Flat]) -> torch.optim.Optimizer:
    """Return an optimizer like this one that steps the copies, and has settings of its own."""
    copies = {parameter: copy for flat in flats for parameter, copy in flat.pairs()}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    # But for `step`, which a scheduler has put there to count the calls.
    vars(other).update((name, value) for name, value in vars(optimizer).items() if name != "step")
    other.param_groups = [
        {**each, "params": [copies.get(parameter, parameter) for parameter in each["params"]]}
        for each in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        other.state[copies.get(parameter, parameter)] = state
    return other


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def agree_on_parameters(parameters: list[Tensor], group: distributed.ProcessGroup) -> None:
    """Raise where another rank has other parameters."""
    shapes = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    of_all: list[Any] = [None] * group.size()
    distributed.all_gather_object(of_all, shapes, group=group)
    for rank, theirs in enumerate(of_all):
        if theirs != of_all[0]:
            raise ValueError(
                f"rank {rank} has {len(theirs)} parameters, and rank 0 {len(of_all[0])}, or of "
                "other shapes or dtypes: all ranks need the same model"
            )
