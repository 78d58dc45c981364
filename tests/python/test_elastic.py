"""`fanin run --min-np`: ranks that die end nobody else, and ranks come and go while a job runs."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fanin import launch
from fanin._elastic import FAILURES_MAX, LEAVING_S, LIVED_S, Job, Limits, Start
from fanin._elastic_members import Arrival, Listed, Members, TakenOut
from fanin._hosts import NO_LOGIN, Host
from programs import Program
from test_run import clean_environment, fanin


class InMemory:
    """A store of the launcher's."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def check(self, keys: Sequence[str], /) -> bool:
        return all(key in self.values for key in keys)


@dataclass
class Played:
    """A process that a `Job` has started, as a program would be."""

    start: Start
    members: Members
    all_of_them: list[Played]
    status: int | None = None
    arrival: Arrival | None = None
    met: Listed = field(default_factory=lambda: Listed(0, []))
    has_state: bool = False
    hangs: bool = False

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        """The launcher ends it."""
        if self.status is None:
            self.status = -9
            others = [each for each in self.all_of_them if each.status is None]
            assert not self.has_state or any(each.has_state for each in others), "state is lost"

    def meets(self) -> None:
        """Come to where ranks meet, and go on if all are there."""
        try:
            if self.arrival is None:
                self.arrival = Arrival(self.members, self.start.place, self.met)
            elif (listed := self.arrival.look()) is not None:
                self.met, self.arrival = listed, None
        except TakenOut:
            self.status = 0

    def steps(self) -> None:
        """Take the state, or train: or meet anew, if others are gone or there is another list."""
        if self.hangs:
            return
        somebody_gone = self.members.gone() & set(self.met.places)
        if self.arrival is not None or not self.met.version:
            self.meets()
        elif somebody_gone:
            self.arrival = Arrival(self.members, self.start.place, self.met)
        elif any(
            self.all_of_them[place].met.version < self.met.version for place in self.met.places
        ):
            pass  # it joins those who met, and looks at nothing else meanwhile
        elif self.members.newest() != self.met:
            self.arrival = Arrival(self.members, self.start.place, self.met)
        else:
            # As all have met by this list, rank 0 gives it to each.
            first = self.all_of_them[self.met.places[0]]
            somebody = any(each.has_state for each in self.all_of_them)
            assert first.has_state or self.met.version == 1 or not somebody
            self.has_state = True
            self.members.say_state(self.start.place)


class Play:
    """A `Job` whose processes are played."""

    def __init__(self, limits: Limits) -> None:
        self.members = Members(InMemory())
        self.all: list[Played] = []
        self.said: list[str] = []
        self.job = Job(self._start, self.members, limits, self.said.append)
        self.now = 0.0

    def _start(self, start: Start) -> Played:
        self.all.append(Played(start, self.members, self.all))
        return self.all[-1]

    @property
    def alive(self) -> list[Played]:
        return [each for each in self.all if each.status is None]

    def look(self, named: Sequence[Host], seconds: float = 0.1) -> int | None:
        self.now += seconds
        return self.job.look(self.now, named)

    def settle(self, named: Sequence[Host]) -> int | None:
        """Let all do what they do, until nothing changes any more."""
        for _ in range(20):
            status = self.look(named)
            if status is not None:
                return status
            for each in self.alive:
                each.steps()
        return None

    def lists(self) -> list[list[int]]:
        return [each.met.places for each in self.alive]


HERE = [Host("localhost", 4)]


def test_others_go_on_and_a_rank_is_started_in_the_place_of_one_that_died() -> None:
    play = Play(Limits(2, 4, 600.0))
    play.settle(HERE)
    assert play.lists() == [[0, 1, 2, 3]] * 4
    play.all[1].status = -9
    play.look(HERE)
    assert "process 1 on localhost ended by signal 9" in play.said
    for _ in range(3):
        for each in play.alive[:3]:
            each.steps()
    assert play.lists()[:3] == [[0, 2, 3]] * 3, "before the new one has loaded"
    play.settle(HERE)
    assert play.lists() == [[0, 2, 3, 4]] * 4
    assert play.all[4].start.slot == 1


def test_fewer_than_the_least_wait_and_end_after_a_time() -> None:
    play = Play(Limits(3, 4, 600.0))
    play.settle(HERE)
    few = [Host("localhost", 2)]
    for each in play.all[2:]:
        each.status = -9
    play.settle(few)
    assert play.lists() == [[0, 1, 2, 3]] * 2, "they wait"
    assert all(each.arrival is not None for each in play.alive)
    assert play.look(few, 601.0) == 137
    assert "fewer than 3 ranks (--min-np) were there for 600 s" in play.said[-1]


def test_ranks_come_and_go_with_their_machines() -> None:
    play = Play(Limits(1, 8, 600.0))
    play.settle([Host("a", 2)])
    play.settle([Host("a", 2), Host("b", 2)])
    assert play.lists() == [[0, 1, 2, 3]] * 4
    play.settle([Host("b", 2)])
    assert play.lists() == [[2, 3]] * 2
    play.settle([Host("c", 1)])
    assert play.lists() == [[4]], "it has the state of one that left later"
    assert [each.status for each in play.all] == [0, 0, 0, 0, None]
    assert [each.start.number for each in play.all] == [0, 0, 1, 1, 2]


def test_a_rank_that_does_not_leave_its_machine_is_ended() -> None:
    play = Play(Limits(1, 8, 600.0))
    named = [Host("a", 1), Host("b", 1)]
    play.settle(named)
    play.look(named[:1])
    assert play.all[1].status is None
    play.look(named[:1], LEAVING_S + 1)
    assert play.all[1].status == -9


def test_a_machine_where_all_fail_gets_no_more_ranks() -> None:
    play = Play(Limits(1, 2, 600.0))
    named = [Host("a", 1), Host("b", 1)]
    play.settle(named)
    for _ in range(FAILURES_MAX + 2):
        for each in play.alive:
            if each.start.host.name == "b":
                each.status = 1
        play.settle(named)
    assert [each.start.host.name for each in play.all] == ["a", "b", "b", "b"]
    assert play.lists() == [[0]]
    assert play.look(named) is None


def test_a_machine_that_lets_nobody_in_is_tried_once() -> None:
    play = Play(Limits(1, 2, 600.0))
    named = [Host("a", 1), Host("b", 1)]
    play.look(named)
    play.all[1].status = NO_LOGIN
    play.settle(named)
    assert len(play.all) == 2
    assert "ssh cannot log in there" in play.said[-1]
    assert play.lists() == [[0]]


def test_failures_that_are_far_apart_are_not_in_a_row() -> None:
    play = Play(Limits(1, 2, 600.0))
    for _ in range(FAILURES_MAX + 2):
        play.settle(HERE)
        play.look(HERE, LIVED_S)
        play.alive[-1].status = 1
    play.settle(HERE)
    assert len(play.alive) == 2


def test_ranks_meet_anew_as_often_as_they_may() -> None:
    play = Play(Limits(1, 4, 600.0, resets_max=1))
    play.settle(HERE)
    play.all[3].status = 7
    play.look(HERE)
    assert play.members.newest() == Listed(2, [0, 1, 2])
    assert play.settle(HERE) == 7
    assert "ranks met anew 1 times (--reset-limit)" in play.said[-1]


def test_a_job_of_which_nobody_is_left_ends() -> None:
    play = Play(Limits(1, 4, 600.0))
    play.settle(HERE)
    for each in play.alive:
        each.status = 3
    assert play.look(HERE) == 3
    assert play.said[-1] == "all ranks have ended that had the state of the training"
    assert len(play.all) == 4


def test_a_job_ends_well_with_those_who_took_part() -> None:
    play = Play(Limits(1, 4, 600.0))
    play.settle(HERE)
    play.all[3].status = -9
    play.look(HERE)
    assert len(play.all) == 5
    play.all[0].status = 0
    assert play.look(HERE) is None
    for each in play.all[1:3]:
        each.status = 0
    assert play.look(HERE) == 0, "nobody waits for the one that still loads"


def test_a_job_ends_well_though_a_rank_was_about_to_join() -> None:
    play = Play(Limits(1, 2, 600.0))
    play.settle(HERE)
    play.all[1].status = -9
    play.look(HERE)
    play.all[2].steps()
    play.look(HERE)
    assert play.members.newest() == Listed(3, [0, 2])
    play.all[0].status = 0
    assert play.look(HERE) == 0


def test_a_failure_after_the_first_end_is_the_jobs() -> None:
    play = Play(Limits(1, 2, 600.0))
    play.settle(HERE[:1])
    first, second = play.all
    first.status = 0
    play.look(HERE)
    second.status = 5
    assert play.look(HERE) == 5
    assert len(play.all) == 2, "nobody is started any more"


def test_a_rank_that_meets_nobody_is_ended() -> None:
    play = Play(Limits(1, 2, 600.0))
    play.settle(HERE)
    hangs, other = play.all
    hangs.hangs = True
    other.arrival = Arrival(play.members, 1, other.met)  # its job has failed
    play.settle(HERE)
    assert play.lists() == [[0, 1], [0, 1]]
    play.look(HERE, 601.0)
    play.settle(HERE)
    assert hangs.status == -9
    assert play.lists() == [[1, 2], [1, 2]]


def test_a_rank_that_hangs_while_another_waits_to_join_is_ended() -> None:
    play = Play(Limits(1, 3, 600.0))
    play.settle([Host("localhost", 2)])
    play.all[0].hangs = True
    play.settle([Host("localhost", 3)])
    assert play.members.newest() == Listed(2, [0, 1, 2])
    for _ in range(2):
        play.look(HERE, 601.0)
    play.settle(HERE)
    assert play.all[0].status == -9
    assert play.lists() == [[1, 2, 3]] * 3


def test_others_end_though_a_list_was_not_met_when_the_first_was_through() -> None:
    play = Play(Limits(1, 3, 600.0))
    play.settle([Host("localhost", 2)])
    play.look([Host("localhost", 3)])
    play.all[2].steps()
    play.look(HERE)
    assert play.members.newest() == Listed(2, [0, 1, 2])
    play.all[0].status = 0
    play.settle(HERE)
    assert play.lists() == [[1, 2]] * 2


def test_the_last_rank_with_the_state_is_waited_for_though_its_machine_goes() -> None:
    play = Play(Limits(1, 1, 600.0))
    play.settle([Host("a", 1)])
    play.look([Host("b", 1)])
    for _ in range(4):  # the new one loads for longer than a rank may take to leave
        play.look([Host("b", 1)], LEAVING_S + 1)
    play.settle([Host("b", 1)])
    assert play.lists() == [[1]]
    assert play.all[1].has_state


def test_a_rank_that_seldom_commits_is_not_ended() -> None:
    play = Play(Limits(1, 4, 600.0))
    play.settle([Host("localhost", 2)])
    for each in play.alive:
        each.hangs = True  # in a step that takes longer than all limits
    play.settle([Host("localhost", 3)])
    for _ in range(3):
        assert play.look([Host("localhost", 3)], 601.0) is None
    assert play.members.newest() == Listed(2, [0, 1, 2])
    assert [each.status for each in play.all] == [None] * 3


def test_a_program_that_does_nothing_ends_well() -> None:
    play = Play(Limits(2, 2, 600.0))
    assert play.look(HERE) is None
    for each in play.all:
        each.status = 0
    assert play.look(HERE) == 0


@pytest.mark.parametrize("block", range(4))
def test_all_meet_whatever_dies_and_comes(block: int) -> None:
    for seed in range(block * 75, block * 75 + 75):
        rng = random.Random(seed)
        play = Play(Limits(rng.randint(1, 2), rng.randint(4, 6), 60_000.0))
        named = [Host("a", 2), Host("b", rng.randint(1, 3))]
        status = play.settle(named)
        for _ in range(200):
            chance = rng.random()
            if chance < 0.02 and len(play.alive) > 1:
                rng.choice(play.alive).status = -9
            elif chance < 0.04:
                named[1] = Host("b", rng.randint(0, 3))
            # A minute each, or machines would get no more ranks.
            status = play.look(named, LIVED_S) if status is None else status
            for each in play.alive if status is None else []:
                if rng.random() < 0.4:
                    each.steps()
        if status is None:
            status = play.settle(named)
        if status is None:
            lists = play.lists()
            assert lists == [lists[0]] * len(lists), seed
            assert sorted(lists[0]) == [each.start.place for each in play.alive], seed
            slots = sum(host.slots for host in named)
            assert len(lists) == min(slots, play.job._limits.ranks_max), seed
        else:
            assert "all ranks have ended that had the state" in play.said[-1], seed


TRAIN = """
import os, sys, time
if sys.argv[1]:
    os.environ["FANIN_MACHINE"] = sys.argv[1].format(os.environ["RANK"])
import torch
import fanin.horovod as hvd

enough, place = sys.argv[2], os.environ["RANK"]

def say(line):
    os.write(1, (line + "\\n").encode())  # whole and at once, as others write there, too

hvd.init()
model = torch.nn.Linear(1000, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Average)
state = hvd.elastic.TorchState(model, optimizer, step=0, total=0.0)
with torch.no_grad():
    model.weight.zero_()

@hvd.elastic.run
def train(state):
    say(f"process {place} pid {os.getpid()} is rank {hvd.rank()} of {hvd.size()}")
    while not hvd.broadcast_object(os.path.exists(enough)):
        gradient = float(state.step % 7 + 1)
        optimizer.zero_grad()
        (model(torch.ones(1, 1000)) * gradient).sum().backward()
        optimizer.step()
        state.total -= gradient
        state.step += 1
        # Exact: all ranks have the gradient alike, however many they are.
        assert (model.weight == state.total).all(), (model.weight, state.total)
        summed = hvd.allreduce(torch.full((100,), float(state.step)), op=hvd.Sum, name="steps")
        assert (summed == hvd.size() * state.step).all(), "all ranks are at one step"
        time.sleep(0.01)  # a step's work: with none, steps would fill the log of a slow machine
        state.commit()

train(state)
say(f"process {place} is through after {state.step} steps")
"""
SERVICES = {
    "memory": ("one", []),
    "own services": ("m{}", []),
    "switch": ("m{}", ["--plan=switch"]),
    # §A.3 of ATP: a worker that is started again. A switch and a server are in the launcher.
    "atp": ("m{}", ["--protocol=atp"]),
    "goat": ("m{}", ["--protocol=goat"]),
}


Launched = Callable[[Sequence[str]], Program]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """``launched(command)``: the command in a folder of the test's, and what it started ends."""
    started: list[Program] = []

    def run(command: Sequence[str]) -> Program:
        started.append(Program(command, clean_environment(), str(tmp_path)))
        return started[-1]

    yield run
    for program in started:
        program.end()


@pytest.mark.parametrize("services", SERVICES)
def test_a_training_goes_on_and_takes_in_a_new_rank(
    launched: Launched, tmp_path: Path, services: str
) -> None:
    machine, flags = SERVICES[services]
    (tmp_path / "train.py").write_text(TRAIN)
    enough = tmp_path / "enough"
    words = ["-np", "3", "--min-np", "2", *flags, "train.py", machine, str(enough)]
    program = launched(fanin("run", *words))
    pids = {}
    for _ in range(3):
        found = program.line(r"process (\d) pid (\d+) is rank \d of 3")
        pids[found[1]] = int(found[2])
    os.kill(pids["1"], signal.SIGKILL)
    for _ in range(2):
        assert program.line(r"process [02] pid \d+ is rank (\d) of 2")
    new = {program.line(r"process (\d) pid \d+ is rank (\d) of 3").groups() for _ in range(3)}
    assert new == {("0", "0"), ("2", "1"), ("3", "2")}
    enough.touch()
    steps = {program.line(r"process \d is through after (\d+) steps")[1] for _ in range(3)}
    assert len(steps) == 1
    assert program.wait() == 0


def test_machines_that_a_script_names_come_and_go(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    enough, machines, script = (tmp_path / name for name in ("enough", "machines", "named.sh"))
    machines.write_text("localhost:1\n")
    script.write_text(f"#!/bin/sh\ncat {machines}\n")
    script.chmod(0o755)
    words = ["-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    words += ["--protocol", "switchml", "train.py", "one", str(enough)]
    program = launched(fanin("run", *words))
    program.line("is rank 0 of 1")
    machines.write_text("localhost:2\n")
    for _ in range(2):
        program.line("is rank . of 2")
    machines.write_text("localhost\n")
    program.line("process 1 leaves localhost: its slot is gone")
    program.line("process 0 .* is rank 0 of 1")
    script.write_text("#!/bin/sh\nexit 3\n")
    program.line("--host-discovery-script: .* exit status 3")
    enough.touch()
    program.line("process 0 is through")
    assert program.wait() == 0


NOT_ELASTIC = """
import fanin.horovod as hvd
hvd.init()
raise SystemExit(4)
"""


def test_a_program_that_always_fails_ends_the_job(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NOT_ELASTIC)
    words = ["-np", "2", "--min-np", "1", "train.py"]
    program = launched(fanin("run", *words))
    program.line("ended with status 4")
    assert program.wait() == 4


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--min-np", "1"], "--min-np is for -np"),
        (["-np", "2", "--min-np", "3"], "they must be in this order"),
        (["-np", "2", "--max-np", "1"], "they must be in this order"),
        (["-np", "2", "--min-np", "0"], "1 at least"),
        (["-np", "2", "--reset-limit", "3"], "give --min-np or --max-np"),
        (["-np", "2", "--min-np", "1", "--reset-limit", "-1"], "0 at least"),
        (["-np", "4", "--min-np", "1", "-H", "localhost:2"], "from 1 to the 2 slots"),
        (
            ["-np", "2", "-H", "a:2", "--host-discovery-script", "x"],
            "says what -H says",
        ),
        (
            ["-np", "2", "--host-discovery-script", "x", "--slots-per-host", "0"],
            "--slots-per-host is 0",
        ),
        (["-np", "2", "--min-np", "1", "--protocol", "atp", "-H", "a:2"], "need a switch"),
    ],
)
def test_flags_that_cannot_be_are_told(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.run([*flags, "train.py"])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("services", SERVICES)
def test_a_hundred_kills_and_joins(launched: Launched, tmp_path: Path, services: str) -> None:
    machine, flags = SERVICES[services]
    (tmp_path / "train.py").write_text(TRAIN)
    enough = tmp_path / "enough"
    # A machine on which ranks are killed all the time works all the same.
    patient = (
        "import sys, fanin._elastic as e; e.FAILURES_MAX = 10**6; from fanin.launch import run"
    )
    words = ["-np", "4", "--min-np", "1", *flags, "train.py", machine, str(enough)]
    command = [sys.executable, "-c", f"{patient}; sys.exit(run(sys.argv[1:]))", *words]
    program = launched(command)
    program.line("is rank 0 of 4")
    rng, killed = random.Random(36), set[int]()
    while len(killed) < 100:
        time.sleep(rng.random() * 4)  # at any moment, also while others meet
        # All that have the state of the training; one of them is spared.
        there = {int(pid) for pid in re.findall(r"pid (\d+) is rank", program.text())} - killed
        if len(there) > 1:
            victim = rng.choice(sorted(there))
            killed.add(victim)
            os.kill(victim, signal.SIGKILL)
        assert program.process.poll() is None, program.text()
    enough.touch()
    assert program.wait() == 0, program.text()
    assert program.text().count("is through after") >= 1
