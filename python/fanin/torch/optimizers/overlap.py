"""Training whose communication hides under the backward pass and under the next forward pass.

`step` returns at once. Each parameter steps when it is read next, in the forward pass or anywhere
else, and waits for the sum of its own gradient alone (BytePS §6.1, and what it takes from P3 and
ByteScheduler). Gradients are sent in an order that all ranks share, in which those of the first
layers, which come last, overtake others (`sender`, `send_order`).

Nothing happens between the calls of the program: a partition is submitted where its gradient is
there and those before it in the order are, and none waits for another's sum. There is no thread,
and no credit at run time: it is in the order, which is made ahead.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from fanin._bounds import checked
from fanin._layers import of_priority
from fanin.torch.backend import backend_of, same_ranks
from fanin.torch.optimizers.asynchronous import agree_on_parameters, alike
from fanin.torch.optimizers.partitions import Piece
from fanin.torch.optimizers.sender import Sender, Treated
from fanin.torch.optimizers.unread import Reading, is_kept_elsewhere, make_plain
from fanin.torch.optimizers.wrapper import Settings, Steps, StepsOfFew, settings_of, with_steps

BROADCAST_BYTES = 1 << 25
"""How much of the parameters with which all begin goes into one broadcast, at least."""


def DistributedOptimizer(  # noqa: N802 - a class, to who calls it
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    process_group: distributed.ProcessGroup | None = None,
) -> Any:
    """Return an optimizer of the same class that steps with the average gradients of all ranks.

        model = Net()  # not in DistributedDataParallel
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fanin.torch.DistributedOptimizer(optimizer, model)
        for batch in batches:
            optimizer.zero_grad()
            loss(model(batch)).backward()
            optimizer.step()

    Collective: all ranks of `process_group` (None: the default group, which is fanin's) make one,
    of the same model, and begin with rank 0's parameters and buffers. It has the given optimizer's
    state, which is not used any more: make schedulers of what is returned.

    What comes of it is what comes of `DistributedDataParallel` with `find_unused_parameters`: a
    parameter that some rank has not used gets the average with zeros for that rank, and one that
    nobody has used does not step. Buffers stay each rank's own, and so do parameters of the model
    that the optimizer does not have.

    `step` returns before the sums are there. A parameter steps when it is read next, by whatever
    reference, and before `step` returns where other tensors or arrays share its memory, another
    process does, or a compiled program reads it. Its `grad` stays this rank's own.

    - To look at averages, or to change them (clip, a gradient scaler), call `synchronize` between
      `backward` and what changes them; such a step does not overlap.
    - To add up gradients of several passes, take `no_sync` for all but the last.
    - Before an extension in C++, TorchScript or `torch.func` is given parameters themselves, call
      `synchronize`: it gets an error else.
    - Where the process trains something else afterwards, call `close`: the sums are a job of their
      own at the services, until then or until the process group is destroyed.

    Where the process group has a `loss_bound`, a group of parameters may have its own, and a
    `priority` from 0 to 6 in place of the layers that packets say (docs/operations.md):
    ``{"params": norms, "loss_bound": 0.0, "priority": 0}``. All ranks say the same.

    The optimizer must treat each parameter by itself, as all of torch's do but LBFGS. Where it has
    hooks on its steps, `step` waits for all.

    Raises `ValueError` for another backend's group, a model in DDP or FSDP, DTensors, an optimizer
    that is one of these already, LBFGS, a parameter that is not the model's, and ranks whose
    parameters differ. `backward` raises it for a gradient that is sparse, or of another dtype or
    device than its parameter was, and `RuntimeError` for one of a loss that is older than the last
    step; `step` raises that for gradients that were changed without `synchronize`, and whoever
    reads a parameter where the optimizer has changed its own settings in a step. Once a rank is
    gone, `backward`, `step` or whoever reads a parameter raises the errors of `fanin.errors`.
    """
    backend_of(process_group)  # raises where that is no group, or another backend's
    group = cast(distributed.ProcessGroup, process_group or distributed.group.WORLD)
    _refuse_other_sums(model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS looks at all parameters at once, and here each steps by itself: take another "
            "optimizer, or DistributedDataParallel"
        )
    few = StepsOfFew(optimizer)
    made = with_steps(optimizer, OverlappedSteps)
    made.prepare(few, model, group)
    return made


class OverlappedSteps(Steps):
    """What is put before an optimizer's class: each parameter steps when it is read next."""

    named = "DistributedOptimizer"

    # To torch's gradient scaler: `step` gets its `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True
    _is_known_to_compilers = False

    def prepare(self, few: StepsOfFew, model: nn.Module, group: distributed.ProcessGroup) -> None:
        """Send each gradient when it is there, from now on."""
        self._few = few
        self._model = model
        self._sums = same_ranks(group)
        self._sender = Sender(self._sums)
        self._wait = Wait(self)
        self._reading = Reading(self._wait)
        self._hooks: list[Any] = []
        self._lock = threading.RLock()  # gradients of several devices come in several threads
        self._sends = True
        self._sent = self._synchronized = False
        self._ended: str | None = None
        # Pieces that are still to step, the settings to step by, and pieces that had not been read
        # when backward began.
        self._pending: set[Piece] = set()
        # The same as their sums come.
        self._coming: deque[Piece] = deque()
        self._settings: list[Settings] = []
        self._groups: dict[Tensor, int] = {}
        self._unread: set[Piece] = set()
        # Pieces that compiled programs read, which were compiled while the pieces were to step.
        self._compiled: set[Piece] = set()
        if not self._is_known_to_compilers:
            self._is_known_to_compilers = True
            _step_before_compiling(self)
        trained = {parameter for each in self.param_groups for parameter in each["params"]}
        others = [
            parameter
            for parameter in model.parameters()
            if not (parameter.requires_grad and parameter in trained)
        ]
        _begin_alike([*others, *model.buffers()], self._sums)
        self._take_in()

    @property
    def process_group(self) -> distributed.ProcessGroup:
        """The group of the gradients' sums, for `fanin.torch.replan`."""
        return self._sums

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each parameter step when it is read next; returns what `closure` did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._take_in()
            if not self._sent:
                self._begin()
                self._sender.end()
            self._check()
            if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
                self._average()
            if self._synchronized:
                if self._is_to_step():
                    super().step()
            else:
                self._settings = [settings_of(each) for each in self.param_groups]
                self._groups = {
                    parameter: number
                    for number, each in enumerate(self.param_groups)
                    for parameter in each["params"]
                }
                # A step that is interrupted from here on is made once all the same.
                self._sent = False
                self._let_wait()
            self._sent = self._synchronized = False
        # Schedulers look at this, to warn if they are stepped first.
        self._opt_called = True
        return loss

    # Torch puts a class's hooks round a step, once: they are round that of the class behind.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait for all that is under way.

        Between `backward` and `step` each `grad` is the average of all ranks then; after `step`,
        each parameter has stepped.
        """
        with self._lock:
            if self._sent:
                self._check()
                self._average()
            self._settle()

    def close(self) -> None:
        """Wait for all that is under way, and leave the job of the sums. All ranks call it."""
        if self._ended:
            return
        self.synchronize()
        self._ended = "the optimizer is closed: make another one"
        for hook in self._hooks:
            hook.remove()
        distributed.destroy_process_group(self._sums)

    def go_on_in(self, process_group: distributed.ProcessGroup | None = None) -> None:
        """Go on with the ranks of another group, as `fanin.torch.shrink` makes one.

        All its ranks call it (None: the default group). What is under way is given up: where sums
        have failed, parameters do not step. Afterwards all have the parameters, the buffers and the
        optimizer's state of the group's rank 0. Raises `ValueError` as `DistributedOptimizer` does.
        """
        backend_of(process_group)  # raises where that is no group, or another backend's
        group = cast(distributed.ProcessGroup, process_group or distributed.group.WORLD)
        with self._lock:
            self._bring_back(self._pending)
            self._pending.clear()
            for parameter in self._sender.places:
                make_plain(parameter)
            for hook in self._hooks:
                hook.remove()
            with contextlib.suppress(ValueError):  # it went with the default group
                distributed.destroy_process_group(self._sums)
            self.prepare(self._few, self._model, group)
            told = [super().state_dict()]
            distributed.broadcast_object_list(told, group=group, group_src=0)
            super().load_state_dict(told[0])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in here add to gradients, for a later pass that sends them."""
        before, self._sends = self._sends, False
        try:
            yield
        finally:
            self._sends = before

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as all ranks do."""
        super().add_param_group(param_group)
        with self._lock:
            self._take_in()

    @property
    def state(self) -> Any:
        """The state of each parameter that the last step has left."""
        if "_sender" in vars(self):
            self._finish(self._sender.pieces)
        return vars(self)["state"]

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    def load_state_dict(self, state_dict: Any) -> None:
        """Take another state, after the last step."""
        self._finish(self._sender.pieces)
        super().load_state_dict(state_dict)

    def _take_in(self) -> None:
        """Send the gradients of parameters that are trained, and were not so far; all ranks do."""
        known = self._sender.places
        added = [
            parameter
            for each in self.param_groups
            for parameter in each["params"]
            if parameter.requires_grad and parameter not in known
        ]
        if not added:
            return
        missing = set(added).difference(self._model.parameters())
        if missing:
            raise ValueError(
                f"{len(missing)} of the optimizer's parameters are not the model's: give the model "
                "of all of them"
            )
        treated = self._treated()
        _refuse_other_sums(self._model)
        self._finish(self._sender.pieces)
        agree_on_parameters(added, self._sums)
        _begin_alike(added, self._sums)
        for parameter in added:
            arrived = _weakly(self, OverlappedSteps._gradient)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
        self._sender.take_in(added, treated)
        self._sent = False

    def _treated(self) -> dict[Tensor, Treated]:
        """Return how each parameter's gradient is treated on its way; raises `ValueError`."""
        parameters: Iterable[Tensor] = self._model.parameters()
        places = {each: place for place, each in enumerate(parameters)}
        usual = backend_of(self._sums).settings.loss_bound or 0.0

        def treated(parameter: Tensor, group: dict[str, Any]) -> Treated:
            priority, bound = group.get("priority"), group.get("loss_bound")
            own = places[parameter], len(places)
            layer = own if priority is None else of_priority(priority)
            return layer, checked(usual if bound is None else bound), priority

        return {
            parameter: treated(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in places
        }

    def _gradient(self, parameter: Tensor) -> None:
        """Send a gradient that backward has just made."""
        if not self._sends:
            return
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of {self._name(parameter)} is sparse, and partitions are dense: "
                "make the layer with sparse=False"
            )
        place = self._sender.place_of(parameter)
        if (parameter.grad.dtype, parameter.grad.device) != (place.dtype, place.device):
            raise ValueError(
                f"the gradient of {self._name(parameter)} is {parameter.grad.dtype} on "
                f"{parameter.grad.device}, and was to be {place.dtype} on {place.device}: convert "
                "or move the model before the optimizer is made"
            )
        with self._lock:
            if not self._sender.open:
                self._begin()
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._sender.end)
            if self._sender.places[parameter][0] in self._unread:
                raise RuntimeError(
                    f"a loss that is older than the last step has a gradient of "
                    f"{self._name(parameter)}, which had not stepped yet: call synchronize() after "
                    "step(), or compute the loss anew"
                )
            if self._sender.is_there(parameter):
                raise RuntimeError(
                    f"the gradient of {self._name(parameter)} came twice in a backward pass: "
                    "checkpoints need use_reentrant=False, and after a backward() that has failed "
                    "the training cannot go on"
                )
            self._sender.put(parameter)

    def _is_to_step(self) -> bool:
        """Whether a gradient scaler, if there is one, lets the averages step; unscale them then."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or self._few.unscales:
            return True
        if found_inf.item():
            return False
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # as the scaler does
            for parameter in self._sender.places:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
        self.grad_scale = self.found_inf = None  # what is behind this takes none
        return True

    def _begin(self) -> None:
        if self._ended:
            raise RuntimeError(self._ended)
        self._unread = self._pending.copy()
        self._finish(self._sender.pieces)
        self._sender.begin()
        self._sent, self._synchronized = True, False

    def _average(self) -> None:
        """Make each gradient the average of all ranks."""
        if self._synchronized:
            return
        for piece in self._sender.pieces:
            piece.wait()
            for parameter, average in zip(piece.parameters, piece.gradients, strict=True):
                if not self._sender.is_used(parameter):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(average)
        self._synchronized = True

    def _check(self) -> None:
        """Raise where gradients are not what was sent."""
        if self._sender.open:
            raise RuntimeError(
                "a backward() has failed, and other ranks wait for the rest of its gradients: the "
                "training cannot go on"
            )
        if self._synchronized:
            return
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "a gradient scaler steps the optimizer, and has seen this rank's gradients alone: "
                "call synchronize() before scaler.unscale_() and scaler.step()"
            )
        for parameter in self._sender.places:
            if not self._sender.is_as_sent(parameter):
                raise RuntimeError(
                    f"the gradient of {self._name(parameter)} was changed after backward(), which "
                    "has sent it: call synchronize() before gradients are clipped, unscaled or "
                    "forgotten, so that these are the averages"
                )

    def read(self, parameters: Sequence[Tensor] | None) -> None:
        """Let parameters step before somebody reads them; None: all."""
        with self._lock:
            places = self._sender.places
            read = places if parameters is None else parameters
            pieces = dict.fromkeys(places[each][0] for each in read if each in places)
            for piece in pieces:
                self._sender.note_read(piece)
            self._finish(pieces)
            for piece in pieces:
                for parameter in piece.parameters:
                    make_plain(parameter)

    def before_compiling(self, _: Any) -> None:
        """Let a compiler see parameters as they are, and what it compiles find them so again."""
        with self._lock:
            self._compiled |= self._pending
            self._settle()

    def _let_wait(self) -> None:
        """Let parameters step when they are read, but for those that can be read unseen."""
        sender = self._sender
        sender.read = {}
        for parameter in sender.places:
            make_plain(parameter)
        at_once = [
            piece
            for piece in sender.pieces
            if piece in self._compiled or any(map(is_kept_elsewhere, piece.parameters))
        ]
        self._wait.held = self
        self._coming = deque(sender.coming())
        self._pending = set(sender.pieces)
        for piece in self._pending.difference(at_once):
            for parameter in piece.parameters:
                self._reading.put_away(parameter)
        for piece in at_once:
            sender.note_read(piece)
        self._finish(at_once)

    def _settle(self) -> None:
        """Let all parameters step that are to, and be as they ever were."""
        self._finish(self._sender.pieces)
        for parameter in self._sender.places:
            make_plain(parameter)

    def _finish(self, pieces: Iterable[Piece]) -> None:
        """Let the parameters of pieces step, if they are still to."""
        if self._pending.isdisjoint(pieces):
            return
        with self._lock:
            asked = [piece for piece in dict.fromkeys(pieces) if piece in self._pending]
            for piece in asked:
                piece.wait()
            # Other pieces that are there step, too: one step of many is shorter than many steps.
            besides = []
            while self._coming and self._coming[0].is_there():
                piece = self._coming.popleft()
                if piece in self._pending and piece not in asked:
                    piece.wait()
                    besides.append(piece)
            due = asked + besides
            averages = self._averages_of(due)
            try:
                self._bring_back(due)
                self._step_of(averages)
            except BaseException:
                self._ended = "a step failed half-way, so that ranks differ: load a checkpoint"
                self._bring_back(due)
                raise
            finally:
                self._pending.difference_update(due)
                if not self._pending:
                    self._wait.held = None
            # When they are read makes the order of the next sums.
            for piece in besides:
                for parameter in piece.parameters:
                    self._reading.mark(parameter)

    def _bring_back(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            for parameter in piece.parameters:
                self._reading.bring_back(parameter)

    def _averages_of(self, pieces: list[Piece]) -> dict[Tensor, Tensor]:
        """Return the averages of those parameters that some rank has used."""
        return {
            parameter: average
            for piece in pieces
            for parameter, average in zip(piece.parameters, piece.gradients, strict=True)
            if self._sender.is_used(parameter)
        }

    def _step_of(self, averages: dict[Tensor, Tensor]) -> None:
        groups: dict[int, list[Tensor]] = {}
        for parameter in averages:
            groups.setdefault(self._groups[parameter], []).append(parameter)
        own = {parameter: parameter.grad for parameter in averages}
        # A step is plain, whatever its reader is in. It may be another precision, a transform of
        # torch.func, another default device, or a mode that sees all computing, as in some
        # checkpoints.
        with contextlib.ExitStack() as plainly:
            if torch._C._len_torch_function_stack():
                plainly.enter_context(torch._C.DisableTorchFunction())
            if torch._C._len_torch_dispatch_stack():
                plainly.enter_context(_disable_current_modes())
            if torch._C._functorch.peek_interpreter_stack() is not None:
                plainly.enter_context(temporarily_clear_interpreter_stack())
            plainly.enter_context(torch.inference_mode(False))
            plainly.enter_context(torch.no_grad())
            for device in {parameter.device.type for parameter in averages}:
                plainly.enter_context(torch.autocast(device, enabled=False))
            try:
                for parameter, average in averages.items():
                    parameter.grad = average
                by_settings = [(self._settings[number], of) for number, of in groups.items()]
                self._few.step(by_settings, vars(self)["state"])
            finally:
                for parameter, gradient in own.items():
                    parameter.grad = gradient

    def _name(self, parameter: Tensor) -> str:
        named = self._model.named_parameters()
        return next((name for name, each in named if each is parameter), "a parameter")


class Wait:
    """What is called before parameters are read.

    They may outlive the optimizer; but while a step is to be done, whoever has one of them has it.
    """

    def __init__(self, optimizer: OverlappedSteps) -> None:
        self.held: OverlappedSteps | None = None
        self._reference = weakref.ref(optimizer)

    def __call__(self, parameters: Sequence[Tensor] | None) -> None:
        """Let them step, if the optimizer lives."""
        optimizer = self._reference()
        if optimizer is not None:
            optimizer.read(parameters)
        for parameter in parameters or ():
            make_plain(parameter)


def _step_before_compiling(optimizer: OverlappedSteps) -> None:
    """Let parameters step before TorchDynamo looks at them, as long as the optimizer lives."""
    # The first step of any optimizer loads it, too.
    import torch._dynamo.callback

    handler = torch._dynamo.callback.callback_handler
    told = handler.register_start_callback(_weakly(optimizer, OverlappedSteps.before_compiling))
    weakref.finalize(optimizer, handler.remove_start_callback, told).atexit = False


def _refuse_other_sums(model: nn.Module) -> None:
    """Raise for a model whose gradients are summed otherwise."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is in DistributedDataParallel, which would sum its "
                "gradients, too: give the model itself (model.module)"
            )
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    parts = {
        name: f"in {fsdp.FullyShardedDataParallel.__name__}"
        for name, module in model.named_modules()
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
    }
    parts |= {
        name: f"a {type(parameter).__name__}"
        for name, parameter in model.named_parameters()
        if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__
    }
    for name, what in parts.items():
        raise ValueError(
            f"{name or 'the model'} is {what}: each rank has a part of such tensors, with FSDP and "
            'tensor parallel, which sum gradients themselves, on the backend "fanin", too; train '
            "with the optimizer as it is"
        )


def _begin_alike(tensors: Iterable[Tensor], group: distributed.ProcessGroup) -> None:
    """Make tensors rank 0's, many in each broadcast."""
    for of_one_kind in alike(tensors):
        rest = deque(tensor.detach() for tensor in of_one_kind)
        while rest:
            together: list[Tensor] = []
            size_bytes = 0
            while rest and size_bytes < BROADCAST_BYTES:
                together.append(rest.popleft())
                size_bytes += together[-1].nbytes
            flat = torch.cat([tensor.flatten() for tensor in together])
            distributed.broadcast(flat, group_src=0, group=group)
            pieces = torch.split(flat, [tensor.numel() for tensor in together])
            for tensor, piece in zip(together, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _weakly(self: OverlappedSteps, method: Callable[..., None]) -> Any:
    """Return a method for who may outlive the optimizer."""
    reference = weakref.ref(self)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, argument)

    return call
