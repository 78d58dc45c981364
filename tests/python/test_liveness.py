"""Who lives and who does not: named at once when dead, waited for when only silent."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import fanin
import numpy as np
import pytest
from conftest import SwitchProcess
from fanin import errors
from fanin_lab import netlab
from fanin_lab.netlab import INTERFACE, SWITCH, SWITCH_ADDRESS, Netlab
from laboratory import needs_lab
from programs import BY_NUMPY, Program, Start
from ranks import DEADLINE, wait_until

# Nothing is found out by silence within a test.
NEVER = "3600"


@pytest.fixture
def patient_switch() -> Iterator[str]:
    process = SwitchProcess("--heartbeat-timeout", NEVER)
    process.start()
    yield process.address
    process.kill()


SUMS = """
group = connect(job="lives")
say("joined")
while True:
    group.all_reduce(np.ones(1000, np.float32))
"""


def joined(programs: list[Program]) -> None:
    for program in programs:
        program.line("^joined$")


def test_a_killed_rank_is_named_by_its_connection_alone(start: Start, patient_switch: str) -> None:
    ranks = [start(BY_NUMPY + SUMS, rank, 3, patient_switch) for rank in range(3)]
    joined(ranks)
    ranks[1].kill()
    for rank in (0, 2):
        assert ranks[rank].wait() == 1
        assert "fanin.errors.RankLost: rank 1 is lost" in ranks[rank].text()


HELPED = """
child = os.fork()
if child == 0:
    time.sleep(3600)
say("joined")
while True:
    group.all_reduce(np.ones(1000, np.float32))
"""


def test_a_killed_rank_is_named_though_a_process_that_it_forked_lives_on(
    start: Start, patient_switch: str
) -> None:
    other = start(BY_NUMPY + SUMS, 0, 2, patient_switch)
    source = BY_NUMPY + SUMS.partition("say")[0] + HELPED
    dying = start(source, 1, 2, patient_switch)
    joined([other, dying])
    dying.kill()
    assert other.wait() == 1
    assert "fanin.errors.RankLost: rank 1 is lost" in other.text()


FORKS = """
group = connect(job="lives")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
array = np.ones(10, np.float32)
group.all_reduce(array)
say("sum", array[0])
group.close()
"""


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(
    start: Start, patient_switch: str
) -> None:
    ranks = [start(BY_NUMPY + FORKS, rank, 2, patient_switch) for rank in range(2)]
    for rank in ranks:
        rank.line("^sum 2.0$")
        assert rank.wait() == 0


def test_a_rank_that_leaves_is_named_though_nobody_asks_for_long(patient_switch: str) -> None:
    groups: list[fanin.Group] = []

    def join(rank: int) -> None:
        groups.append(fanin.connect(patient_switch, job="leaves", rank=rank, world_size=2))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    first, second = groups
    second.close()
    # Heartbeats, by which it was known before, come every 12 minutes.
    with pytest.raises(errors.RankLeft) as caught:
        first.all_reduce_async(np.ones(10, np.float32)).wait(DEADLINE)
    assert caught.value.rank == second.rank
    failure = first.client.failure()
    assert isinstance(failure, errors.RankLeft)
    first.close()
    assert first.client.failure() is None


def test_a_failure_can_be_asked_for_before_anything_fails(
    start: Start, patient_switch: str
) -> None:
    dying = start(BY_NUMPY + SUMS, 1, 2, patient_switch)
    with fanin.connect(patient_switch, job="lives", rank=0, world_size=2) as group:
        joined([dying])
        assert group.client.failure() is None
        dying.kill()
        wait_until(lambda: group.client.failure() is not None, "the rank hears of it")
        failure = group.client.failure()
        assert isinstance(failure, errors.RankLost)
        assert failure.rank == 1


LIMITED = """
group = connect(job="stops")
say("joined")
end = False
while not end:
    array = np.full(1000, rank + 1, np.int32)
    array[0] = rank == 0 and os.path.exists(os.environ["ENOUGH"])
    group.all_reduce(array)
    assert (array[1:] == 3).all(), array
    end = bool(array[0])
say("done")
"""


def test_a_stopped_rank_is_waited_for_and_named_on_standard_error(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    switch = SwitchProcess("--heartbeat-timeout", "1")
    switch.start()
    enough = tmp_path_factory.mktemp("stops") / "enough"
    try:
        ranks = [
            start(BY_NUMPY + LIMITED, rank, 2, switch.address, ENOUGH=str(enough))
            for rank in range(2)
        ]
        joined(ranks)
        ranks[1].signal(signal.SIGSTOP)
        # Said twice, the second time after ten times what a silent rank had before.
        said = r"^fanin: rank 0: waiting for rank 1 in sum of 1000 int32 \(all-reduce \d+\) for "
        ranks[0].line(said)
        ranks[0].line(said)
        ranks[1].signal(signal.SIGCONT)
        enough.touch()
        for rank in ranks:
            rank.line("^done$")
            assert rank.wait() == 0
    finally:
        switch.kill()


def sum_until_it_fails(group: fanin.Group) -> None:
    while True:
        group.all_reduce(np.ones(1000, np.float32))


def test_a_stopped_rank_ends_the_sum_by_its_timeout_and_is_named(start: Start) -> None:
    switch = SwitchProcess("--heartbeat-timeout", "1")
    switch.start()
    try:
        stopped = start(BY_NUMPY + SUMS, 1, 2, switch.address)
        with fanin.connect(switch.address, job="lives", rank=0, world_size=2) as group:
            joined([stopped])
            stopped.signal(signal.SIGSTOP)
            # Only now: it would bound the joining, too.
            group.client.set_timeout(4)
            with pytest.raises(errors.AllReduceTimeout, match="no contribution of rank 1;"):
                sum_until_it_fails(group)
    finally:
        switch.kill()


@needs_lab
def test_a_machine_that_vanishes_is_found_by_the_silence_of_its_kernel() -> None:
    source = BY_NUMPY + SUMS
    with Netlab(2, name="lives") as lab:
        there = partial(lab.popen, SWITCH)
        quick = ("--heartbeat-timeout", "2")
        ranks: list[Program] = []
        with SwitchProcess(*quick, listen=f"{SWITCH_ADDRESS}:4800", popen=there):
            try:
                for number in range(2):
                    said = {"RANK": str(number), "WORLD_SIZE": "2", "FANIN_SWITCH": SWITCH_ADDRESS}
                    inside = ["ip", "netns", "exec", lab.namespace(f"w{number}"), sys.executable]
                    ranks.append(Program([*inside, "-c", source], said))
                joined(ranks)
                # The cable of w1: nothing goes in or out any more, and nobody says so.
                cut = ["ip", "-n", lab.namespace("w1"), "link", "set", INTERFACE, "down"]
                subprocess.run(cut, check=True)
                assert ranks[0].wait() == 1
                assert "fanin.errors.RankLost: rank 1 is lost" in ranks[0].text()
            finally:
                for rank in ranks:
                    rank.end()
    netlab.down("lives")
