"""Training that waits for no gradient before its layer needs it: as with DDP, to the bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch import DistributedOptimizer, Options
from fanin.torch.optimizers import send_order
from fanin.torch.optimizers.partitions import pieces
from fanin.torch.optimizers.send_order import Partition, Sent
from ranks import Failure, Me, sums_on_switch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 6

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda of: optim.SGD(of, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda of: optim.AdamW(of, lr=0.01),
}


class Net(nn.Module):
    """Of many kinds: small and large layers, a shared weight, one that its module does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(32, 5000), nn.Tanh(), nn.Linear(5000, 32))
        self.norm = nn.BatchNorm1d(32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.recurrent(x)[0]
        x = self.norm(self.wide(x).mean(1))
        out: torch.Tensor = self.head(self.branches[branch](x))
        return out


def batches(me: Me) -> Any:
    dice = torch.Generator().manual_seed(me.rank)
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (8, 5), generator=dice, device="cpu")
        tokens = tokens.to(torch.get_default_device())
        # The ranks never agree, and nobody ever uses the last branch.
        yield tokens, tokens[:, 0], (me.rank + step) % 2


def trained(me: Me, kind: str, overlapped: bool, passes: str = "one") -> Any:
    torch.manual_seed(me.rank if overlapped else 0)  # all begin with rank 0's
    net = Net()
    model: Any = net
    optimizer: Any = OPTIMIZERS[kind](net.parameters())
    if overlapped:
        optimizer = DistributedOptimizer(optimizer, net)
    else:
        model = DistributedDataParallel(
            net, find_unused_parameters=True, forward_sync_buffers=False
        )
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for tokens, labels, branch in batches(me):

        def backward(tokens: Any = tokens, labels: Any = labels, branch: int = branch) -> Any:
            loss: Any = nn.functional.cross_entropy(model(tokens, branch), labels)
            loss.backward()

        optimizer.zero_grad()
        if passes == "added up":
            with (optimizer if overlapped else model).no_sync():
                backward()
        elif passes == "two":
            backward()
        backward()
        if passes == "clipped":
            if overlapped:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    state = optimizer.state_dict()
    if overlapped:
        assert sums_on_switch(optimizer._sums) > STEPS * len(optimizer._sender.pieces)
    return [each.detach().clone() for each in net.parameters()], state


def on_both(me: Me, kind: str, wire_dtype: Any, passes: str) -> Any:
    me.init("fanin", pg_options=Options(wire_dtype=wire_dtype))
    return trained(me, kind, False, passes), trained(me, kind, True, passes)


def differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("kind", "wire_dtype", "passes", "bound"),
    [
        ("sgd", None, "one", 0.0),
        ("adamw", None, "one", 0.0),
        ("sgd", "shared_exponent", "one", 1e-6),
        ("sgd", None, "clipped", 0.0),
        # DDP averages again what it has averaged, and here it is summed again: in other roundings.
        ("sgd", None, "two", 1e-6),
        # DDP counts a parameter as used only if the last pass has used it.
        ("sgd", None, "added up", 1e-6),
    ],
)
def test_parameters_are_those_of_ddp(
    launch: Launch, kind: str, wire_dtype: Any, passes: str, bound: float
) -> None:
    found = launch(on_both, 3, kind, wire_dtype, passes).results()
    for (ddp, their_state), (ours, state) in found:
        assert differences(ours, found[0][1][0]) == 0, "on all ranks"
        assert differences(ours, ddp) <= bound
        assert state["param_groups"] == their_state["param_groups"]
        assert state["state"].keys() == their_state["state"].keys()


def in_another_order(me: Me) -> Any:
    me.init("fanin")
    if me.rank == 0:
        # The order that the other ranks see does not matter: rank 0's counts.
        send_order.order = lambda partitions, *_: (
            list(range(0, len(partitions), 2)) + list(range(1, len(partitions), 2))
        )
    return trained(me, "sgd", False), trained(me, "sgd", True)


def test_all_send_in_the_order_of_rank_0(launch: Launch) -> None:
    for (ddp, _), (ours, _) in launch(in_another_order, 3).results():
        assert differences(ours, ddp) == 0


class Layers(nn.Sequential):
    """Each a piece of its own."""

    def __init__(self, layers: int = 3) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(400, 400, bias=False) for _ in range(layers)))


def plain(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=1.0)


class NotThere:
    """Of a sum that has not come."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise KeyError("somebody waits")


def one_late(me: Me) -> Any:
    me.init()
    net = Layers()
    optimizer = DistributedOptimizer(plain(net), net)
    before = [each.detach().clone() for each in net.parameters()]
    if me.rank == 1:
        me.hear()
    net(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    me.say("stepped")
    later = optimizer._sender.pieces[2]
    works = later.works
    later.works = [NotThere()]
    out = net[1](net[0](torch.ones(1, 400)))
    raised(KeyError, lambda: net[2](out))
    later.works = works
    return [bool((x != y).any()) for x, y in zip(net.parameters(), before, strict=True)]


def test_a_step_waits_for_nothing_and_a_layer_for_its_own_sum_alone(launch: Launch) -> None:
    ranks = launch(one_late, 2)
    assert ranks.hear(0) == "stepped"
    ranks.tell(1, "begin")
    assert ranks.hear(1) == "stepped"
    assert ranks.results() == [[True] * 3] * 2


READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda net, _: net[0].weight,
    "parameters": lambda net, _: next(net.parameters()),
    "state": lambda net, _: net.state_dict()["0.weight"],
    "state of a layer": lambda net, _: net[0].state_dict()["weight"],
    "copy": lambda net, _: copy.deepcopy(net)[0].weight,
    "synchronize": lambda net, optimizer: (optimizer.synchronize(), net.kept)[1],
    "state of the optimizer": lambda net, optimizer: (optimizer.state_dict(), net.kept)[1],
}


def read(me: Me) -> Any:
    me.init()
    found = {}
    net: Any = Layers(1)
    optimizer = DistributedOptimizer(plain(net), net)
    object.__setattr__(net, "kept", net[0].weight)
    for name, reading in READINGS.items():
        before = net[0].weight.detach().clone()
        optimizer.zero_grad()
        net(torch.full((1, 400), float(me.rank))).sum().backward()
        optimizer.step()
        not_yet = len(optimizer._pending) == 1
        found[name] = not_yet, reading(net, optimizer) - before
    return found


def test_whoever_reads_a_parameter_reads_it_after_its_step(launch: Launch) -> None:
    for found in launch(read, 2).results():
        for name, (not_yet, change) in found.items():
            assert not_yet, name
            torch.testing.assert_close(change, torch.full_like(change, -0.5), msg=name)


class Growing(nn.Module):
    """Of one layer, and then of two; another is trained from some step on alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.second: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.frozen(self.first(x)))
        return out


def growing(me: Me) -> Any:
    me.init()
    net = Growing()
    optimizer = DistributedOptimizer(plain(net), net)
    alone = Growing()
    others = plain(alone)
    for step in range(7):
        if step == 2:
            torch.manual_seed(me.rank)
            net.second = nn.Linear(4, 4)
            optimizer.add_param_group({"params": net.second.parameters(), "lr": 0.1})
            alone.second = copy.deepcopy(net.second)
            for each in alone.second.parameters():
                dist.broadcast(each.detach(), 0)
            others.add_param_group({"params": alone.second.parameters(), "lr": 0.1})
        if step == 4:
            net.frozen.requires_grad_(True)
            alone.frozen.requires_grad_(True)
            net.first.requires_grad_(False)
            alone.first.requires_grad_(False)
        for model, stepped in ((net, optimizer), (alone, others)):
            stepped.zero_grad()
            model(torch.full((1, 4), me.rank + 1.0)).square().sum().backward()
            if model is alone:
                for each in alone.parameters():
                    if each.grad is not None:
                        dist.all_reduce(each.grad, op=dist.ReduceOp.AVG)
            stepped.step()
    return differences(
        [each.detach() for each in net.parameters()],
        [each.detach() for each in alone.parameters()],
    )


def test_parameters_may_come_later_and_be_frozen_and_not(launch: Launch) -> None:
    assert max(launch(growing, 2).results()) <= 1e-6


def closures_and_hooks(me: Me) -> Any:
    me.init()
    net: Any = Layers(1)
    optimizer = DistributedOptimizer(plain(net), net)

    def closure() -> float:
        optimizer.zero_grad()
        loss: Any = net(torch.ones(1, 400)).sum()
        loss.backward()
        return float(loss)

    first = optimizer.step(closure)
    second = optimizer.step(closure)
    calls: list[bool] = []
    before = net[0].weight.detach().clone()
    kept = net[0].weight
    optimizer.register_step_post_hook(lambda *_: calls.append(bool((kept != before).any())))
    third = optimizer.step(closure)
    # Gradients that no pass has made are sent by the step.
    optimizer.zero_grad()
    if me.rank == 0:
        kept.grad = torch.ones_like(kept)
    before = kept.detach().clone()
    optimizer.step()
    return [first - second, second - third], calls, float((kept - before).mean())


def test_closures_hooks_and_gradients_of_ones_own(launch: Launch) -> None:
    for fell, calls, changed in launch(closures_and_hooks, 2).results():
        assert fell == pytest.approx([400.0 * 400.0] * 2, rel=1e-3)
        assert calls == [True, True]
        assert changed == pytest.approx(-0.5)


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def refused(me: Me) -> dict[str, str]:
    me.init()
    net = nn.Linear(2, 2)
    wrapped = DistributedDataParallel(net)
    gloo: Any = dist.new_group(backend="gloo")
    parts: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    found = {
        "gloo": raised(ValueError, lambda: DistributedOptimizer(plain(net), net, gloo)),
        "ddp": raised(ValueError, lambda: DistributedOptimizer(plain(net), wrapped)),
        "part in ddp": raised(
            ValueError, lambda: DistributedOptimizer(plain(net), nn.Sequential(nn.ReLU(), wrapped))
        ),
        "fsdp": raised(
            ValueError, lambda: DistributedOptimizer(plain(net), nn.Sequential(Sharded()))
        ),
        "fsdp2": raised(ValueError, lambda: DistributedOptimizer(plain(parts), parts)),
        "lbfgs": raised(
            ValueError, lambda: DistributedOptimizer(optim.LBFGS(net.parameters()), net)
        ),
        "foreign": raised(
            ValueError, lambda: DistributedOptimizer(plain(Layers(1)), nn.Linear(2, 2))
        ),
        "shapes": raised(
            ValueError, lambda: (n := nn.Linear(1 + me.rank, 2), DistributedOptimizer(plain(n), n))
        ),
    }
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = DistributedOptimizer(plain(table), table)
    found["sparse"] = raised(ValueError, lambda: table(torch.tensor([1])).sum().backward())

    clipped = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(plain(clipped), clipped)
    clipped(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
    found["clipped"] = raised(RuntimeError, optimizer.step)

    scaled = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(plain(scaled), scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(scaled(torch.ones(1, 2)).sum()).backward()
    found["scaled"] = raised(RuntimeError, lambda: scaler.step(optimizer))

    twice = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(plain(twice), twice)
    found["twice"] = raised(ValueError, lambda: DistributedOptimizer(optimizer, twice))
    twice.double()
    double = torch.ones(1, 2, dtype=torch.float64)
    found["double"] = raised(ValueError, lambda: twice(double).sum().backward())

    writing = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(Writing(writing.parameters(), lr=1.0), writing)
    writing(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found["writing"] = raised(RuntimeError, lambda: writing.weight.sum())

    closed = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(plain(closed), closed)
    optimizer.close()
    optimizer.close()
    closed(torch.ones(1, 2)).sum().backward()
    found["closed"] = raised(RuntimeError, optimizer.step)

    past = nn.Linear(2, 2, bias=False)
    optimizer = DistributedOptimizer(plain(past), past)
    kept: Any = past.weight
    older = kept.sum()
    older.backward(retain_graph=True)
    optimizer.step()
    found["past"] = raised(RuntimeError, older.backward)

    failing: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = DistributedOptimizer(plain(failing), failing)
    handle = failing[0].weight.register_hook(fail)
    found["hook"] = raised(KeyError, lambda: failing(torch.ones(1, 2)).sum().backward())
    handle.remove()
    found["step"] = raised(RuntimeError, optimizer.step)
    found["again"] = raised(RuntimeError, lambda: failing(torch.ones(1, 2)).sum().backward())
    return found


class Sharded(FullyShardedDataParallel):
    """One on a machine without an accelerator, where there is none."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(2, 2)


class Writing(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2


def fail(_: Any) -> None:
    raise KeyError("a hook of the program's")


REFUSED = {
    "gloo": "backend is gloo, and not fanin",
    "ddp": "give the model itself",
    "part in ddp": "1 is in DistributedDataParallel.*give the model itself",
    "fsdp": "0 is in FullyShardedDataParallel.*train with the optimizer as it is",
    "fsdp2": "weight is a DTensor.*train with the optimizer as it is",
    "lbfgs": "LBFGS",
    "foreign": "1 of the optimizer's parameters are not the model's",
    "shapes": "rank 1 has 2 parameters",
    "sparse": "gradient of weight is sparse.*sparse=False",
    "clipped": r"gradient of weight was changed.*call synchronize\(\)",
    "scaled": r"synchronize\(\) before scaler.unscale_\(\) and scaler.step",
    "twice": "DistributedOptimizer has made the optimizer already",
    "double": r"gradient of \w+ is torch.float64 on cpu, and was to be torch.float32.*before",
    "writing": r"Writing writes to its settings in a step \(lr\)",
    "closed": "is closed",
    "past": r"older than the last step.*gradient of weight.*synchronize\(\)",
    "hook": "a hook of the program's",
    "step": "has failed",
    "again": "came twice",
}


def test_what_cannot_be_is_said(launch: Launch) -> None:
    for found in launch(refused, 2).results():
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert re.search(text, found[name]), found[name]


def test_without_a_group() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedOptimizer(plain(net), net)


def other_ends(me: Me, how: str) -> str:
    me.init()
    net: Any = Layers()
    optimizer = DistributedOptimizer(plain(net), net)
    if me.rank == 1 and how == "hook":
        net[1].weight.register_hook(fail)
    for _ in range(2):
        optimizer.zero_grad()
        if me.rank == 0:
            me.say("next")
            me.hear()
        if me.rank == 1 and how == "killed":
            me.say("kill")
            me.hear()
        try:
            net(torch.ones(1, 400)).sum().backward()
            optimizer.step()
        except errors.FaninError as error:
            return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("how", ["killed", "hook"])
def test_a_rank_that_fails_ends_the_training_of_all(launch: Launch, how: str) -> None:
    ranks = launch(other_ends, 2, how)
    assert ranks.hear(0) == "next"
    if how == "killed":
        assert ranks.hear(1) == "kill"
        ranks.kill(1)
    else:
        failure = ranks.outcome(1)
        assert isinstance(failure, Failure)
        assert failure.kind == "KeyError", failure.text
    ranks.tell(0, "first step")
    if ranks.next(0) == ("said", "next"):
        ranks.tell(0, "second step, which waits for the first one's sums")
        kind, value = ranks.next(0)
    assert (kind, value) in {("ended", "RankLost"), ("ended", "RankLeft")}


# Four layers of 10 bytes, whose gradients come from the last one (0) on, one a second.
BACKWARD = [Partition(float(i), 3 - i, 10) for i in range(4)]


def test_on_a_fast_network_gradients_go_as_they_come() -> None:
    assert send_order.order(BACKWARD, 0.01) == [0, 1, 2, 3]


def test_on_a_slow_network_the_first_layers_overtake() -> None:
    # When the last layer is through all others are there, and the first one goes next.
    assert send_order.order(BACKWARD, 0.3) == [0, 3, 2, 1]
    # When the second one is through, after three seconds, the last two are both there.
    assert send_order.order(BACKWARD, 0.15) == [0, 1, 3, 2]


def test_the_first_layers_are_packed_in_the_smallest_packs() -> None:
    """4 KB each: in the order of the forward pass, none twice, up to partitions of 512 KiB."""
    parameters = [torch.zeros(1024) for _ in range(600)]
    made = list(pieces(parameters))
    assert [len(piece.parameters) for piece in made] == [4, 8, 16, 32, 64, 128, 128, 128, 92]
    assert [parameter for piece in made for parameter in piece.parameters] == parameters
    assert {len(piece.partitions) for piece in made} == {1}


def test_what_is_longer_than_a_pack_is_alone() -> None:
    made = list(pieces([torch.zeros(length) for length in (5000, 8, 300_000, 8, 8)]))
    lengths = [[each.numel() for each in piece.parameters] for piece in made]
    assert lengths == [[5000], [8], [300_000], [8, 8]]
    assert [len(piece.partitions) for piece in made] == [1, 1, 3, 1]


def test_every_partition_is_sent_once() -> None:
    dice = torch.Generator().manual_seed(1)
    for seed in range(50):
        draw = torch.randint(0, 20, (12, 3), generator=dice).tolist()
        partitions = [Partition(a / 10, b, c) for a, b, c in draw]
        chosen = send_order.order(partitions, seed / 100)
        assert sorted(chosen) == list(range(12))


def test_a_bytes_time_is_measured_where_one_partition_follows_another() -> None:
    assert send_order.seconds_a_byte([Sent(0.0, 2.0, 2)]) == 1.0
    # The first one waited for a rank that was late.
    sent = [Sent(0.0, 9.0, 1), Sent(1.0, 10.0, 2), Sent(2.0, 11.0, 2)]
    assert send_order.seconds_a_byte(sent) == 0.5


def test_the_order_is_made_anew_ever_less_often() -> None:
    learned = [number for number in range(260) if send_order.is_learned(number)]
    assert learned == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
