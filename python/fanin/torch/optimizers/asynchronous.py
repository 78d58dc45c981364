"""Training that does not wait for the last worker (GOAT §V).

A worker's `step` ends as soon as its gradient is in the model, whoever else was slower. An *epoch*
sums the gradients of those who were ready first; a late gradient counts in the epoch in which it
arrives, and its worker gets the model then. Algorithm 2 chooses how many an epoch waits for.

The paper's server has the model and the optimizer. Here each rank has both, in a thread that takes
part in every epoch, with zeros where its worker is not ready. All add the same sum to the same
parameters, so that all copies are equal, and no machine has a server's load. Who takes part, rank 0
decides (`coordinator`): it hears who is ready, and tells all.

Ranks whose links are slow take part in no sum, where a protocol knows sums of a part of the ranks
(GOAT). Rank 0 is the server of these (`left_out`).
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from fanin._connections import Followers, Gone, Leader, Silent, connect
from fanin._participants import among
from fanin.errors import AllReduceTimeout, FaninError, RankLost
from fanin.torch.backend import same_ranks
from fanin.torch.backend.channel import LOSS_TIMEOUT
from fanin.torch.backend.fanin_backend import FaninBackend
from fanin.torch.optimizers.coordinator import (
    Confirm,
    Confirmed,
    Coordinator,
    Epoch,
    Said,
    Sample,
    silence,
)
from fanin.torch.optimizers.left_out import Carrier, Gradient, Model, packed, unpacked
from fanin.torch.optimizers.wrapper import Steps, all_but_step, with_steps
from fanin.torch.patches import splitting
from fanin.torch.rendezvous.interface import own_address


def AsynchronousOptimizer(  # noqa: N802 - a class, to who calls it
    optimizer: torch.optim.Optimizer,
    process_group: distributed.ProcessGroup | None = None,
    *,
    wait_for: int | None = None,
    gradient_square: float | None = None,
) -> Any:
    """Return an optimizer of the same class that steps with the gradients of whoever is ready.

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
    together may be too large. Buffers (running means of BatchNorm) stay each rank's own.

    It is an optimizer as others are, for schedulers, gradient scalers and checkpoints. Its settings
    are rank 0's: what a scheduler sets there holds on all ranks, and so does the state that rank 0
    loads. `state` and `state_dict` are copies, as epochs go on. Hooks on steps run round each
    epoch's step, in another thread, on copies of the parameters. A step that is interrupted
    (Ctrl-C) has given its gradient: the next one waits until that is in.

    Raises `ValueError` for ranks whose parameters differ in shape or dtype, sparse gradients, an
    optimizer that computes gradients itself (LBFGS) or is such a one already, a `wait_for` that is
    not 1 to the number of ranks; and from `step` and `close` the errors of `fanin.errors` once a
    rank is gone: the training ends then, on all ranks. So it does with
    `fanin.errors.AllReduceTimeout`, which names them, where ranks are waited for that have said
    nothing for the timeout of the process group.
    """
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
    made = with_steps(optimizer, AsynchronousSteps)
    made.prepare(optimizer, group, wait_for, gradient_square)
    return made


class AsynchronousSteps(Steps):
    """What is put before an optimizer's class: steps by epochs, on copies of the parameters."""

    named = "AsynchronousOptimizer"

    def prepare(
        self,
        optimizer: torch.optim.Optimizer,
        group: distributed.ProcessGroup,
        wait_for: int | None,
        gradient_square: float | None,
    ) -> None:
        """Take part in epochs from now on."""
        size = group.size()
        self._rank = group.rank()
        self._trained = [p for p in parameters_of(self) if p.requires_grad]
        self._sums = same_ranks(group)
        agree_on_parameters(self._trained, self._sums)
        self._flats = [_Flat(of) for of in alike(self._trained)]
        # This optimizer's state stands for the state of that one, except while it loads one itself.
        self._behind = _on_copies(optimizer, self._flats)
        self._loads = False
        # A gradient scaler unscales itself, because the copies' optimizer knows no scaler.
        self._step_supports_amp_scaling = False
        self._timeout = timeout_of(self._sums)
        # Held to read the copies' optimizer, to step it, or to load its state.
        self._stepping = threading.Lock()
        self._load(self._behind.state_dict())
        name = f"epochs/{self._sums.group_name}"
        store = _get_default_store()
        address = partial(own_address, store)
        words = connect(PrefixStore(name, store), self._rank, size, address)
        model_bytes = sum(flat.values.nbytes for flat in self._flats)
        self._words: Coordinator | Leader = (
            Coordinator(size, words, wait_for, gradient_square, self._timeout, model_bytes)
            if isinstance(words, Followers)
            else words
        )
        # The way of gradients of ranks that are left out of sums, where that can be.
        self._carried: Carrier | Leader | None = None
        self._is_left_out = False
        machines = _machines(self._sums, self._flats) if size > 1 else None
        if machines is not None:
            carried = connect(PrefixStore(f"{name}/left-out", store), self._rank, size, address)
            if isinstance(carried, Followers) and isinstance(self._words, Coordinator):
                self._carried = Carrier(carried, self._words.say)
                self._words.leave_out_by(self._carried, machines)
            elif isinstance(carried, Leader):
                self._carried = carried
        self._changed = threading.Condition()
        self._epoch = 0
        self._gradients = 0
        self._steps = 0
        # The last word that is not answered, with its gradients.
        self._said: Said | None = None
        self._given: dict[Tensor, Tensor] = {}
        self._loading: dict[str, Any] | None = None
        self._numbers = count()
        self._closed = False
        self._over = False
        self._error: BaseException | None = None
        for flat in self._flats:
            flat.begin(self._sums)
        self._thread = threading.Thread(target=self._follow, name="fanin-epochs", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """How often the model has changed, as far as this rank has seen it."""
        return self._epoch

    @property
    def gradients(self) -> int:
        """How many gradients of all ranks are in the model, as far as this rank has seen it."""
        return self._gradients

    @property
    def steps(self) -> int:
        """How many gradients of this rank are in the model."""
        return self._steps

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
        gradients = {p: p.grad.detach() for p in self._trained if p.grad is not None}
        for gradient in gradients.values():
            if gradient.layout != torch.strided:
                raise ValueError(
                    "a gradient is sparse, and an epoch adds dense ones: make the layer with "
                    "sparse=False"
                )
            squares += float(gradient.double().square().sum())
        self._take_part(squares, gradients)
        # Schedulers look at this, to warn if they are stepped first.
        self._opt_called = True
        return loss

    # Torch puts a class's hooks round a step, once: they are round the copies' one.
    step.hooked = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """Take part until all ranks have closed, and return with the model that all have then."""
        self._closed = True
        self._take_part(None, {})
        self._thread.join()

    @property
    def state(self) -> Any:
        """A copy of each parameter's state, the same after the same epoch on all who take part.

        A rank with a slow link that is left out of sums has the last state after `close`.
        """
        if vars(self).get("_loads", True):
            return vars(self)["state"]
        parameters = {copy: own for flat in self._flats for own, copy in flat.pairs()}
        with self._stepping:
            found = self._behind.state.items()
            return defaultdict(
                dict, {parameters.get(of, of): deepcopy(state) for of, state in found}
            )

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take another state, which all ranks load; all get rank 0's, in the next epoch."""
        if self._closed:
            raise ValueError("the optimizer is closed")
        self._loads = True
        try:
            super().load_state_dict(state_dict)
        finally:
            self._loads = False
            vars(self)["state"] = defaultdict(dict)
        if not isinstance(self._words, Coordinator):
            return
        with self._changed:
            self._loading = state_dict
        self._words.load()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._over or self._loading is None
            )
            self._raise_error()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: other ranks may be in the midst of an epoch."""
        del param_group
        raise ValueError(
            "an AsynchronousOptimizer has the parameters that it began with: close it, and make "
            "another one of all parameters, on all ranks"
        )

    def _take_part(self, squares: float | None, gradients: dict[Tensor, Tensor]) -> None:
        """Say what there is to rank 0, and wait until it is in: a gradient, or the end."""
        if self._said is not None:  # it was interrupted
            self._wait_for_answer()
        with self._changed:
            self._raise_error()
            if self._over:
                return
            self._given = gradients
            self._said = Said(self._rank, next(self._numbers), squares)
            self._changed.notify_all()
        try:
            self._wait_for_answer()
        except BaseException:
            # Interrupted: what the program does to its gradients now is for another step.
            with self._changed:
                if self._error is None:
                    self._given = {of: gradient.clone() for of, gradient in self._given.items()}
            raise

    def _wait_for_answer(self) -> None:
        said = self._said
        if said is None:
            return
        try:
            # The gradient of a rank that is left out says itself that it is there.
            if said.squares is None or not self._is_left_out:
                self._words.say(said)
        except (Gone, OSError):  # the thread that follows says why
            self._thread.join()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._over or self._said is None
            )
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Close all connections, so that nobody waits for this rank. Once."""
        self._words.close()
        if isinstance(self._carried, Leader):
            self._carried.shut()
            self._carried.close()
        with contextlib.suppress(ValueError):  # destroyed with all others
            distributed.destroy_process_group(self._sums)
        del self._sums  # Gloo's connections last as long as somebody has the group

    def _follow(self) -> None:
        """Take part in all epochs."""
        try:
            while self._play(self._next()):
                pass
        except BaseException as error:
            cause = self._explained(error)
            if isinstance(self._words, Coordinator) and isinstance(cause, FaninError):
                self._words.tell(cause)
            self._fail(cause)
        self._end()

    def _fail(self, error: BaseException) -> None:
        """Let `step` raise it, unless something went wrong before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _next(self) -> Epoch:
        if isinstance(self._words, Coordinator):
            return self._words.begin(self)
        while True:
            # Rank 0 says something every second, but while it waits for others in an epoch.
            match self._words.hear(self._timeout + LOSS_TIMEOUT):
                case FaninError() as error:
                    raise error
                case Sample(size_bytes=size_bytes):
                    assert isinstance(self._carried, Leader)
                    self._carried.say(bytes(size_bytes))
                case Confirm():
                    self._words.say(Confirmed(self._rank))
                case heard:
                    return cast(Epoch, heard)

    def _play(self, epoch: Epoch) -> bool:
        """Add an epoch's gradients to this rank's copy; false after the last one."""
        if epoch.participants is None:
            self._share_last()
            with self._changed:
                for flat in self._flats:
                    flat.give()
                self._over = True
                self._said = None
                self._changed.notify_all()
            return False
        if epoch.loads:
            self._load(self._loading)
            with self._changed:
                self._loading = None
                self._changed.notify_all()
        if epoch.members is not None and self._rank not in epoch.members:
            self._leave()
        taken = self._rank in epoch.participants and not self._is_left_out
        if not epoch.participants:
            with among(epoch.members):
                distributed.all_reduce(torch.zeros(1, device="cpu"), group=self._sums)
            return True
        squares = 0.0
        if not self._is_left_out:
            with self._changed:
                given = self._given if taken else {}
                for flat in self._flats:
                    flat.gather(given)
            if isinstance(self._words, Coordinator):
                self._add_left_out(epoch, self._words)
        begun = time.monotonic()
        with among(epoch.members):
            for flat in self._flats:
                distributed.all_reduce(flat.values, group=self._sums)
        if self._is_left_out:
            return True
        sum_seconds = time.monotonic() - begun
        for flat in self._flats:
            flat.values /= len(epoch.participants)
            if isinstance(self._words, Coordinator):
                squares += float(flat.values.double().square().sum())
        with self._stepping:
            for each, values in zip(self._behind.param_groups, epoch.settings, strict=True):
                each.update(values)
            self._behind.step()
        with self._changed:
            self._epoch += 1
            self._gradients += len(epoch.participants)
        if isinstance(self._words, Coordinator):
            self._words.measure(epoch.participants, squares, sum_seconds)
            self._answer_left_out(epoch, self._words)
        with self._changed:
            if taken:
                for flat in self._flats:
                    flat.give()
                self._steps += 1
                self._said, self._given = None, {}
                self._changed.notify_all()
        return True

    def _leave(self) -> None:
        """Take part in no sum from now on: give gradients to rank 0. Once."""
        if self._is_left_out:
            return
        with self._changed:
            self._is_left_out = True
        threading.Thread(target=self._carry, name="fanin-left-out", daemon=True).start()

    def _carry(self) -> None:
        """Give rank 0 each gradient, and get the model."""
        try:
            self._carry_all()
        except Gone as gone:
            # The thread that follows mostly hears why.
            with self._changed:
                is_known = self._changed.wait_for(
                    lambda: self._over or self._error is not None, LOSS_TIMEOUT
                )
            if not is_known:
                self._give_up(RuntimeError(f"{gone}: it took this rank's gradients until then"))
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Let `step` raise it, and rank 0 see that this rank is gone: it ends the training."""
        assert isinstance(self._words, Leader)
        self._fail(error)
        self._words.shut()

    def _carry_all(self) -> None:
        assert isinstance(self._carried, Leader)

        def something() -> bool:
            gives = self._said is not None and self._said.squares is not None
            return gives or self._over or self._error is not None

        while True:
            with self._changed:
                self._changed.wait_for(something)
                said = self._said
                if self._over or self._error is not None or said is None or said.squares is None:
                    return
                for flat in self._flats:
                    flat.gather(self._given)
                pieces = packed([flat.values for flat in self._flats])
            self._carried.say(Gradient(self._rank, said.number, said.squares, pieces))
            self._take(self._carried.hear())

    def _take(self, model: Model) -> None:
        """Go on with rank 0's model."""
        with self._changed:
            for flat, piece in zip(self._flats, model.pieces, strict=True):
                flat.take(piece)
                flat.give()
            self._epoch, self._gradients = model.epoch, model.gradients
            self._steps += 1
            self._said, self._given = None, {}
            self._changed.notify_all()

    def _add_left_out(self, epoch: Epoch, coordinator: Coordinator) -> None:
        """Add the gradients that have come from ranks that are left out to rank 0's own."""
        assert epoch.participants is not None
        for rank in epoch.participants & coordinator.left_out.keys():
            for flat, piece in zip(self._flats, coordinator.left_out[rank], strict=True):
                flat.values += unpacked(piece, flat.values)

    def _answer_left_out(self, epoch: Epoch, coordinator: Coordinator) -> None:
        """Give these ranks the model, while others go on."""
        assert epoch.participants is not None
        ranks = epoch.participants & coordinator.left_out.keys()
        if ranks:
            assert isinstance(self._carried, Carrier)
            model = Model(self._epoch, self._gradients, self._packed())
            for rank in ranks:
                self._carried.give(rank, model)

    def _packed(self) -> list[bytes]:
        return packed([flat.copied() for flat in self._flats])

    def _share_last(self) -> None:
        """Let ranks that were left out end with what all have: the model, and its optimizer."""
        if isinstance(self._carried, Carrier):
            with self._stepping:
                state = pickle.dumps(self._behind.state_dict())
            self._carried.end(Model(self._epoch, self._gradients, self._packed(), state))
        elif isinstance(self._carried, Leader) and self._is_left_out:
            model = self._carried.hear()
            for flat, piece in zip(self._flats, model.pieces, strict=True):
                flat.take(piece)
            with self._stepping:
                self._behind.load_state_dict(pickle.loads(model.state))
            self._epoch, self._gradients = model.epoch, model.gradients

    def _load(self, state: dict[str, Any] | None) -> None:
        """Give the copies' optimizer a state of rank 0's."""
        told: list[Any] = [None]
        if self._rank == 0:
            try:
                told = [pickle.dumps(state)]
            except Exception as error:  # others wait to hear something
                told = [TypeError(f"the state of rank 0's optimizer cannot be sent: {error}")]
        distributed.broadcast_object_list(told, group_src=0, group=self._sums)
        if isinstance(told[0], Exception):
            raise told[0]
        with self._stepping:
            self._behind.load_state_dict(pickle.loads(told[0]))

    def _explained(self, error: BaseException) -> BaseException:
        """Return why, as the ranks' job knows it, where a connection of its own is gone."""
        if isinstance(error, Silent):
            return silence([error.rank], self._timeout + LOSS_TIMEOUT)
        if isinstance(error, FaninError) or not isinstance(error, (Gone, RuntimeError)):
            return error
        try:
            work = distributed.all_reduce(
                torch.zeros(1, device="cpu"), group=self._sums, async_op=True
            )
            assert work is not None
            work.wait(timedelta(seconds=LOSS_TIMEOUT))
        except AllReduceTimeout as cause:
            if isinstance(error, Gone):  # its process lives, and takes part in nothing any more
                return RankLost(f"{error}: its optimizer has failed", rank=error.rank)
            return cause
        except FaninError as cause:
            return cause
        except (RuntimeError, ValueError):  # the program has destroyed the group
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

    def gather(self, given: dict[Tensor, Tensor]) -> None:
        """Put the gradients of parameters in; zero where there is none."""
        for parameter, copy in self.pairs():
            assert copy.grad is not None
            if parameter in given:
                copy.grad.copy_(given[parameter])
            else:
                copy.grad.zero_()

    def copied(self) -> Tensor:
        """Return the copies of the parameters, one behind the other."""
        return torch.cat([copy.flatten() for copy in self._copies])

    def take(self, piece: bytes) -> None:
        """Make the copies what was packed of such ones."""
        whole = unpacked(piece, self.values)
        sizes = [copy.numel() for copy in self._copies]
        for copy, part in zip(self._copies, torch.split(whole, sizes), strict=True):
            copy.copy_(part.view(copy.shape))

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


def alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return those of one dtype and device together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())


def _machines(group: distributed.ProcessGroup, flats: list[_Flat]) -> list[int] | None:
    """Return each rank's machine if a part of the ranks can sum these alone."""
    machines = None
    for flat in flats:
        backend = splitting.unwrapped(group, flat.values.device)
        if not isinstance(backend, FaninBackend):
            return None
        # A rank that is left out sends its gradient to rank 0 in the clear.
        if backend.encrypts or not backend.has_participants or not backend.serves(flat.values):
            return None
        machines = backend.machines
    return machines


def _on_copies(optimizer: torch.optim.Optimizer, flats: list[_Flat]) -> torch.optim.Optimizer:
    """Return an optimizer like this one that steps the copies, and has settings of its own."""
    copies = {parameter: copy for flat in flats for parameter, copy in flat.pairs()}
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(other).update(all_but_step(optimizer))
    # They are for states that go into files, and come out of them.
    for name in vars(other):
        if name.endswith(("state_dict_pre_hooks", "state_dict_post_hooks")):
            vars(other)[name] = OrderedDict()
    other.param_groups = [
        {**each, "params": [copies.get(parameter, parameter) for parameter in each["params"]]}
        for each in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        other.state[copies.get(parameter, parameter)] = state
    return other


def timeout_of(group: distributed.ProcessGroup) -> float:
    """Return the timeout of a group, in seconds."""
    options = splitting.unwrapped(group, group._device_types[0]).options
    return float(options._timeout.total_seconds())


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer steps, in its order."""
    return [parameter for each in optimizer.param_groups for parameter in each["params"]]


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
