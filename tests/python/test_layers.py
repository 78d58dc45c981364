"""Layers of a model in packets: the class selectors that a capture on the loopback sees."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import fanin.horovod as hvd
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import _fanin, _layers
from fanin.horovod.world import world
from fanin.torch.backend.options import Options
from fanin.torch.hooks.bucket_layers import BucketLayers
from ranks import Me, Ranks
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

PRIORITIES = 7
BOUND = 0.02
# DLCP's data (crates/wire/src/preamble.rs), at this byte of a packet.
BLOCK, KIND_AT = 11, 3
IPV4, UDP, UDP_HEADER_BYTES = 0x0800, 17, 8
# Of gradients without a layer (docs/operations.md).
FIRST = 6

needs_capture = pytest.mark.skipif(os.geteuid() != 0, reason="to capture packets one is root")


class Capture:
    """The class selectors of DLCP's blocks on the loopback, to a switch and back from it."""

    def __init__(self, switch: str) -> None:
        self._port = int(switch.rpartition(":")[2])
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(IPV4))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        self._socket.bind(("lo", IPV4))
        self._socket.setblocking(False)

    def classes(self) -> tuple[set[int], set[int]]:
        """Return those to the switch and those from it, since the last call."""
        there: set[int] = set()
        back: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = self._socket.recv(128)
                udp = packet[(packet[0] & 0xF) * 4 :]
                kind_at = UDP_HEADER_BYTES + KIND_AT
                if packet[9] != UDP or udp[kind_at : kind_at + 1] != bytes([BLOCK]):
                    continue
                ports = [int.from_bytes(udp[at : at + 2], "big") for at in (0, 2)]
                for port, way in zip(ports, (back, there), strict=True):
                    if port == self._port:
                        way.add(packet[1] >> 5)
        return there, back


def classes(layers: set[_layers.Layer]) -> set[int]:
    """Return the class selectors of layers."""
    return {FIRST - index * PRIORITIES // count for index, count in layers}


def watched(me: Me, steps: int, step: Callable[[int], None]) -> list[tuple[set[int], set[int]]]:
    """Return what each step sends; no rank begins one before all have seen the one before."""
    capture = Capture(me.switch)
    found = []
    for number in range(steps):
        step(number)
        me.say("done")
        me.hear()
        found.append(capture.classes())
        me.say("seen")
        me.hear()
    return found


def seen(ranks: Ranks, steps: int) -> list[tuple[set[int], set[int]]]:
    for _ in range(2 * steps):
        for rank in range(ranks.world_size):
            ranks.hear(rank)
        for rank in range(ranks.world_size):
            ranks.tell(rank, "go on")
    found = ranks.results()
    assert all(each == found[0] for each in found)
    return cast(list[tuple[set[int], set[int]]], found[0])


def arrays(me: Me) -> Any:
    with fanin.connect(
        me.switch,
        job="priorities",
        rank=me.rank,
        world_size=me.world_size,
        loss_bound=BOUND,
        plan="switch",
    ) as group:
        gradient = np.ones(100_000, dtype=np.float32)
        return watched(me, PRIORITIES, lambda step: _all_reduce(group, gradient, step))


def _all_reduce(group: fanin.Group, gradient: Any, step: int) -> None:
    group.all_reduce(gradient, priority=step)


@needs_capture
def test_each_priority_is_a_class_of_its_own_both_ways(launch: Launch) -> None:
    found = seen(launch(arrays, 2), PRIORITIES)
    assert found == [({FIRST - number}, {FIRST - number}) for number in range(PRIORITIES)]


def tensors(me: Me) -> Any:
    me.init(pg_options=Options(loss_bound=BOUND, plan="switch"))
    gradient = torch.ones(100_000)

    def step(number: int) -> None:
        if number == 0:
            dist.all_reduce(gradient)
            return
        with fanin.torch.priority(number):
            work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        work.wait()

    return watched(me, 3, step)


@needs_capture
def test_torchs_collectives_have_the_priority_in_which_they_begin(launch: Launch) -> None:
    found = seen(launch(tensors, 2), 3)
    assert found == [({FIRST - number}, {FIRST - number}) for number in range(3)]


def net() -> Any:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


def ddp(me: Me) -> Any:
    me.init("gloo")
    # Each layer is a bucket or two.
    model = DistributedDataParallel(net(), bucket_cap_mb=0.3)
    state = fanin.torch.HookState(loss_bound=BOUND, plan="switch")
    model.register_comm_hook(state, fanin.torch.allreduce_hook)

    def step(number: int) -> None:
        model(torch.full((1, 300), 1.0 + number)).sum().backward()

    found = watched(me, 4, step)
    state.close()
    return found


@needs_capture
def test_the_buckets_of_ddp_have_unlike_classes_from_the_front_to_the_back(launch: Launch) -> None:
    first, *_, last = seen(launch(ddp, 2), 4)
    # How many buckets there are, the end of the first pass says.
    assert first == ({FIRST}, {FIRST})
    expected = [classes({(index, count) for index in range(count)}) for count in range(4, 9)]
    assert last[0] == last[1]
    assert last[0] in expected


def optimizer(me: Me) -> Any:
    me.init(pg_options=Options(loss_bound=BOUND, plan="switch"))
    model = net()
    made = fanin.torch.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)

    def step(number: int) -> None:
        made.zero_grad()
        model(torch.full((1, 300), 1.0 + number)).sum().backward()
        made.step()
        made.synchronize()

    found = watched(me, 2, step)
    layers = {layer for layer, _ in made._sender._treated.values()}
    made.close()
    return [(there, back, layers) for there, back in found]


def ddp_with_a_priority(me: Me) -> Any:
    me.init("gloo")
    model = DistributedDataParallel(net(), bucket_cap_mb=0.3)

    def priority(parameters: Sequence[torch.Tensor]) -> int:
        return 2 if any(each is model.module[0].weight for each in parameters) else 4

    state = fanin.torch.HookState(
        loss_bound=BOUND, plan="switch", priority_of=priority, loss_bound_of=lambda _: 0.0
    )
    model.register_comm_hook(state, fanin.torch.allreduce_hook)

    def step(_: int) -> None:
        model(torch.ones(1, 300)).sum().backward()

    found = watched(me, 2, step)
    state.close()
    return found


@needs_capture
def test_a_function_says_the_priority_of_a_bucket(launch: Launch) -> None:
    # In its first pass DDP has one bucket.
    assert seen(launch(ddp_with_a_priority, 2), 2) == [({4}, {4}), ({2, 4}, {2, 4})]


@needs_capture
def test_the_distributed_optimizer_knows_the_layers_from_the_first_pass_on(launch: Launch) -> None:
    for there, back, layers in cast(Any, seen(launch(optimizer, 2), 2)):
        assert {count for _, count in layers} == {8}
        assert len(classes(layers)) >= 4
        # Who has used a parameter has no layer.
        assert there == back == classes(layers) | {FIRST}


def groups_of_parameters(me: Me) -> Any:
    me.init(pg_options=Options(loss_bound=BOUND))
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": list(model[:2].parameters()), "loss_bound": 0.0, "priority": 5},
        {"params": list(model[2:].parameters())},
    ]
    made = fanin.torch.DistributedOptimizer(optim.SGD(groups, lr=0.1), model)
    found = set(made._sender._treated.values())
    made.close()
    for wrong in ({"priority": 7}, {"loss_bound": 1.0}):
        with pytest.raises(ValueError, match="|".join(wrong)):
            fanin.torch.DistributedOptimizer(
                optim.SGD([{"params": model.parameters(), **wrong}], lr=0.1), model
            )
    return found


def test_groups_of_parameters_may_say_a_bound_and_a_priority(launch: Launch) -> None:
    (found,) = launch(groups_of_parameters, 1).results()
    assert {bound for layer, bound in found if layer == (5, 7)} == {0.0}
    others = {(layer, bound) for layer, bound in found if layer != (5, 7)}
    assert others
    assert others <= {((place, 8), BOUND) for place in range(4, 8)}


def horovod(me: Me) -> Any:
    os.environ |= {"FANIN_LOSS_BOUND": str(BOUND), "FANIN_PLAN": "switch"}
    hvd.init()

    def step(number: int) -> None:
        with fanin.torch.priority(2 * number):
            hvd.allreduce(torch.ones(100_000), name=f"step.{number}")

    found = watched(me, 3, step)
    hvd.shutdown()
    return found


@needs_capture
def test_horovods_collectives_have_the_priority_in_which_they_are_asked_for(launch: Launch) -> None:
    ranks = launch(horovod, 2)
    for _ in range(6):
        for rank in range(2):
            ranks.hear(rank)
        for rank in range(2):
            ranks.tell(rank, "go on")
    for found in ranks.results():
        # Engines say now and then that they are there.
        assert [there | {FIRST} for there, _ in found] == [{FIRST, FIRST - 2 * n} for n in range(3)]
        assert all(FIRST - 2 * number in there for number, (there, _) in enumerate(found))


def test_horovods_optimizer_asks_for_each_gradient_as_of_its_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    try:
        engine = world().engine
        asked: dict[str, Any] = {}
        submit = engine.submit

        def noted(request: Any, *args: Any, **keywords: Any) -> Any:
            asked[request.name] = request.layer
            return submit(request, *args, **keywords)

        monkeypatch.setattr(engine, "submit", noted)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        made = hvd.DistributedOptimizer(
            optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        model(torch.ones(1, 4)).sum().backward()
        made.step()
        assert asked == {f"{place}.weight": (place, 3) for place in range(3)}
    finally:
        hvd.shutdown()


@dataclass
class Bucket:
    """A bucket as DDP hands it to a hook."""

    number: int
    of: list[torch.Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[torch.Tensor]:
        return self.of

    def is_last(self) -> bool:
        return self.last


def test_buckets_of_models_that_take_turns_have_their_own_models_layers() -> None:
    layers = BucketLayers()

    def passed(model: list[list[torch.Tensor]]) -> list[Any]:
        end = len(model) - 1
        return [
            layers.of(cast(Any, Bucket(number, of, number == end)))
            for number, of in enumerate(model)
        ]

    one, other = ([[torch.ones(1)] for _ in range(count)] for count in (3, 2))
    assert passed(one) == [None] * 3
    assert passed(other) == [None] * 2
    assert passed(one) == [(2, 3), (1, 3), (0, 3)]
    assert passed(other) == [(1, 2), (0, 2)]
    # A model whose buckets are made anew: one that was there, and others.
    made_anew = [one[0], *([torch.ones(1)] for _ in range(3))]
    assert passed(made_anew) == [(2, 3), None, None, None]
    assert passed(made_anew) == [(3, 4), (2, 4), (1, 4), (0, 4)]


def test_what_is_sent_together_goes_with_the_first_of_it() -> None:
    assert _layers.foremost([(3, 4), (1, 8), (2, 4)]) == (1, 8)
    assert _layers.foremost([(3, 4), None]) is None
    assert _layers.foremost([]) is None


def test_a_priority_or_a_layer_that_there_is_not_is_refused(switch: str) -> None:
    assert _fanin.priorities == PRIORITIES
    with fanin.connect(switch, job="alone", rank=0, world_size=1) as group:
        for wrong in (-1, PRIORITIES, 1.5, "front"):
            with pytest.raises(ValueError, match="from 0, which goes first, to 6"):
                group.all_reduce(np.ones(3, np.float32), priority=cast(Any, wrong))
        numbers = np.ones(3, np.float32)
        part, keep = (numbers.ctypes.data, numbers.size), numbers
        with pytest.raises(ValueError, match="layer 3 of 3: layers count from 0"):
            group.client.submit([part], "float32", "all_reduce", 0, False, keep, False, (3, 3))
        # So long a model is told of in fewer layers.
        longest = (99_999, 100_000)
        group.client.submit([part], "float32", "all_reduce", 0, False, keep, False, longest).wait()
    with pytest.raises(ValueError, match="priority 7"), fanin.torch.priority(PRIORITIES):
        pass
    assert _layers.current() is None
