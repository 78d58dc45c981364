"""Many services for one job: the ranks' own, named switches, and the plan over both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess, free_address
from fanin import _hosting
from places import GIGABIT
from programs import BY_TORCH, Program, Start
from ranks import DEADLINE, Failure, Me, sums_on_switch, wait_until

ALONE = ""  # for `launch`: no switch is named


def options(me: Me, machines: int, **said: Any) -> Any:
    """Let the ranks be on so many machines."""
    from fanin.torch import Options

    return Options(machine=f"machine {me.rank * machines // me.world_size}", **said)


def sums(me: Me, machines: int, said: dict[str, Any]) -> tuple[str, list[str]]:
    """Sum tensors of many lengths and dtypes, and return who summed, and the bits."""
    me.init(pg_options=options(me, machines, **said))
    bits = []
    generator = torch.Generator().manual_seed(me.rank)
    for length in (1, 100, 5_000, 1_000_000, 0, 33_333):
        whole = torch.arange(length, dtype=torch.int32) * (me.rank + 1)
        dist.all_reduce(whole)
        ranks = me.world_size * (me.world_size + 1) // 2
        assert torch.equal(whole, torch.arange(length, dtype=torch.int32) * ranks)
        real = torch.randn(length, generator=generator)
        dist.all_reduce(real, op=dist.ReduceOp.AVG)
        bits.append(str(torch.hash_tensor(real).item()) if length else "")
    assert sums_on_switch() == 12
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return backend._channel._client.switch, bits


@pytest.mark.parametrize(("ranks", "machines"), [(4, 4), (4, 2), (3, 1), (2, 2)])
def test_ranks_sum_without_a_switch_to_start(launch: Launch, ranks: int, machines: int) -> None:
    results = launch(sums, ranks, machines, {}, at=ALONE).results()
    assert len({str(bits) for _, bits in results}) == 1, "the same bits"
    services = [switch.split(",") for switch, _ in results]
    assert {len(of_rank) for of_rank in services} == {machines}
    # Each column has services of its own, where there are other machines.
    columns = ranks // machines if machines > 1 else 1
    assert len({tuple(of_rank) for of_rank in services}) == columns


def test_switches_are_shared_with_the_ranks_own_services(launch: Launch) -> None:
    with SwitchProcess("--rate", "1gbit") as one, SwitchProcess("--rate", "1gbit") as two:
        both = f"{one.address},{two.address}"
        for said, services in (
            ({"rate": "1gbit"}, 4),
            ({"rate": "1gbit", "plan": "switch"}, 2),
            ({"rate": "1gbit", "plan": "own"}, 2),
        ):
            results = launch(sums, 2, 2, said, at=both).results()
            assert len({str(result) for result in results}) == 1
            switches = results[0][0].split(",")
            assert len(switches) == services
            assert (both in results[0][0]) == (said.get("plan") != "own")


def test_a_switch_as_slow_as_the_machines_is_told_from_a_fat_one(launch: Launch) -> None:
    for rate, services in (("1gbit", 3), ("2gbit", 1)):
        with SwitchProcess("--rate", rate) as switch:
            results = launch(sums, 2, 2, {"rate": "1gbit"}, at=switch.address).results()
            assert len(results[0][0].split(",")) == services


def by_numpy(me: Me, switches: str) -> list[int]:
    with fanin.connect(switches, job="listed", rank=me.rank, world_size=me.world_size) as group:
        array = np.arange(500_000, dtype=np.int32) + me.rank
        group.all_reduce(array)
        return [int(array[0]), int(array[-1])]


def test_arrays_are_summed_by_several_switches(launch: Launch) -> None:
    with SwitchProcess() as one, SwitchProcess() as two:
        both = f"{one.address},{two.address}"
        assert launch(by_numpy, 2, both).results() == [[1, 2 * 499_999 + 1]] * 2


def on_machines(me: Me, said: dict[str, Any]) -> Any:
    group = fanin.connect(
        job="machines",
        rank=me.rank,
        world_size=me.world_size,
        machine=f"machine {me.rank % 2}",
        timeout=60,
        **said,
    )
    sums = []
    for length in (3, 700_000):
        array = np.linspace(0, 1, length, dtype=np.float32) * (me.rank + 1)
        sums.append(group.all_reduce(array).tobytes())
    me.say(group.plan)
    assert me.hear() == "stop"
    return sums  # and the group ends with its process


@pytest.mark.parametrize("rate", [None, "1gbit"])
def test_arrays_of_a_machine_s_ranks_are_summed_there_first(
    launch: Launch, rate: str | None
) -> None:
    with SwitchProcess(*(["--rate", rate] if rate else [])) as switch:
        ranks = launch(on_machines, 4, {"rate": rate} if rate else {}, at=switch.address)
        for rank in range(4):
            services = ranks.hear(rank)["services"]
            own = [rank // 2 * 2, rank // 2 * 2 + 1]
            assert [each["host"] for each in services] == [*own, None]
            assert services[-1]["service"] == switch.address
        (report,) = fanin_status("--switch", switch.address)
        assert sorted(job["job"] for job in report["jobs"]) == ["machines.0", "machines.1"]
        for rank in range(4):
            ranks.tell(rank, "stop")
        results = ranks.results()
    assert all(result == results[0] for result in results), "the same bits"
    for sums in results[0]:
        array = np.frombuffer(sums, dtype=np.float32)
        np.testing.assert_allclose(array, 10 * np.linspace(0, 1, len(array)), atol=1e-5)


def in_another_order(me: Me, switches: list[str]) -> None:
    named = ",".join(switches if me.rank else reversed(switches))
    fanin.connect(named, job="crossed", rank=me.rank, world_size=2, timeout=20)


def test_ranks_that_name_switches_in_another_order_are_refused(launch: Launch) -> None:
    with SwitchProcess() as one, SwitchProcess() as two:
        ranks = launch(in_another_order, 2, [one.address, two.address])
        for rank in range(2):
            outcome = ranks.outcome(rank)
            assert isinstance(outcome, Failure)
            assert outcome.kind == "SettingMismatch"
            assert "in the same order (switch, or FANIN_SWITCH)" in outcome.message
            differ = r"rank (\d) and rank (\d) differ in plan.*: ([0-9a-f]{16}) and ([0-9a-f]{16});"
            told = re.search(differ, outcome.message)
            assert told, outcome.message
            assert sorted(told.group(1, 2)) == ["0", "1"], outcome.message
            assert told[3] != told[4], "both fingerprints"


def leaves_early(me: Me) -> int:
    me.init(pg_options=options(me, me.world_size))
    total = 0
    for _ in range(20):
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        total += int(tensor[0].item())
    # No barrier: whoever is first goes, and its service with it.
    dist.destroy_process_group()
    return total


def test_a_service_stays_until_all_have_their_sums(launch: Launch) -> None:
    assert launch(leaves_early, 4, at=ALONE).results() == [80] * 4


def sums_for_ever(me: Me) -> None:
    me.init(pg_options=options(me, me.world_size))
    while True:
        dist.all_reduce(torch.ones(300_000))
        me.say("summed")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_with_its_service_is_named(launch: Launch, victim: int) -> None:
    ranks = launch(sums_for_ever, 3, at=ALONE)
    for rank in range(3):
        ranks.hear(rank)
    ranks.kill(victim)
    for rank in {0, 1, 2} - {victim}:
        kind, outcome = ranks.next(rank)
        while kind == "said":
            kind, outcome = ranks.next(rank)
        assert isinstance(outcome, Failure)
        assert (outcome.kind, outcome.fields["rank"]) == ("RankLost", victim), outcome.message


def sums_until_told(me: Me, loss_bound: float | None = None) -> int:
    me.init(pg_options=options(me, 2, rate="1gbit", loss_bound=loss_bound))
    done = 0
    while True:
        tensor = torch.full((200_000,), me.rank + 1, dtype=torch.int32)
        dist.all_reduce(tensor)
        assert (tensor == 3).all()
        done += 1
        me.say(done)
        if me.hear() == "stop":
            return done


def test_a_spare_service_that_is_killed_and_comes_back_costs_no_sum(launch: Launch) -> None:
    with SwitchProcess("--rate", "1gbit") as spare:
        ranks = launch(sums_until_told, 2, at=spare.address)
        for round_ in range(9):
            for rank in range(2):
                assert ranks.hear(rank) == round_ + 1
            for rank in range(2):
                ranks.tell(rank, "stop" if round_ == 8 else "go")
            if round_ in (2, 5):
                assert spare.process is not None
                os.kill(spare.process.pid, signal.SIGKILL)
                spare.kill()
                spare.start()
        assert ranks.results() == [9, 9]


@pytest.mark.parametrize(("spares", "bound"), [(1, None), (2, None), (2, 0.02)])
def test_what_a_service_summed_that_dies_another_one_goes_on_with(
    launch: Launch, spares: int, bound: float | None
) -> None:
    switches = [SwitchProcess("--rate", "1gbit", "--shards", "1") for _ in range(spares)]
    try:
        for switch in switches:
            switch.start()
        at = ",".join(switch.address for switch in switches)
        ranks = launch(sums_until_told, 2, bound, at=at)
        for round_ in range(12):
            for rank in range(2):
                assert ranks.hear(rank) == round_ + 1
            for rank in range(2):
                ranks.tell(rank, "stop" if round_ == 11 else "go")
            # In the midst of the next sum, and for good.
            if round_ == 3 or (round_ == 7 and spares == 2):
                switches.pop().kill()
        assert ranks.results() == [12, 12]
    finally:
        for switch in switches:
            switch.kill()


def sums_a_while(me: Me) -> int:
    me.init(pg_options=options(me, me.world_size))
    for done in range(1, 6):
        tensor = torch.full((200_000,), me.rank + 1, dtype=torch.int32)
        dist.all_reduce(tensor)
        assert (tensor == 6).all()
        me.say(done)
    return 5


def test_a_rank_that_is_stopped_with_its_service_is_waited_for(launch: Launch) -> None:
    ranks = launch(sums_a_while, 3, at=ALONE)
    assert ranks.hear(1) == 1
    pid = ranks.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        # Longer than a service may be gone before another one takes over, and than heartbeats take.
        time.sleep(8)
    finally:
        os.kill(pid, signal.SIGCONT)
    for rank in range(3):
        while (told := ranks.next(rank))[0] == "said":
            pass
        assert told == ("ended", 5)


def test_a_service_that_is_back_late_is_taken_again_where_no_other_can(launch: Launch) -> None:
    # Two shards, which the ranks' own services do not have.
    with SwitchProcess("--rate", "1gbit", "--shards", "2") as spare:
        ranks = launch(sums_until_told, 2, at=spare.address)
        for round_ in range(4):
            for rank in range(2):
                assert ranks.hear(rank) == round_ + 1
            for rank in range(2):
                ranks.tell(rank, "stop" if round_ == 3 else "go")
            if round_ == 1:
                spare.kill()
                time.sleep(5)  # longer than a service may be gone before others are asked
                spare.start()
        assert ranks.results() == [4, 4]


def fanin_status(*arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "FANIN_SWITCH"}
    command = [sys.executable, "-m", "fanin", "status", "--json", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def sums_large(me: Me, machines: int) -> Any:
    me.init(pg_options=options(me, machines, rate="1gbit"))
    for _ in range(3):
        dist.all_reduce(torch.ones(4_000_000))
    me.say(fanin.torch.plan())
    assert me.hear() == "stop"
    return fanin.torch.plan()


@pytest.mark.parametrize("machines", [2, 4])
def test_any_service_of_a_job_shows_who_sums_what_and_who_is_where(
    launch: Launch, machines: int
) -> None:
    with SwitchProcess("--rate", "1gbit") as spare:
        ranks = launch(sums_large, 4, machines, at=spare.address)
        plans = [ranks.hear(rank) for rank in range(4)]
        columns = 4 // machines
        services = [[each["service"] for each in plan["services"]] for plan in plans]
        for rank, plan in enumerate(plans):
            hosts = [other for other in range(4) if other % columns == rank % columns]
            assert [each["host"] for each in plan["services"]] == [*hosts, None]
            assert services[rank] == services[rank % columns], "those of its column"
            assert services[rank][-1] == spare.address
            shares = [each["share"] for each in plan["services"]]
            assert sum(shares) == pytest.approx(1)
            # BytePS Eq. 6 for k = 1: 2 n (n - 1) / (n^2 + n k - 2 k) links.
            n = machines
            seconds = 8 / GIGABIT * 2 * n * (n - 1) / (n * n + n - 2)
            assert plan["predicted"] == pytest.approx(seconds)
            assert plan["bound"].startswith("the link ")
            assert plan["measured"] > 0
            assert plan["imbalance"] < 0.05

        def asked(address: str) -> list[dict[str, Any]]:
            (report,) = fanin_status("--switch", address)
            return [job for job in report["jobs"] if job["state"] == "running"]

        def is_measured(address: str) -> bool:
            return all(member["measured"] for job in asked(address) for member in job["members"])

        everywhere = {address for of_rank in services for address in of_rank}
        assert len(everywhere) == 4 + 1
        for address in everywhere:
            wait_until(partial(is_measured, address), "heartbeats tell what was measured")
            jobs = asked(address)
            # Its column's, and at the switch each of them.
            assert len(jobs) == (columns if address == spare.address else 1)
            for job in jobs:
                told = job["plan"]
                assert [each["service"] for each in told["services"]] in services
                (here,) = (each for each in told["services"] if each["here"])
                assert here["service"] == address
                # A machine's columns share its link.
                assert told["predicted"] == pytest.approx(seconds * columns)
                assert told["imbalance"] < 0.05
                assert [member["name"] for member in job["members"]] == [
                    f"machine {machine}" for machine in range(machines)
                ]
                assert sorted(r for member in job["members"] for r in member["ranks"]) == [
                    *range(4)
                ]
        shown = {report["switch"] for report in fanin_status()}
        assert shown >= everywhere, "also without an address"
        for rank in range(4):
            ranks.tell(rank, "stop")
        ranks.results()


def test_a_group_that_is_not_fanin_s_has_no_plan(launch: Launch) -> None:
    assert launch(without_plan, 2, at=ALONE).results() == [None, None]


def without_plan(me: Me) -> Any:
    with pytest.raises(ValueError, match="there is no group"):
        fanin.torch.plan()
    me.init("gloo")
    with pytest.raises(ValueError, match="gloo, and not fanin"):
        fanin.torch.plan()
    fanins: Any = dist.new_group(backend="fanin")
    return fanin.torch.plan(fanins)  # on one machine, where memory is shared


BY_EXIT = """
from fanin import _fanin
dist.init_process_group("fanin", init_method=os.environ["MEET"], rank=rank, world_size=world_size)
dist.all_reduce(torch.ones(10))
say("summed")
if rank == 1:
    time.sleep(1.5)  # the other program has ended, but for its service
    client = dist.group.WORLD._get_backend(torch.device("cpu"))._channel._client
    for service in client.switch.split(","):
        _fanin.switch_capacity(service, 1.0)
    say("there")
"""


def on_two_machines(start: Start, source: str, tmp_path: Path) -> list[Program]:
    meet = f"file://{tmp_path}/meet"
    return [
        start(BY_TORCH + source, rank, 2, ALONE, MEET=meet, FANIN_MACHINE=f"m{rank}")
        for rank in range(2)
    ]


def test_a_program_that_ends_without_destroying_its_group_leaves_its_service_last(
    start: Start, tmp_path: Path
) -> None:
    ranks = on_two_machines(start, BY_EXIT, tmp_path)
    ranks[0].line("^summed")
    ranks[1].line("^there")
    for rank in ranks:
        assert rank.wait() == 0


FORKS = """
dist.init_process_group("fanin", init_method=os.environ["MEET"], rank=rank, world_size=world_size)
dist.all_reduce(torch.ones(10))
child = os.fork()
if child == 0:
    sys.exit(0)
say("child", os.waitpid(child, 0)[1])
tensor = torch.ones(10)
dist.all_reduce(tensor)
say("summed", tensor[0].item())
"""


def test_a_forked_child_of_a_rank_that_hosts_a_service_ends_and_leaves_it_alone(
    start: Start, tmp_path: Path
) -> None:
    for rank in on_two_machines(start, FORKS, tmp_path):
        rank.line("^child 0$")
        rank.line("^summed 2.0$")
        assert rank.wait() == 0


def second_group(me: Me) -> list[float]:
    me.init(pg_options=options(me, me.world_size))
    halves: list[Any] = [
        dist.new_group([0, 1], backend="fanin"),
        dist.new_group([2, 3], backend="fanin"),
    ]
    mine = halves[me.rank // 2]
    tensor = torch.full((50_000,), float(me.rank))
    dist.all_reduce(tensor, group=mine)
    first = tensor[0].item()
    dist.destroy_process_group(mine)
    tensor = torch.ones(50_000)
    dist.all_reduce(tensor)
    hosted = len(_hosting._hosted)
    dist.destroy_process_group()
    # In the background, once the others have left as well.
    wait_until(lambda: not _hosting._hosted, "the service is given back", DEADLINE)
    assert hosted == 1
    return [first, tensor[0].item()]


def test_groups_share_their_processes_services(launch: Launch) -> None:
    assert launch(second_group, 4, at=ALONE).results() == [[1, 4], [1, 4], [5, 4], [5, 4]]


JOINS = """
from datetime import timedelta
from fanin.errors import FaninError
patience = timedelta(seconds=float(os.environ["PATIENCE"]))
try:
    dist.init_process_group("fanin", timeout=patience)
except FaninError as error:
    say("raised", type(error).__name__, error)
"""


DIES = """
import fanin._membership
if rank == 2:
    fanin._membership.join = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


def joining(
    start: Start, patience: float, at: str, rank_2: dict[str, str], source: str = JOINS
) -> list[Program]:
    """Three ranks that try to join, on a machine each. Rank 0's process hosts the store."""
    host, port = free_address().split(":")
    store = {"MASTER_ADDR": host, "MASTER_PORT": port, "PATIENCE": str(patience)}
    return [
        start(
            BY_TORCH + source,
            rank,
            3,
            at,
            FANIN_MACHINE=f"m{rank}",
            **store | (rank_2 if rank == 2 else {}),
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize("said", [{}, {"FANIN_RATE": "1gbit"}], ids=["no rate", "a rate"])
def test_all_ranks_say_that_the_switch_is_not_there(
    start: Start, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    # On a busy machine a process may need seconds between the store's beginning and its own place.
    # Rank 2's time is over before rank 0's.
    for rank in joining(start, 16.0, "127.0.0.1:9", {"PATIENCE": "14.5"}):
        rank.line(r"^raised SwitchUnreachable .*\b127\.0\.0\.1:9\b")
        assert rank.wait() == 0


def test_what_ends_one_rank_s_joining_all_ranks_raise(start: Start) -> None:
    ranks = joining(start, 3600.0, ALONE, {"FANIN_TRACE": "/nowhere/trace.json"})
    ranks[2].line("^raised FaninError opening the trace file")
    for rank in ranks[:2]:
        rank.line("^raised FaninError rank 2: opening the trace file")
    for rank in ranks:
        assert rank.wait() == 0


def test_a_rank_that_dies_with_its_service_as_it_joins_is_named(start: Start) -> None:
    ranks = joining(start, 3600.0, ALONE, {}, DIES + JOINS)
    for rank in ranks[:2]:
        rank.line("^raised RankLost .*rank 2 is lost")
        assert rank.wait() == 0


def test_ranks_whose_store_dies_as_they_join_say_so(start: Start) -> None:
    nobody = free_address()
    ranks = joining(start, 3600.0, nobody, {})
    ranks[0].line(f"waiting for the switch {nobody}")
    ranks[0].kill()
    for rank in ranks[1:]:
        rank.line("^raised FaninError group '0': the store where its ranks meet is gone: ")
        assert rank.wait() == 0


def test_what_a_plan_assumes_is_told_once_and_shown(start: Start, tmp_path: Path) -> None:
    links = "no link tells its rate: all are taken for equal"
    with SwitchProcess() as spare:
        meet = f"file://{tmp_path}/meet"
        ranks = [
            start(BY_TORCH + SHOWS, rank, 3, spare.address, MEET=meet, FANIN_MACHINE=f"m{rank}")
            for rank in range(3)
        ]
        for rank in ranks:
            assert rank.line("^links (.*)")[1] == links
        (report,) = fanin_status("--switch", spare.address)
        for job in report["jobs"]:
            assert job["plan"]["links"] == links
            shares = [each["share"] for each in job["plan"]["services"]]
            assert shares == pytest.approx([0.2, 0.2, 0.2, 0.4])
        for rank in ranks:
            rank.signal(signal.SIGTERM)
            rank.wait()
    told = [line for rank in ranks for line in rank.lines if links in line and "If that" in line]
    assert len(told) == 1, "of two groups"
    assert told[0].startswith(f"fanin: rank 0: {links}. If that is not so, ")
    assert "FANIN_RATE=1gbit" in told[0]
    assert "--rate 1gbit" in told[0]


SHOWS = """
import fanin.torch
dist.init_process_group("fanin", init_method=os.environ["MEET"], rank=rank, world_size=world_size)
again = dist.new_group(backend="fanin")
say("links", fanin.torch.plan(again)["links"])
signal.pause()
"""
