"""Jobs with a loss bound: what NumPy and torch see of them, and links that lose packets."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from fanin.torch.backend.options import Options
from fanin_lab import netlab
from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab
from laboratory import NAME, needs_lab
from ranks import DEADLINE, Failure, Me
from torch._C._distributed_c10d import FileStore

BOUND = 0.02
ELEMENTS = 400_000


def gradient(rank: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return ((np.arange(ELEMENTS) * 31 + rank * 17) % 1009).astype(np.float32) / np.float32(7)


def over_numpy(me: Me) -> dict[str, Any]:
    with fanin.connect(
        me.switch, job="bounds", rank=me.rank, world_size=me.world_size, loss_bound=BOUND
    ) as group:
        handle = group.all_reduce_async(gradient(me.rank))
        total = handle.wait()
        whole = group.all_reduce(np.arange(ELEMENTS, dtype=np.int32) + me.rank)
        return {
            "sum": total,
            "loss": handle.loss(),
            "whole": whole,
            "statistics": group.statistics(),
        }


def test_an_array_tells_its_loss_and_integers_lose_nothing(launch: Launch) -> None:
    ranks = launch(over_numpy, 4).results()
    for got in ranks:
        assert got["sum"].tobytes() == ranks[0]["sum"].tobytes(), "the same bits on all ranks"
        assert 0 <= got["loss"] <= BOUND
        assert got["loss"] == ranks[0]["loss"]
        told = got["statistics"]
        assert told["lost"] <= BOUND * told["contributions"]
        # Loopback carries blocks of 2,048 words; both arrays count.
        assert told["contributions"] == 2 * 4 * -(-ELEMENTS // 2048)
        np.testing.assert_array_equal(
            got["whole"], 4 * np.arange(ELEMENTS, dtype=np.int32) + sum(range(4))
        )


def over_torch(me: Me, trace: str) -> float:
    me.init(pg_options=Options(loss_bound=BOUND, trace=trace))
    tensor = torch.full((ELEMENTS,), float(me.rank + 1))
    dist.all_reduce(tensor)
    other = torch.full((10,), float(me.rank))
    dist.broadcast(other, 1)
    assert torch.equal(other, torch.ones(10))
    lost, contributions = fanin.torch.lost()
    assert 0 <= lost <= BOUND * contributions
    assert contributions > 0
    dist.destroy_process_group()  # what the timeline waits for
    return float((tensor != 10).double().mean())


def test_a_group_of_torch_takes_a_bound_and_its_timeline_has_the_loss(
    launch: Launch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    for unequal in launch(over_torch, 4, str(trace)).results():
        assert unequal <= 4 * BOUND
    events = json.loads((tmp_path / "trace.0.json").read_text())
    told = [event["args"]["loss"] for event in events if "loss" in event.get("args", {})]
    assert sum(part["contributions"] for part in told) >= 4 * ELEMENTS // 2048
    assert all(part["lost"] <= BOUND * part["contributions"] for part in told)


@pytest.mark.parametrize(
    "said", [{"wire_dtype": "bfloat16"}, {"wire_dtype": "int8"}, {"in_flight": 64}]
)
def test_what_a_job_with_a_bound_does_not_have_is_refused(switch: str, said: Any) -> None:
    with pytest.raises(ValueError, match="FANIN_LOSS_BOUND"):
        fanin.connect(switch, job="both", rank=0, world_size=1, loss_bound=BOUND, **said)


def test_ranks_with_different_bounds_are_told_so(launch: Launch) -> None:
    for outcome in (launch(with_own_bound, 2).outcome(rank) for rank in range(2)):
        assert outcome.kind == "SettingMismatch"
        assert "FANIN_LOSS_BOUND" in outcome.message


def with_own_bound(me: Me) -> None:
    bound = 0.01 * (1 + me.rank)
    fanin.connect(me.switch, job="unlike", rank=me.rank, world_size=2, loss_bound=bound)


def in_the_laboratory(me: Me, namespaces: list[str], meeting: str, **said: Any) -> None:
    """Make a group with a bound, of ranks with a namespace each, by the switch."""
    netlab.enter(namespaces[me.rank])
    store = FileStore(meeting, me.world_size)
    options = Options(loss_bound=BOUND, plan="switch", **said)
    me.init("fanin", store=store, rank=me.rank, world_size=me.world_size, pg_options=options)


def over_the_laboratory(me: Me, namespaces: list[str], meeting: str) -> list[tuple[bytes, int]]:
    in_the_laboratory(me, namespaces, meeting)
    found = []
    for step in range(5):
        tensor = torch.from_numpy(gradient(me.rank + step))
        dist.all_reduce(tensor)
        exact = sum(gradient(rank + step).astype(np.float64) for rank in range(me.world_size))
        unlike = int((np.abs(tensor.numpy() - exact) > 1e-3).sum())
        found.append((tensor.numpy().tobytes(), unlike))
    return found


@needs_lab
def test_over_links_that_lose_a_hundredth_all_ranks_have_the_same_bits_within_the_bound(
    launch: Launch, tmp_path: Path
) -> None:
    with Netlab(4, loss=0.01, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace(f"w{i}") for i in range(4)]
            ranks = launch(over_the_laboratory, 4, spaces, str(tmp_path / "store"), at=listen)
            found = ranks.results()
        assert netlab.describe(NAME)["packets_lost"] > 0
    assert all(got == found[0] for got in found)
    unlike = [count for _, count in found[0]]
    assert max(unlike) <= 4 * BOUND * ELEMENTS
    assert max(unlike) > 0, "what is lost is not sent again"


def while_the_switch_dies(me: Me, namespaces: list[str], meeting: str) -> list[tuple[bytes, int]]:
    in_the_laboratory(me, namespaces, meeting, rate="200mbit")
    exact = sum(gradient(rank).astype(np.float64) for rank in range(me.world_size))
    found = []
    for step in range(40):
        tensors = [torch.from_numpy(gradient(me.rank)) * scale for scale in (1, 2)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor, scale in zip(works, tensors, (1, 2), strict=True):
            work.wait()
            unlike = int((np.abs(tensor.numpy() - scale * exact) > 1e-3).sum())
            found.append((tensor.numpy().tobytes(), unlike))
        if me.rank == 0:
            me.say(step)
    return found


@needs_lab
def test_a_switch_that_is_killed_costs_no_more_than_the_bound_and_no_rank_its_bits(
    launch: Launch, tmp_path: Path
) -> None:
    with Netlab(3, loss=0.01, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)) as switch:
            spaces = [lab.namespace(f"w{i}") for i in range(3)]
            ranks = launch(while_the_switch_dies, 3, spaces, str(tmp_path / "store"), at=listen)
            for death in (10, 20, 30):
                while ranks.hear(0) < death:
                    pass
                switch.kill()
                switch.start()
            while (told := ranks.next(0))[0] == "said":
                pass
            found = [told[1], ranks.result(1), ranks.result(2)]
    assert all(got == found[0] for got in found)
    assert max(unlike for _, unlike in found[0]) <= 3 * BOUND * ELEMENTS
    assert max(unlike for _, unlike in found[0]) > 0, "what is lost is not sent again"


def two_to_a_machine(me: Me, *args: Any) -> tuple[list[tuple[bytes, int]], tuple[int, int]]:
    found = over_the_laboratory(me, *args)
    return found, fanin.torch.lost()


@needs_lab
def test_ranks_of_one_machine_sum_first_and_all_of_them_are_told_what_their_machines_lost(
    launch: Launch, tmp_path: Path
) -> None:
    with Netlab(2, loss=0.01, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace(f"w{rank // 2}") for rank in range(4)]
            ranks = launch(two_to_a_machine, 4, spaces, str(tmp_path / "store"), at=listen)
            results = ranks.results()
    assert all(result == results[0] for result in results)
    found, (lost, contributions) = results[0]
    # Five tensors of two machines, 352 elements a block.
    assert contributions == 2 * 5 * -(-ELEMENTS // 352)
    assert 0 < lost <= BOUND * contributions
    assert max(unlike for _, unlike in found) <= 2 * BOUND * ELEMENTS


def until_it_fails(me: Me, namespaces: list[str]) -> None:
    netlab.enter(namespaces[me.rank])
    group = fanin.connect(
        me.switch, job="dies", rank=me.rank, world_size=me.world_size, loss_bound=BOUND
    )
    while True:
        group.all_reduce(gradient(me.rank))
        me.say("summed")


@needs_lab
def test_a_rank_that_is_killed_on_links_that_lose_is_named(launch: Launch) -> None:
    with Netlab(3, loss=0.01, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace(f"w{i}") for i in range(3)]
            ranks = launch(until_it_fails, 3, spaces, at=listen)
            for rank in range(3):
                assert ranks.hear(rank) == "summed"
            command = [sys.executable, "-m", "fanin", "status", "--switch", listen, "--json"]
            status = lab.popen(SWITCH, command, stdout=subprocess.PIPE)
            (job,) = json.loads(status.communicate(timeout=DEADLINE)[0])["jobs"]
            assert (job["state"], job["loss"]["bound"]) == ("running", BOUND)
            assert job["loss"]["contributions"] > 0, "what is lost is not sent again"
            ranks.kill(1)
            for rank in (0, 2):
                while (told := ranks.next(rank, DEADLINE))[0] == "said":
                    pass
                failure = told[1]
                assert isinstance(failure, Failure)
                assert failure.kind == errors.RankLost.__name__
                assert "rank 1" in failure.message


def with_bounds_of_their_own(me: Me, namespaces: list[str], meeting: str) -> list[int]:
    """How many elements of sums lack something: with the group's bound, without any, with more."""
    in_the_laboratory(me, namespaces, meeting)
    exact = sum(gradient(rank).astype(np.float64) for rank in range(me.world_size))

    def unlike() -> int:
        tensor = torch.from_numpy(gradient(me.rank))
        dist.all_reduce(tensor)
        return int((np.abs(tensor.numpy() - exact) > 1e-3).sum())

    found = [unlike()]
    for bound in (0.0, 0.5):
        with fanin.torch.loss_bound(bound):
            found.append(unlike())
    return found


@needs_lab
def test_a_tensor_with_a_bound_of_its_own_loses_no_more_than_that(
    launch: Launch, tmp_path: Path
) -> None:
    with Netlab(2, loss=0.1, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace(f"w{i}") for i in range(2)]
            ranks = launch(with_bounds_of_their_own, 2, spaces, str(tmp_path / "store"), at=listen)
            found = ranks.results()
    assert found[0] == found[1]
    as_the_group, nothing, much = found[0]
    assert 0 < as_the_group <= 2 * BOUND * ELEMENTS
    assert nothing == 0
    # A tenth of each rank's packets is lost, and none is sent again.
    assert 2 * BOUND * ELEMENTS < much <= 2 * 0.5 * ELEMENTS


def towards_one_link(me: Me, namespaces: list[str], meeting: str) -> list[tuple[bytes, int]]:
    netlab.enter(namespaces[me.rank])
    store = FileStore(meeting, me.world_size)
    options = Options(loss_bound=BOUND, plan="switch", rate="8mbit")
    me.init("fanin", store=store, rank=me.rank, world_size=me.world_size, pg_options=options)
    found = []
    for layer in range(2):
        tensor = torch.from_numpy(gradient(me.rank))
        with fanin.torch.priority(6 * layer):
            dist.all_reduce(tensor)
        exact = sum(gradient(rank).astype(np.float64) for rank in range(me.world_size))
        unlike = int((np.abs(tensor.numpy() - exact) > 1e-3).sum())
        found.append((tensor.numpy().tobytes(), unlike))
    return found


@needs_lab
def test_queues_drop_what_is_unimportant_and_the_bound_holds(
    launch: Launch, tmp_path: Path
) -> None:
    lab = Netlab(3, spares=1, rate_bps=20_000_000, queue_bytes=400_000, queues="dlcp", name=NAME)
    with lab:
        listen = f"{netlab.address('s0')}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, "s0")):
            spaces = [lab.namespace(f"w{i}") for i in range(3)]
            ranks = launch(towards_one_link, 3, spaces, str(tmp_path / "store"), at=listen)
            found = ranks.results()
        # Ranks send a fifth more than the switch's link carries.
        tc = ["tc", "-n", lab.namespace(SWITCH), "-s", "-j", "qdisc", "show", "dev", "s0"]
        shown = json.loads(subprocess.check_output(tc))
    assert all(got == found[0] for got in found)
    assert max(unlike for _, unlike in found[0]) <= 3 * BOUND * ELEMENTS
    counted = {each["parent"]: each for each in shown if each["kind"] == "bfifo"}
    drops = dict.fromkeys((True, False), 0)
    for parent, each in counted.items():
        drops[parent.startswith("1:1")] += each["drops"]
    assert drops[True] == 0
    assert drops[False] > 0


def with_own_bound_of_a_tensor(me: Me) -> None:
    with fanin.connect(
        me.switch, job="unlike-tensors", rank=me.rank, world_size=2, loss_bound=BOUND
    ) as group:
        group.all_reduce(gradient(me.rank), loss_bound=0.01 * me.rank)


def test_ranks_whose_tensors_have_different_bounds_are_told_so(launch: Launch) -> None:
    for outcome in (launch(with_own_bound_of_a_tensor, 2).outcome(rank) for rank in range(2)):
        assert outcome.kind == "CollectiveMismatch"
        assert "the same loss bound" in outcome.message


def test_a_bound_that_is_no_fraction_is_refused(switch: str) -> None:
    for wrong in (-0.1, 1.0, float("nan")):
        with (
            pytest.raises(ValueError, match="at least 0 and below 1"),
            fanin.torch.loss_bound(wrong),
        ):
            pass
    with fanin.connect(switch, job="fraction", rank=0, world_size=1) as group:
        with pytest.raises(ValueError, match="loss_bound 1: a fraction of at least 0 and below 1"):
            group.all_reduce(np.ones(3), loss_bound=1.0)
        # Where nothing is lost, nothing more may be.
        assert group.all_reduce(np.ones(3), loss_bound=0.5).tolist() == [1.0] * 3
