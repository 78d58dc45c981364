"""Parameters of `DistributedOptimizer` by references that were there before the step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fake_device import Mark, Stream, plug_in
from fanin.torch import DistributedOptimizer
from fanin.torch.backend import FaninBackend, backend_of
from fanin.torch.optimizers import device_clock
from ranks import Me
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 4
Tensors = list[torch.Tensor]


def layers(count: int = 3, width: int = 400) -> Any:
    """Each a piece of its own."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


class Watched:
    """What a program has of its model before it trains."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net = net
        self.optimizer = optimizer
        self.parameters = list(net.parameters())
        self.average = [each.detach().clone() for each in self.parameters]
        self.model_average = AveragedModel(net)

    def memory(self) -> None:
        self.data = [each.data for each in self.parameters]
        self.arrays = [each.detach().numpy() for each in self.parameters]

    def averaged(self) -> Tensors:
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 0.1)
        return [each.clone() for each in self.average]

    def averaged_one_by_one(self) -> Tensors:
        with torch.no_grad():
            for mean, each in zip(self.average, self.parameters, strict=True):
                mean.lerp_(each, 0.1)
        return [each.clone() for each in self.average]

    def averaged_by_torch(self) -> Tensors:
        self.model_average.update_parameters(self.net)
        return [each.detach().clone() for each in self.model_average.parameters()]

    def norms(self) -> Tensors:
        groups = self.optimizer.param_groups
        return [each.detach().norm() for group in groups for each in group["params"]]

    def saved(self) -> Tensors:
        file = io.BytesIO()
        torch.save(self.parameters, file)
        file.seek(0)
        return [each.detach() for each in torch.load(file)]

    def momenta(self) -> Tensors:
        state = self.optimizer.state
        return [state[each]["momentum_buffer"].clone() for each in self.parameters]


READINGS: dict[str, Callable[[Watched], Sequence[torch.Tensor]]] = {
    "a fused moving average": Watched.averaged,
    "a moving average": Watched.averaged_one_by_one,
    "torch's moving average": Watched.averaged_by_torch,
    "norms by param_groups": Watched.norms,
    "torch.save of a list": Watched.saved,
    "pickle": lambda it: pickle.loads(pickle.dumps(it.parameters)),
    "a copy": lambda it: copy.deepcopy(it.parameters),
    "data": lambda it: [each.data.clone() for each in it.parameters],
    "one vector": lambda it: [nn.utils.parameters_to_vector(it.parameters).detach()],
    "numbers": lambda it: [torch.tensor(each.tolist()) for each in it.parameters],
    "data from before": lambda it: [each.clone() for each in it.data],
    "arrays from before": lambda it: [torch.from_numpy(each.copy()) for each in it.arrays],
    "the optimizer's state": Watched.momenta,
}


def read(me: Me, overlapped: bool, name: str) -> list[Tensors]:
    net = layers()
    model: Any = net
    optimizer: Any = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if overlapped:
        optimizer = DistributedOptimizer(optimizer, net)
    else:
        model = DistributedDataParallel(net)
    watched = Watched(net, optimizer)
    if name.endswith("from before"):
        watched.memory()
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((1, 400), 1.0 + me.rank + step)).square().sum().mul(1e-3).backward()
        optimizer.step()
        found.append([each.detach().clone() for each in READINGS[name](watched)])
    if overlapped:
        optimizer.close()
    return found


def read_on_both(me: Me) -> Any:
    me.init("fanin")
    return {name: (read(me, False, name), read(me, True, name)) for name in READINGS}


def test_every_reference_reads_what_the_step_has_made(launch: Launch) -> None:
    for found in launch(read_on_both, 2).results():
        for name, (ddp, ours) in found.items():
            for step in range(STEPS):
                for theirs, mine in zip(ddp[step], ours[step], strict=True):
                    assert torch.equal(theirs, mine), f"{name}, step {step}"


def passed(net: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 400)).sum().backward()
    optimizer.step()


def pending(me: Me) -> dict[str, int]:
    """How many of three pieces a step does not let wait."""
    me.init()
    found = {}
    for name in ("references", "data", "an array", "shared memory", "a second parameter"):
        net = layers()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
        kept: list[Any] = list(net.parameters())
        if name == "data":
            kept.append(net[1].weight.data)
        elif name == "an array":
            kept.append(net[1].weight.detach().numpy())
        elif name == "shared memory":
            net[1].weight.share_memory_()
        elif name == "a second parameter":
            kept.append(nn.Parameter(net[1].weight.data))
        passed(net, optimizer)
        net.zero_grad()  # gradients are no secret
        found[name] = len(optimizer._sender.read)
        optimizer.close()
        del kept
    return found


def test_what_shares_a_parameters_memory_keeps_it_from_waiting(launch: Launch) -> None:
    for found in launch(pending, 2).results():
        assert found.pop("references") == 0
        assert set(found.values()) == {1}, found


def past_torch(me: Me) -> tuple[list[str], list[bool]]:
    me.init()
    net = layers(1)
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    kept = net[0].weight
    script: Any = cast(Any, torch.jit).trace(net, torch.ones(1, 400))
    readings: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda each: each.square().sum())(kept),
        lambda: torch._C._to_dlpack(kept),
        lambda: script(torch.ones(1, 400)),
    ]
    errors = []
    same = []
    for reading in readings:
        passed(net, optimizer)
        with pytest.raises(RuntimeError) as caught:
            reading()
        errors.append(str(caught.value))
        optimizer.synchronize()
        reading()
        same.append(torch.equal(script(torch.ones(1, 400)), net(torch.ones(1, 400))))
    return errors, same


def test_what_reads_past_torchs_functions_gets_an_error_with_the_cure(launch: Launch) -> None:
    for errors, same in launch(past_torch, 2).results():
        assert all("call synchronize() of its DistributedOptimizer" in error for error in errors)
        assert same == [True] * 3


class Linear(torch.autograd.Function):
    """As an extension in C++ does it, which torch's Python functions do not see."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        with torch._C.DisableTorchFunctionSubclass():
            return values @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient.t() @ ctx.saved_tensors[0]


def trained_by_functions(me: Me) -> list[Tensors]:
    me.init()
    found = []
    for name in ("linear", "apply"):
        net = layers(1)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.05), net)
        weight = net[0].weight
        apply: Any = getattr(nn.functional if name == "linear" else Linear, name)
        for step in range(STEPS):
            optimizer.zero_grad()
            values = torch.full((1, 400), 1.0 + me.rank + step)
            apply(values, weight).square().sum().mul(1e-3).backward()
            optimizer.step()
        found.append([weight.detach().clone()])
        optimizer.close()
    return found


def test_a_function_of_autograd_is_applied_to_what_the_step_has_made(launch: Launch) -> None:
    for (theirs,), (ours,) in launch(trained_by_functions, 2).results():
        assert torch.equal(theirs, ours)


class Noting(TorchDispatchMode):
    """What checkpoints do that choose what to compute again: they look at all that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        del types
        self.seen.add(str(function))
        return function(*args, **(keywords or {}))


def under_a_mode(me: Me) -> set[str]:
    me.init()
    net = layers()
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    passed(net, optimizer)
    batch = torch.ones(1, 400)
    noting = Noting()
    with torch.no_grad(), noting:
        net(batch)
    return noting.seen


def test_a_step_is_no_part_of_the_forward_pass_that_waits_for_it(launch: Launch) -> None:
    for seen in launch(under_a_mode, 2).results():
        assert seen == {"aten.t.default", "aten.mm.default"}


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "grad": lambda net, x: torch.func.grad(lambda y: net(y).sum())(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,))[1].detach(),
    "vmap": lambda net, x: torch.func.vmap(net)(x).detach(),
    "another device": lambda net, x: with_a_default_device(net, x),
}


def with_a_default_device(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.device("meta"):
        out: torch.Tensor = net(x).detach()
    return out


def under_transforms(me: Me) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What the forward pass gives that waits for the step, and what it gives after."""
    me.init()
    found = {}
    for name, transform in TRANSFORMS.items():
        net = layers()
        optimizer = DistributedOptimizer(optim.AdamW(net.parameters(), lr=1e-3), net)
        batch = torch.ones(2, 400)
        for _ in range(2):
            passed(net, optimizer)
            found[name] = transform(net, batch), transform(net, batch)
        optimizer.close()
    return found


def test_a_step_is_no_part_of_a_transform(launch: Launch) -> None:
    for found in launch(under_transforms, 2).results():
        for name, (waited, after) in found.items():
            assert torch.equal(waited, after), name


def closed(me: Me) -> None:
    me.init()
    net = layers()
    before = [
        (type(each), type(each._parameters), dict(each._forward_pre_hooks))
        for each in net.modules()
    ]
    memory = [each.data_ptr() for each in net.parameters()]
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    passed(net, optimizer)
    optimizer.close()
    after = [
        (type(each), type(each._parameters), dict(each._forward_pre_hooks))
        for each in net.modules()
    ]
    assert after == before
    assert {type(each) for each in net.parameters()} == {nn.Parameter}
    assert [each.data_ptr() for each in net.parameters()] == memory
    assert not any(each._post_accumulate_grad_hooks for each in net.parameters())


def test_a_closed_optimizer_leaves_the_model_as_it_was(launch: Launch) -> None:
    launch(closed, 2).results()


def compiled(me: Me, how: str) -> tuple[float, int]:
    """Returns how far parameters are from those of DDP, and how often a program was compiled."""
    me.init("fanin")
    found = []
    compilations = []

    def compiler(graph: Any, inputs: Any) -> Any:
        del inputs
        compilations.append(graph)
        return graph.forward

    for overlapped in (False, True):
        net: Any = nn.Sequential(layers(2), nn.BatchNorm1d(400), layers(1))
        model: Any = net
        optimizer: Any = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if not overlapped:
            model = DistributedDataParallel(net)
        elif how == "late":
            optimizer = DistributedOptimizer(optimizer, net)
        elif how == "in place":
            net.compile(backend=compiler)
            optimizer = DistributedOptimizer(optimizer, net)
        elif how == "given":
            model = torch.compile(net, backend=compiler)
            optimizer = DistributedOptimizer(optimizer, model)
        elif how == "a part":
            net[0] = torch.compile(net[0], backend=compiler)
            optimizer = DistributedOptimizer(optimizer, net)
        for step in range(5):
            if how == "late" and overlapped and step == 2:
                assert optimizer._pending
                model = torch.compile(net, backend=compiler)
            optimizer.zero_grad()
            batch = torch.arange(800.0).reshape(2, 400) + me.rank + step
            model(batch).square().sum().mul(1e-3).backward()
            optimizer.step()
            if overlapped and how == "a part":
                assert len(optimizer._sender.read) == 2, "the other layers wait"
        found.append([each.detach().clone() for each in net.parameters()])
    off = max((x - y).abs().max().item() for x, y in zip(*found, strict=True))
    return off, len(compilations)


@pytest.mark.parametrize("how", ["given", "in place", "a part", "late"])
def test_compiled_programs_train_as_ddp_does_and_are_compiled_once(
    launch: Launch, how: str
) -> None:
    for off, compilations in launch(compiled, 2, how).results():
        assert off == 0.0
        assert compilations == 1


def averaged_by_a_compiled_function(me: Me) -> tuple[bool, int]:
    me.init("fanin")
    net = layers()
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1e-3), net)
    kept = list(net.parameters())
    means = [[each.detach().clone() for each in kept] for _ in range(2)]
    compilations = []

    def compiler(graph: Any, inputs: Any) -> Any:
        del inputs
        compilations.append(graph)
        return graph.forward

    @torch.no_grad()
    def average(mean: Tensors, parameters: Tensors) -> None:
        torch._foreach_lerp_(mean, parameters, 0.1)

    fast = torch.compile(average, backend=compiler)
    for _ in range(5):
        passed(net, optimizer)
        fast(means[0], kept)
        average(means[1], kept)
    same = all(torch.equal(x, y) for x, y in zip(*means, strict=True))
    return same, len(compilations)


def test_a_compiled_function_that_is_given_parameters_reads_the_last_step(launch: Launch) -> None:
    for same, compilations in launch(averaged_by_a_compiled_function, 2).results():
        assert same
        assert compilations == 1


def begun(me: Me) -> tuple[int, bool]:
    me.init()
    net: Any = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(40)).double()
    net.extend(nn.Linear(4 + number, 4) for number in range(40))
    net[79].weight.requires_grad_(False)
    torch.manual_seed(me.rank)
    for each in net.parameters():
        nn.init.uniform_(each)
    broadcasts = []
    backend: Any = FaninBackend
    original = backend.broadcast

    def counted(self: Any, *rest: Any) -> Any:
        broadcasts.append(self)
        return original(self, *rest)

    backend.broadcast = counted
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
    backend.broadcast = original
    # Not those of the default group, in which the ranks agree on a name for the optimizer's.
    its_own = broadcasts.count(backend_of(optimizer.process_group))
    values = torch.cat([each.detach().flatten().double() for each in net.state_dict().values()])
    of_rank_0 = values.clone()
    dist.broadcast(of_rank_0, 0)
    return its_own, torch.equal(values, of_rank_0)


def test_all_begin_alike_after_few_broadcasts(launch: Launch) -> None:
    for broadcasts, alike in launch(begun, 2).results():
        assert alike
        # A broadcast for each dtype of trained tensors (two), and of others (three).
        assert broadcasts == 5


class Device:
    """A stand-in whose host runs ahead: each gradient takes 1,000 s, once the host has all."""

    def __init__(self) -> None:
        self.computing = Stream()
        self.devices: list[Any] = []
        self.time = 0.0

    def stop(self) -> None:
        """Stop it once it has done all that it was given."""
        self.computing.enqueue(None).wait()
        self.computing.stop()

    def now(self, device: torch.device) -> Mark:
        del device

        def compute() -> None:
            self.time += 1000.0
            mark.at = self.time  # type: ignore[attr-defined]

        mark = self.computing.enqueue(compute)
        for each in self.devices:
            each.producer = mark
        return mark

    def seconds(self, noted: Sequence[tuple[torch.device, Any]]) -> list[float]:
        for _, mark in noted:
            mark.wait()
        return [mark.at for _, mark in noted]


def on_a_device(me: Me) -> tuple[list[int], int, list[bool]]:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        device.devices = plug_in(patch)
        patch.setattr(device_clock, "now", device.now)
        patch.setattr(device_clock, "seconds", device.seconds)
        me.init()
        net = layers(4)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net)
        ahead = []
        for _ in range(3):
            optimizer.zero_grad()
            device.stop()
            before = device.time
            net(torch.ones(1, 400)).sum().backward()
            ahead.append(device.time == before)
            device.computing.go()
            optimizer.step()
        optimizer.synchronize()
        return optimizer._sender._order, len(optimizer._sender._partitions), ahead


def test_the_order_is_by_the_devices_clock_and_not_by_when_the_host_has_asked(
    launch: Launch,
) -> None:
    for order, partitions, ahead in launch(on_a_device, 2).results():
        assert ahead == [True] * 3
        # Each sum is through before the next gradient is there: nothing may overtake.
        assert order == list(range(partitions))
