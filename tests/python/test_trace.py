"""FANIN_TRACE: a timeline of every rank, as Chrome's trace viewer and Perfetto read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from fanin._join import timeline
from fanin._settings import Settings
from ranks import Me, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PHASES = ["queued", "exchanging", "completing"]
# The same of ranks that share a machine.
PHASES_HERE = ["queued", "contributing", "awaiting", "completing"]
# Chrome counts in microseconds with a fraction; fanin's clock in nanoseconds.
HALF_A_NANOSECOND = 0.0005
# Process numbers below are ranks, and others are services.
SERVICES = 1_000_000

Event = dict[str, Any]


@pytest.fixture(scope="module")
def two_shards() -> Iterator[str]:
    switch = SwitchProcess("--shards", "2")
    switch.start()
    yield switch.address
    switch.kill()


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def same(a: float, b: float) -> bool:
    return abs(a - b) < HALF_A_NANOSECOND


# Each tensor is so long that both shards have a part of it.


def backend(me: Me, file: str) -> int:
    os.environ["FANIN_TRACE"] = file
    me.init()
    for length in (100_000, 300_000):
        dist.all_reduce(torch.ones(length))
    works = [dist.all_reduce(torch.ones(150_000), async_op=True) for _ in range(4)]
    for work in works:
        assert work is not None
        work.get_future().wait()
    dist.destroy_process_group()
    return 6


def hook(me: Me, file: str) -> int:
    os.environ["FANIN_TRACE"] = file
    me.init("gloo")
    state = fanin.torch.HookState()
    model = DistributedDataParallel(nn.Linear(300, 300))
    model.register_comm_hook(state, fanin.torch.allreduce_hook)
    for _ in range(3):
        model(torch.ones(2, 300)).sum().backward()
    state.close()
    return 3


def arrays(me: Me, file: str) -> int:
    os.environ["FANIN_TRACE"] = file
    with fanin.connect(job="traced", rank=me.rank, world_size=me.world_size) as group:
        for _ in range(3):
            group.all_reduce(np.ones(90_000, np.float32))
    return 3


@pytest.mark.parametrize(
    ("body", "world_size"),
    [(backend, 4), (hook, 2), (arrays, 2)],
    ids=["backend", "hook", "arrays"],
)
def test_each_all_reduce_is_in_the_trace_once_a_rank_and_shard(
    launch: Launch,
    two_shards: str,
    tmp_path: Path,
    body: Callable[[Me, str], int],
    world_size: int,
) -> None:
    counts = launch(body, world_size, str(tmp_path / "trace.json"), at=two_shards).results()
    files = [tmp_path / f"trace.{rank}.json" for rank in range(world_size)]
    assert sorted(tmp_path.iterdir()) == files
    # Joined as docs/operations.md says.
    of_all = [event for file in files for event in json.loads(file.read_text())]
    events = [event for event in of_all if event["pid"] < SERVICES]

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes) == list(range(world_size))
    assert all(name.startswith(f"rank {rank} ") for rank, name in processes.items())

    rows: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    assert rows.keys() <= names.keys()

    found: dict[tuple[int, int, int], list[Event]] = {}
    handed_over = []
    for row, slices in rows.items():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            # A slice is inside or behind the one that began before it.
            while open_until and open_until[-1] <= event["ts"] + HALF_A_NANOSECOND:
                open_until.pop()
            assert not open_until or end(event) <= open_until[-1] + HALF_A_NANOSECOND
            open_until.append(end(event))
        if names[row].startswith("program of "):
            handed_over += [(row[0], e["args"]["number"]) for e in slices]
            continue
        for whole in (e for e in slices if e["name"].startswith("all-reduce ")):
            number, shard = whole["args"]["number"], whole["args"]["shard"]
            assert names[row].startswith(f"shard {shard} of ")
            assert (row[0], shard, number) not in found
            phases = [e for e in slices if e["name"] in PHASES and e["args"]["number"] == number]
            assert [e["name"] for e in phases] == PHASES
            assert same(phases[0]["ts"], whole["ts"])
            assert same(end(phases[0]), phases[1]["ts"])
            assert same(end(phases[1]), phases[2]["ts"])
            assert same(end(phases[2]), end(whole))
            assert phases[1]["dur"] > 0
            found[row[0], shard, number] = phases

    expected = {
        (rank, shard, number)
        for rank in range(world_size)
        for shard in range(2)
        for number in range(counts[rank])
    }
    assert found.keys() == expected
    assert sorted(handed_over) == sorted({(rank, number) for rank, _, number in expected})
    # All ranks have one clock: nobody has a sum to which somebody else has not sent anything yet.
    for shard in range(2):
        for number in range(counts[0]):
            exchanges = [found[rank, shard, number][1] for rank in range(world_size)]
            assert max(e["ts"] for e in exchanges) <= min(map(end, exchanges))


def late(me: Me, file: str) -> None:
    os.environ["FANIN_TRACE"] = file
    me.init()
    for _ in range(12):
        if me.rank == 1:
            time.sleep(0.05)  # in place of computing for longer than the others
        dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def test_ranks_whose_clocks_differ_are_joined_on_one(launch: Launch, tmp_path: Path) -> None:
    launch(late, 3, str(tmp_path / "trace.json")).results()
    files = [tmp_path / f"trace.{rank}.json" for rank in range(3)]
    ahead_s = [0.0, 86_400.0, -7.5]
    recorded = [json.loads(file.read_text()) for file in files]
    for events, file, seconds in zip(recorded, files, ahead_s, strict=True):
        shifted = [
            event | ({"ts": event["ts"] + 1e6 * seconds} if "ts" in event else {})
            for event in events
            if event["name"] != "boot"  # These are of several machines.
        ]
        file.write_text(json.dumps(shifted))
    joined = tmp_path / "all.json"
    command = [sys.executable, "-m", "fanin", "trace", *map(str, files), "--join", str(joined)]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    assert found["sums"] == 12
    (service,) = found["services"]
    assert service["name"].startswith("service ")
    # It sleeps for nearly all of the time. A sample comes every 50 ms.
    assert service["waits_for"][0] == "rank 1"
    assert service["waits_for"][1] > 20
    # 12 sums of 1,000 floats. Packets count as full ones, and have at most 1,024 elements here.
    assert 0.04 < service["megabytes"] < 0.15
    for rank, seconds in zip(found["ranks"], ahead_s, strict=True):
        assert abs(rank["ahead_s"] - seconds) < 5, rank
        assert rank["name"].startswith(f"rank {rank['rank']} on {os.uname().nodename} ")
    events = json.loads(joined.read_text())
    assert len(events) == sum(map(len, recorded)) - len(recorded)
    begun = [e["ts"] for e in events if e["name"] == "all-reduce 11"]
    assert max(begun) - min(begun) < 10e6, "a day apart before"
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "12 sums that all ranks asked for" in table
    assert "asked late" in table
    assert "waits most for" in table


def machines(me: Me, file: str, of_ranks: str) -> str:
    """Sums where ranks with one letter share a machine, and rank 1 is late; returns the job."""
    os.environ |= {"FANIN_TRACE": file, "FANIN_SWITCH": "", "FANIN_MACHINE": of_ranks[me.rank]}
    me.init()
    for _ in range(12):
        if me.rank == 1:
            time.sleep(0.05)  # in place of computing for longer than the others
        dist.all_reduce(torch.ones(300_000))
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    job = str(backend._channel._client.job)
    dist.destroy_process_group()
    return job


@pytest.mark.parametrize("of_ranks", ["aaa", "aab"], ids=["one machine", "two"])
def test_ranks_of_a_machine_have_timelines_too(
    launch: Launch, tmp_path: Path, of_ranks: str
) -> None:
    jobs = launch(machines, 3, str(tmp_path / "trace.json"), of_ranks).results()
    files = [tmp_path / f"trace.{rank}.json" for rank in range(3)]
    for rank, file in enumerate(files):
        slices = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
        wholes = [e for e in slices if e["name"].startswith("all-reduce ")]
        assert [e["args"]["number"] for e in wholes] == list(range(12))
        assert {e["args"]["job"] for e in wholes} == {jobs[0]}
        segments = [e for e in slices if e["name"].startswith("segment ")]
        # A column of each machine speaks to the other.
        assert bool(segments) == (of_ranks == "aab" and rank in {0, 2})
        for whole in wholes:
            inside = [
                e
                for e in slices
                if e["tid"] == whole["tid"] and e["args"]["number"] == whole["args"]["number"]
            ]
            phases = [e for e in inside if e is not whole]
            assert [e["name"] for e in phases] == PHASES_HERE
            assert same(phases[0]["ts"], whole["ts"])
            assert same(end(phases[-1]), end(whole))
            assert all(same(end(a), b["ts"]) for a, b in pairwise(phases))
        ends = [(e["ts"], end(e)) for e in wholes]
        assert all(any(a <= e["ts"] and end(e) <= b for a, b in ends) for e in segments)

    command = [sys.executable, "-m", "fanin", "trace", *map(str, files)]
    joined = [*command, "--join", str(tmp_path / "all.json"), "--json"]
    found = json.loads(subprocess.run(joined, capture_output=True, text=True, check=True).stdout)
    assert found["sums"] == 12
    assert found["ranks"][1]["late"] > 0.5 > found["ranks"][0]["late"]
    # Not the segments, which are a second way to see the same sums.
    subprocess.run([*command, "--out", str(tmp_path / "step.toml")], check=True)
    step = tomllib.loads((tmp_path / "step.toml").read_text())
    assert [layer["bytes"] for layer in step["layer"]] == ["1200000B"]


def again(me: Me, file: str) -> None:
    os.environ["FANIN_TRACE"] = file
    for _ in range(2):
        me.init()
        dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()


def test_groups_of_one_process_follow_each_other_in_one_file(
    launch: Launch, tmp_path: Path
) -> None:
    launch(again, 2, str(tmp_path / "trace.json")).results()
    events = json.loads((tmp_path / "trace.1.json").read_text())
    assert len({e["args"]["job"] for e in events if e["name"] == "all-reduce 0"}) == 2


def halves(me: Me, file: str) -> None:
    """Two groups with a rank 0 each."""
    os.environ["FANIN_TRACE"] = file
    me.init("gloo")
    groups = [dist.new_group([0, 1], backend="fanin"), dist.new_group([2, 3], backend="fanin")]
    group = groups[me.rank // 2]
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.ones(1000), group=group)
    dist.destroy_process_group()


def test_equal_ranks_of_different_groups_do_not_share_a_file(
    launch: Launch, tmp_path: Path
) -> None:
    launch(halves, 4, str(tmp_path / "trace.json")).results()
    for rank in range(4):
        events = json.loads((tmp_path / f"trace.{rank}.json").read_text())
        assert {e["pid"] for e in events if e["pid"] < SERVICES} == {rank}
        assert sum(e["name"] == "all-reduce 0" for e in events) == 1


def endless(me: Me, file: str) -> None:
    os.environ["FANIN_TRACE"] = file
    me.init()
    while True:
        dist.all_reduce(torch.ones(1000))


def test_a_killed_process_leaves_a_readable_file(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(endless, 2, str(tmp_path / "trace.json"))
    files = [tmp_path / f"trace.{rank}.json" for rank in range(2)]
    wait_until(
        lambda: all(file.exists() and "all-reduce 5" in file.read_text() for file in files),
        "the traces grow",
    )
    for rank in range(2):
        ranks.kill(rank)
    for file in files:
        # As the viewers read it: killed within a write, the end of the array may be missing.
        text = file.read_text().rstrip()
        if not text.endswith("]"):
            text = text[: text.rindex("\n")].rstrip(",\n") + "]"
        numbers = [e["args"]["number"] for e in json.loads(text) if e["name"].startswith("all-r")]
        assert numbers[:6] == list(range(6))


def lost(me: Me, file: str) -> str:
    os.environ["FANIN_TRACE"] = file
    me.init()
    if me.rank == 1:
        me.say("here")
        me.hear()
    try:
        dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return "summed"


def test_a_failed_all_reduce_is_in_the_trace_with_its_error(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(lost, 2, str(tmp_path / "trace.json"))
    assert ranks.hear(1) == "here"
    ranks.kill(1)
    assert "rank 1 is lost" in ranks.result(0)
    events = json.loads((tmp_path / "trace.0.json").read_text())
    (failed,) = (e for e in events if e["name"] == "all-reduce 0")
    assert "rank 1 is lost" in failed["args"]["error"]


def test_a_file_that_cannot_be_written_is_told_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FANIN_TRACE", "/nowhere/trace.json")
    with pytest.raises(
        errors.FaninError, match=r"trace file .* /nowhere/trace\.\d+\.json: No such"
    ):
        fanin.connect("no-such-switch:1", job="traced", rank=0, world_size=2)


def test_the_file_is_named_by_the_rank_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert timeline(f"{tmp_path}/run.v2.json", 3) == (f"{tmp_path}/run.v2.3.json", 3)
    monkeypatch.setenv("RANK", "12")
    assert timeline(f"{tmp_path}/run.v2.json", 3) == (f"{tmp_path}/run.v2.12.json", 12)
    monkeypatch.chdir(tmp_path)
    assert timeline("trace", 3) == (f"{tmp_path}/trace.12", 12)
    for directory in (f"{tmp_path}/", str(tmp_path), "/"):
        monkeypatch.setenv("FANIN_TRACE", directory)
        with pytest.raises(ValueError, match=r"FANIN_TRACE is .* must name a file"):
            Settings.of()


STEP_BYTES = (400_000, 1_200_000)
COMPUTING_S = (0.05, 0.02)
"""The computing before each sum of a step."""
SCENARIO = """
payload = "sample"
[network]
topology = "rack"
hosts = 2
rate = "1Gbit"
[[job]]
system = "switchml"
workers = 2
layers = "step.toml"
iterations = 4
"""


def steps(me: Me, file: str) -> None:
    os.environ["FANIN_TRACE"] = file
    me.init()
    for _ in range(6):
        works = []
        for size, seconds in zip(STEP_BYTES, COMPUTING_S, strict=True):
            time.sleep(seconds)  # in place of computing
            works.append(dist.all_reduce(torch.ones(size // 4), async_op=True))
        for work in works:
            assert work is not None
            work.wait()
    dist.destroy_process_group()


def of_fanin(*arguments: object) -> Any:
    command = [sys.executable, "-m", "fanin", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_recorded_step_is_planned_and_simulated_on_other_links(
    launch: Launch, tmp_path: Path
) -> None:
    launch(steps, 2, str(tmp_path / "trace.json")).results()
    layers = tmp_path / "step.toml"
    found = of_fanin("trace", "--json", "--out", layers, *sorted(tmp_path.glob("trace.*.json")))
    assert tuple(each["bytes"] for each in found["sums"]) == STEP_BYTES
    # A busy machine computes for longer, and never for less.
    computing = found["sums"][-1]["ready_s"]
    assert computing >= sum(COMPUTING_S)
    plan = of_fanin("plan", "--json", "--machines", 2, "--rate", "1gbit", "--trace", layers)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    played = of_fanin("sim", tmp_path / "scenario.toml", "--json", "-")
    (job,) = played["result"]["jobs"]
    step = job["finished_s"] / job["training"]["iterations"]
    # The first sum hides under what is computed for the second one. That takes 10 ms, with headers.
    assert step == pytest.approx(plan["split"]["time_s"], rel=0.02)
    assert step == pytest.approx(computing + STEP_BYTES[1] * 8 / 1e9 * 1.06, rel=0.02)
    assert [layer["bytes"] for layer in played["scenario"]["job"][0]["layers"]] == [
        f"{size}B" for size in reversed(STEP_BYTES)
    ]


def on_gloo(me: Me, file: str) -> None:
    me.init("gloo")
    layers = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(6):
            model(torch.ones(4, 100)).sum().backward()
            time.sleep(COMPUTING_S[0])  # in place of an optimizer and a forward pass
    profiler.export_chrome_trace(file.format(me.rank))
    dist.barrier()


def test_a_step_is_read_from_what_pytorchs_profiler_recorded_of_gloo(
    launch: Launch, tmp_path: Path
) -> None:
    launch(on_gloo, 2, str(tmp_path / "profile.{}.json")).results()
    found = of_fanin("trace", "--json", *sorted(tmp_path.glob("profile.*.json")))
    # DDP forms its buckets anew after the first step, and a step is what repeats.
    assert sum(each["bytes"] for each in found["sums"]) == 4 * 4 * (100 * 100 + 100)
    assert found["recorded"]["ranks"] == 2
    assert found["sums"][0]["ready_s"] >= COMPUTING_S[0]
    plan = of_fanin(
        "plan", "--json", "--machines", 2, "--rate", "1gbit", "--trace", tmp_path / "profile.0.json"
    )
    assert plan["size_bytes"] == 4 * 4 * (100 * 100 + 100)
