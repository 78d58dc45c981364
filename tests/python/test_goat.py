"""GOAT under PyTorch: racks, a root that plans for them, and each of them that goes away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess, switch_here
from ranks import Me
from test_atp import (
    TINY,
    large,
    metrics,
    metrics_are_right,
    sums,
    sums_are_right,
    tiny,
    told,
    two_to_a_machine,
)
from test_ddp import BOUNDS, differences, train
from test_faults import (
    Sum,
    both_ways,
    by_torch,
    exact_across_a_restart,
    exact_loop,
    exact_without,
)


class Tree:
    """A root and two racks below a spine, as processes that can be killed."""

    def __init__(self, aggregators: int = 64) -> None:
        def switch(*options: str) -> SwitchProcess:
            process = SwitchProcess("--protocol", "goat", *options)
            process.start()
            return process

        below = ("--shards", "1", "--aggregators", str(aggregators), "--upstream")
        self.root = switch("--heartbeat-timeout", "20")
        self.spine = switch(*below, self.root.address)
        self.racks = [switch(*below, self.spine.address) for _ in range(2)]

    @property
    def addresses(self) -> list[str]:
        return [rack.address for rack in self.racks]

    def status(self) -> Any:
        command = [sys.executable, "-m", "fanin", "status", "--json", "--switch", self.addresses[0]]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(shown.stdout)


@pytest.fixture
def tree() -> Iterator[Tree]:
    running = Tree()
    yield running
    for process in (*running.racks, running.spine, running.root):
        process.kill()


@pytest.fixture(scope="module")
def goat() -> Iterator[str]:
    """A switch of GOAT, with its root, in this process."""
    with switch_here(protocol="goat") as running:
        yield running.address


def by_goat(me: Me, body: Callable[..., Any], *args: Any) -> Any:
    """The body, in an environment that says so."""
    os.environ["FANIN_PROTOCOL"] = "goat"
    return body(me, *args)


def in_racks(me: Me, racks: list[str], body: Callable[..., Any], *args: Any) -> Any:
    """The body at one of the racks."""
    os.environ["FANIN_SWITCH"] = racks[me.rank % len(racks)]
    return by_goat(me, body, *args)


def test_sums_through_two_racks_and_a_spine_are_right_and_alike_on_all_ranks(
    launch: Launch, tree: Tree
) -> None:
    sums_are_right(launch(in_racks, 3, tree.addresses, sums).results())


def at_a_rack_each(me: Me, racks: list[str]) -> tuple[list[Any], dict[str, int]]:
    os.environ["FANIN_SWITCH"] = racks[me.rank // 2]
    return by_goat(me, two_to_a_machine)  # type: ignore[no-any-return]


def test_ranks_of_one_machine_sum_first_and_the_first_one_speaks_for_all(
    launch: Launch, tree: Tree
) -> None:
    results = launch(at_a_rack_each, 4, tree.addresses).results()
    assert all(found == results[0][0] for found, _ in results)
    wrong, errors = results[0][0][0::2], results[0][0][1::2]
    assert max(wrong) == 0
    assert max(errors) < 1e-5
    # A tensor of 4 MB, in fragments of at least 1,300 bytes.
    sent = [counts["packets_sent"] for _, counts in results]
    assert sent[1::2] == [0, 0]
    assert all(0 < packets <= 4_000_000 / 1300 * 1.1 for packets in sent[0::2]), sent


def test_each_element_of_a_small_tensor_is_right_to_its_own_magnitude(
    launch: Launch, goat: str
) -> None:
    metrics_are_right(launch(by_goat, 3, metrics, at=goat).results())


def test_large_and_small_gradients_in_one_tensor_are_summed(launch: Launch, goat: str) -> None:
    for found in launch(by_goat, 2, large, at=goat).results():
        assert found < 1e-6


def test_tiny_gradients_are_summed_and_do_not_vanish(launch: Launch, tree: Tree) -> None:
    for errors in launch(in_racks, 3, tree.addresses, tiny).results():
        assert all(error <= 2 * TINY[size] for size, error in errors.items()), errors


def late(me: Me) -> list[int]:
    me.init()
    dice = random.Random(me.rank)
    ramp = torch.arange(40_000, dtype=torch.int32)
    wrong = []
    for step in range(8):
        # Lateness is what is tried: the sums are right however long it is.
        time.sleep(dice.random() * 0.05)
        tensor = ramp * (me.rank + 1) + step
        dist.all_reduce(tensor)
        wrong.append(int((tensor != ramp * 10 + 4 * step).sum()))
    me.say("summed")
    me.hear()
    return wrong


def test_ranks_that_are_late_at_random_sum_exactly_and_as_planned(
    launch: Launch, tree: Tree
) -> None:
    ranks = launch(in_racks, 4, tree.addresses, late)
    for rank in range(4):
        assert ranks.hear(rank) == "summed"
    status = tree.status()
    (job,) = status["jobs"]
    assert sum(planned["share"] for planned in job["planned"]) == pytest.approx(1.0)
    assert len(job["planned"]) == 3
    assert all(planned["aggregators"] <= 64 for planned in job["planned"])
    assert status["dropped"] == {"outdated": 0, "unplanned": 0}
    assert all(switch["jobs"][0]["collisions"] == 0 for switch in status["switches"])
    for rank in range(4):
        ranks.tell(rank, "go")
    assert ranks.results() == [[0] * 8] * 4


def test_training_equals_gloos(launch: Launch, goat: str) -> None:
    ours = launch(by_goat, 2, train, "fanin", "none", at=goat).results()
    gloo = launch(train, 2, "gloo", "none").results()
    assert differences(ours[0], ours[1]) == 0  # bit-identical on all ranks
    assert differences(ours[0], gloo[0]) <= BOUNDS["none"]


@pytest.mark.parametrize("killed", ["rack", "spine", "root"])
@both_ways
def test_sums_are_exact_across_a_restart(
    launch: Launch, tree: Tree, way: Callable[[Me, float], Sum], killed: str
) -> None:
    ranks = launch(in_racks, 2, tree.addresses, exact_loop, way)
    process = {"rack": tree.racks[1], "spine": tree.spine, "root": tree.root}[killed]
    exact_across_a_restart(ranks, process)


def gone(me: Me) -> str:
    me.init(timeout=timedelta(seconds=4))
    me.say("running")
    try:
        while True:
            tensor = torch.ones(50_000, dtype=torch.int32)
            dist.all_reduce(tensor)
            assert (tensor == 2).all()
    except fanin.errors.FaninError as error:
        return type(error).__name__


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("away", ["rack", "spine"])
def test_ranks_go_on_without_a_switch_that_stays_away(
    launch: Launch, tree: Tree, away: str, by: signal.Signals
) -> None:
    ranks = launch(in_racks, 2, tree.addresses, exact_loop, by_torch)
    exact_without(ranks, {"rack": tree.racks[1], "spine": tree.spine}[away], by)


def test_a_root_that_does_not_come_back_ends_in_an_error_and_no_wrong_sum(
    launch: Launch, tree: Tree
) -> None:
    ranks = launch(in_racks, 2, tree.addresses, gone)
    for rank in range(2):
        assert ranks.hear(rank) == "running"
    tree.root.kill()
    assert {ranks.result(rank) for rank in range(2)} <= {"SwitchLost", "AllReduceTimeout"}


def test_a_root_that_stops_tells_every_rank(launch: Launch, tree: Tree) -> None:
    ranks = launch(in_racks, 2, tree.addresses, told)
    for rank in range(2):
        assert ranks.hear(rank) == "running"
    assert tree.root.process is not None
    threading.Thread(target=tree.root.process.terminate).start()
    for rank in range(2):
        assert ranks.result(rank) == "SwitchLost"


def test_ranks_with_sub_models_of_different_models_are_refused(goat: str) -> None:
    said: list[str] = []

    def join(rank: int, sub_models: str) -> None:
        with pytest.raises(fanin.errors.JoinRefused, match="FANIN_SUB_MODELS") as refused:
            fanin.connect(
                goat,
                job="mixed",
                rank=rank,
                world_size=2,
                timeout=30,
                protocol="goat",
                sub_models=sub_models,
            )
        said.append(str(refused.value))

    threads = [
        threading.Thread(target=join, args=(rank, sizes)) for rank, sizes in enumerate(("9", "9,9"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2


def of_model(me: Me) -> list[int]:
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    sub_models = fanin.torch.sub_models(model.parameters(), target_bytes=100_000)
    me.init(pg_options=fanin.torch.Options(protocol="goat", sub_models=sub_models))
    tensor = torch.full((100_000,), me.rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    return [int(tensor.min()), int(tensor.max())]


def test_a_group_is_told_its_models_parts(launch: Launch, goat: str) -> None:
    assert launch(of_model, 2, at=goat).results() == [[3, 3]] * 2


def test_layers_are_merged_and_split_to_a_size() -> None:
    def parts(elements: list[int], target_bytes: int) -> list[int]:
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in elements]
        text = fanin.torch.sub_models(parameters, target_bytes=target_bytes)
        return [int(part) for part in text.split(",")]

    # In the order in which gradients come: the last layer first.
    assert parts([300, 200, 100], 4000) == [600]
    assert parts([300, 200, 100], 1200) == [300, 300]
    assert parts([1000, 100], 1200) == [100, 250, 250, 250, 250]
    frozen = [torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(5))]
    frozen[0].requires_grad_(False)
    assert fanin.torch.sub_models(frozen, target_bytes=4000) == "5"
    with pytest.raises(ValueError, match="no parameter that is trained"):
        fanin.torch.sub_models([], target_bytes=4000)
    with pytest.raises(ValueError, match="target_bytes is 1"):
        parts([10_000], 1)


def test_the_protocol_is_a_setting_as_any(goat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_PROTOCOL", "goat")
    with fanin.connect(goat, job="setting", rank=0, world_size=1) as group:
        array = np.arange(10, dtype=np.int32)
        assert (group.all_reduce(array) == np.arange(10)).all()
        assert group.client.dtypes == ["float32", "float16", "bfloat16", "int32"]
