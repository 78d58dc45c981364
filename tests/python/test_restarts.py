"""Starting in any order, dying at any moment, and starting again."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from conftest import SwitchProcess, free_address
from fanin import _fanin, launch
from programs import BY_NUMPY, BY_TORCH, Program, Start
from ranks import DEADLINE, wait_until


def test_addresses_that_are_free_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {}
    for worker in ("gw0", "gw1", "gw7"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        taken[worker] = {int(free_address().split(":")[1]) for _ in range(10)}
        assert len(taken[worker]) == 10, "none is given twice"
    assert len(set().union(*taken.values())) == 30, "nor to two workers"
    connections = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert max(max(ports) for ports in taken.values()) < int(connections[0])


# Coming before the switch

ONE_SUM = """
group = connect(job="early")
array = np.full(10, rank + 1, np.int32)
group.all_reduce(array)
say("sum", array[0])
"""

ONE_SUM_BY_TORCH = """
dist.init_process_group(
    "fanin", init_method=os.environ["MEET"], rank=rank, world_size=world_size
)
tensor = torch.full((10,), rank + 1, dtype=torch.int32)
dist.all_reduce(tensor)
say("sum", tensor[0].item())
"""


@pytest.mark.parametrize(
    ("source", "machines", "said"),
    [
        (BY_NUMPY + ONE_SUM, "aa", {}),
        (BY_TORCH + ONE_SUM_BY_TORCH, "aa", {}),
        # It is asked for its rate then, before anybody joins.
        (BY_NUMPY + ONE_SUM, "ab", {"FANIN_RATE": "1gbit"}),
        (BY_TORCH + ONE_SUM_BY_TORCH, "ab", {"FANIN_RATE": "1gbit"}),
    ],
    ids=["numpy", "torch", "numpy with a rate", "torch with a rate"],
)
def test_ranks_wait_for_a_switch_that_comes_late_and_say_so(
    start: Start, tmp_path: Path, source: str, machines: str, said: dict[str, str]
) -> None:
    late = SwitchProcess(listen=free_address())
    said |= {"MEET": f"file://{tmp_path}/meet"}
    ranks = [
        start(source, rank, 2, late.address, **said, FANIN_MACHINE=machines[rank])
        for rank in range(2)
    ]
    waits = rf"^fanin: rank 0: waiting for the switch {late.address}: connection refused; "
    cure = r"is `fanin switch` running there\? \(\d+ s of \d+ s\)$"
    ranks[0].line(waits + cure)
    try:
        ranks[0].line(waits)  # again, some seconds later
        late.start()
        for rank in ranks:
            rank.line("^sum 3$")
            assert rank.wait() == 0
    finally:
        late.kill()


# A dead predecessor's place

NAMED = """
group = connect(job="named")
say("joined")
while True:
    array = np.full(1000, rank + 1, np.int32)
    group.all_reduce(array)
    assert (array == world_size * (world_size + 1) // 2).all()
    if os.environ.get("ENDS"):
        break
say("done")
"""


@pytest.mark.parametrize("machines", ["aa", "aab", "aabb"])
def test_a_named_job_whose_ranks_are_killed_is_started_again_at_once(
    start: Start, machines: str
) -> None:
    size = len(machines)
    switch = SwitchProcess("--heartbeat-timeout", "3600")
    switch.start()
    try:
        for attempt in range(3):
            ends = {"ENDS": "1"} if attempt == 2 else {}
            ranks = [
                start(
                    BY_NUMPY + NAMED,
                    rank,
                    size,
                    switch.address,
                    FANIN_MACHINE=machines[rank],
                    **ends,
                )
                for rank in range(size)
            ]
            for rank in ranks:
                rank.line("^joined$")
            if attempt < 2:
                # All of the first attempt die; one of the second dies, and the others hear of it.
                for rank in ranks[-1:] if attempt else ranks:
                    rank.kill()
        for rank in ranks:
            rank.line("^done$")
            assert rank.wait() == 0
    finally:
        switch.kill()


def test_ranks_meet_once_more_when_one_dies_as_they_meet_and_is_started_again(
    start: Start, switch: str
) -> None:
    zero = start(BY_NUMPY + ONE_SUM, 0, 2, switch)
    # As of a process that dies after the first round.
    _fanin.Meeting([switch], "switchml", "early", 1, 2, timeout=DEADLINE).close()
    for rank in (zero, start(BY_NUMPY + ONE_SUM, 1, 2, switch)):
        rank.line("^sum 3$")
        assert rank.wait() == 0


DIES_AS_IT_JOINS = """
import fanin._membership

fanin._membership.join = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("machines", "dies"), [("ab", 1), ("aab", 2), ("aab", 0), ("aabb", 0), ("aabb", 3)]
)
def test_ranks_meet_once_more_when_one_dies_as_they_join_and_is_started_again(
    start: Start, switch: str, machines: str, dies: int
) -> None:
    size = len(machines)

    def rank(number: int, more: str = "") -> Program:
        source = BY_NUMPY + more + NAMED
        return start(source, number, size, switch, FANIN_MACHINE=machines[number], ENDS="1")

    others = [rank(number) for number in range(size) if number != dies]
    assert rank(dies, DIES_AS_IT_JOINS).wait() == -signal.SIGKILL
    for each in (*others, rank(dies)):
        each.line("^done$")
        assert each.wait() == 0


# torchrun

TRAINS = """
import os, random, signal, sys, threading, time

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
plan = __import__("json").loads(os.environ["PLAN"])
victim, delay = plan[attempt] if attempt < len(plan) else (None, 0)

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once, so that ranks do not share a line

def die():
    os.kill(os.getpid(), signal.SIGKILL)

import torch, torch.distributed as dist
import fanin.torch.backend

if rank == victim and delay < 0:
    die()
if rank == victim:
    timer = threading.Timer(delay, die)
    timer.daemon = True
    timer.start()
began = time.monotonic()
dist.init_process_group("fanin")
say(f"attempt {attempt} rank {rank}: joined after {time.monotonic() - began:.2f} s")
world = dist.get_world_size()
steps = 20 if attempt >= len(plan) else 10**9
for step in range(steps):
    tensor = torch.full((100_000,), rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert (tensor == world * (world + 1) // 2).all(), tensor
say(f"rank {rank}: done")
dist.destroy_process_group()
"""


def restarted(
    seed: int, plan: list[tuple[int, float]], directory: Path, protocol: str = "switchml"
) -> Program:
    """Three ranks under `fanin run --max-restarts`, of which one dies in each attempt but the last.

    A plan has for each attempt who dies, and how many seconds after it began to join; a negative
    number is before.
    """
    print(f"restarts of seed {seed}: {plan}")
    file = directory / "trains.py"
    file.write_text(TRAINS)
    command = [sys.executable, "-m", "fanin", "run", "--nproc-per-node", "3"]
    command += [
        "--protocol",
        protocol,
        "--max-restarts",
        str(len(plan)),
        "--monitor-interval",
        "0.1",
        str(file),
    ]
    return Program(command, {"PLAN": json.dumps(plan)})


def every_rank_trains_on(run: Program, attempts: int) -> None:
    try:
        assert run.wait(DEADLINE * attempts) == 0, run.text()
        done = {line.rpartition(": ")[0] for line in run.lines if line.endswith(": done")}
        assert done == {"rank 0", "rank 1", "rank 2"}
        print("\n".join(line for line in run.lines if "joined after" in line))
    finally:
        run.end()


def random_plan(dice: random.Random, kills: int) -> list[tuple[int, float]]:
    # Joining takes some tenths of a second here: before, in, and after it.
    moments = [-1.0, dice.uniform(0, 0.3), dice.uniform(0, 1), dice.uniform(0, 3)]
    return [(dice.randrange(3), dice.choice(moments)) for _ in range(kills)]


@pytest.mark.parametrize("protocol", ["switchml", "atp"])
def test_a_rank_that_dies_before_in_or_after_joining_leads_to_an_attempt_that_trains_on(
    tmp_path: Path, protocol: str
) -> None:
    # Rank 0 decides for all: its death is another one than that of the rest.
    plan = [(1, -1.0), (0, -1.0), (2, 0.02), (0, 0.1), (1, 2.0)]
    every_rank_trains_on(restarted(-1, plan, tmp_path, protocol), len(plan) + 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_fifty_deaths_at_random_moments(seed: int, tmp_path: Path) -> None:
    plan = random_plan(random.Random(seed), 5)
    every_rank_trains_on(restarted(seed, plan, tmp_path), len(plan) + 1)


ELASTIC = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("fanin")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    with open(os.environ["WORLDS"], "a") as worlds:
        worlds.write(f"{world}\\n")
enough = torch.zeros(1, dtype=torch.int32)
while not enough.item():
    tensor = torch.full((1000,), rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert (tensor == world * (world + 1) // 2).all(), tensor
    enough.fill_(rank == 0 and os.path.exists(os.environ["ENOUGH"]))
    dist.all_reduce(enough)
    time.sleep(0.01)
dist.destroy_process_group()
"""


def test_a_world_that_shrinks_and_grows_trains_on(tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    worlds, enough = tmp_path / "worlds", tmp_path / "enough"
    endpoint = free_address()
    switch = SwitchProcess()
    switch.start()

    def agent() -> Program:
        command = [sys.executable, "-m", "fanin", "run", "--switch", switch.address]
        command += ["--nnodes", "3:4", "--nproc-per-node", "1", "--max-restarts", "10"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic"]
        command += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1"]
        command += ["--monitor-interval", "0.1", str(tmp_path / "elastic.py")]
        # A store of each round's own: where the shared one is, torch 2.15 does not tell agents that
        # come later, and all fail after a minute.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Program(command, own | {"WORLDS": str(worlds), "ENOUGH": str(enough)})

    def trains_with(size: int) -> None:
        def seen() -> bool:
            met = worlds.read_text().split() if worlds.exists() else []
            return met[-1:] == [str(size)]

        try:
            wait_until(seen, f"a world of {size}", 2 * DEADLINE)
        except AssertionError:
            print(*(each.text() for each in agents), sep="\n--\n")
            raise

    agents = [agent()]
    try:
        # The first one has the store: it is to be there, and to stay.
        wait_until(lambda: _listens(endpoint), "the store")
        agents += [agent() for _ in range(3)]
        trains_with(4)
        agents.pop().end()  # a machine with its rank
        trains_with(3)
        agents.append(agent())
        trains_with(4)
        enough.touch()
        for each in agents:
            assert each.wait() == 0, each.text()
    finally:
        for each in agents:
            each.end()
        switch.kill()


def _listens(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


# Ends of all kinds

GROUP = """
dist.init_process_group(
    "fanin", init_method=os.environ["MEET"], rank=rank, world_size=world_size
)
dist.all_reduce(torch.ones(10))
dist.all_reduce(torch.ones(10), async_op=True).wait()
dist.broadcast(torch.ones(10), 0)
"""

NOT_DESTROYED = GROUP + 'say("end")\n'

FORKS = (
    GROUP
    + """
child = os.fork()
if child == 0:
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
say("child", status)
tensor = torch.ones(10)
dist.all_reduce(tensor)
say("sum", tensor[0].item())
dist.destroy_process_group()
"""
)


def group_of_two(start: Start, switch: str, tmp_path: Path, *sources: str) -> list[Program]:
    meet = f"file://{tmp_path}/meet"
    return [
        start(BY_TORCH + source, rank, 2, switch, MEET=meet) for rank, source in enumerate(sources)
    ]


def test_a_program_that_ends_without_destroying_its_group_ends(
    start: Start, switch: str, tmp_path: Path
) -> None:
    for rank in group_of_two(start, switch, tmp_path, NOT_DESTROYED, NOT_DESTROYED):
        rank.line("^end$")
        assert rank.wait() == 0
        assert rank.lines[-1] == "end"


def test_a_forked_child_that_exits_ends_and_leaves_the_group_to_its_parent(
    start: Start, switch: str, tmp_path: Path
) -> None:
    for rank in group_of_two(start, switch, tmp_path, FORKS, FORKS):
        rank.line("^child 7$")
        rank.line("^sum 2.0$")
        assert rank.wait() == 0


INTERRUPTED = {
    "joining": BY_NUMPY + 'say("here")\nconnect(job="nobody")\n',
    "waiting for the switch": BY_NUMPY + 'connect(job="nobody", switch=os.environ["NOBODY"])\n',
    # Python ignores an interrupt that comes as a module's lock is freed.
    "meeting": BY_TORCH + 'import fanin.torch.backend, secrets\nsay("here")\n' + GROUP,
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_control_c_ends_a_rank_that_waits_for_others(
    start: Start, switch: str, tmp_path: Path, where: str
) -> None:
    nobody = free_address()
    meet = f"file://{tmp_path}/meet"
    rank = start(INTERRUPTED[where], 1, 2, switch, NOBODY=nobody, MEET=meet)
    rank.line("here|waiting for the switch")
    rank.signal(signal.SIGINT)
    assert rank.wait() == -signal.SIGINT
    assert rank.lines[-1] == "KeyboardInterrupt"


LOOPS = (
    GROUP
    + """
say("running")
while True:
    dist.all_reduce(torch.ones(100_000))
"""
)


def test_control_c_in_all_reduce_ends_the_rank_and_is_told_to_the_others(
    start: Start, switch: str, tmp_path: Path
) -> None:
    ranks = group_of_two(start, switch, tmp_path, LOOPS, LOOPS)
    for rank in ranks:
        rank.line("^running$")
    ranks[1].signal(signal.SIGINT)
    assert ranks[1].wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in ranks[1].lines[-1]
    assert ranks[0].wait() == 1
    assert "fanin.errors.RankLeft: rank 1 left the job" in ranks[0].text()


def test_control_c_of_fanin_run_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(TRAINS)
    command = [sys.executable, "-m", "fanin", "run", "--nproc-per-node", "2"]
    run = Program([*command, str(tmp_path / "loops.py")], {"PLAN": "[[9, 0]]"})
    try:
        for _ in range(2):
            run.line("joined after")
        family = psutil.Process(run.process.pid).children(recursive=True)
        assert len(family) >= 2
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        assert run.wait() != 0
        assert not psutil.wait_procs(family, DEADLINE)[1]
    finally:
        run.end()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["3", "--switch", "box:1"], "--heartbeat-timeout is for the switch of this launcher"),
        (["0"], "no positive number of seconds"),
        (["five"], "no positive number of seconds"),
    ],
)
def test_the_switch_of_fanin_run_takes_its_heartbeat_timeout(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "nothing.py"
    program.write_text("")
    with pytest.raises(SystemExit) as ended:
        launch.run(["--heartbeat-timeout", *options, str(program)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
