"""The binding itself: signals, forks, numbers and time limits, without torch and NumPy."""

from __future__ import annotations

import _thread
import array
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fanin import errors
from fanin._fanin import Client, Pending, Switch, simulated_sum

HANG = 60.0


@pytest.fixture
def switch() -> Iterator[Switch]:
    switch = Switch()
    yield switch
    switch.stop()


def pair(switch: Switch) -> list[Client]:
    with ThreadPoolExecutor() as threads:
        joining = [
            threads.submit(
                Client, [(switch.address, 1.0, None, None)], "job", rank, 2, timeout=HANG
            )
            for rank in range(2)
        ]
        return [client.result(HANG) for client in joining]


def submit(client: Client, notify: bool = False) -> Pending:
    numbers = array.array("i", [1, 2, 3])
    address, length = numbers.buffer_info()
    return client.submit([(address, length)], "int32", "all_reduce", 0, False, numbers, notify)


def test_an_interrupted_join_gives_its_rank_back(switch: Switch) -> None:
    interrupt = threading.Timer(0.3, _thread.interrupt_main)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        Client([(switch.address, 1.0, None, None)], "job", 0, 2, timeout=HANG)
    until = time.monotonic() + 5.0
    while 'fanin_jobs{state="gathering"} 0' not in metrics(switch):
        assert time.monotonic() < until, "rank 0 stays taken"
        time.sleep(0.01)
    for client in pair(switch):
        client.close()


def metrics(switch: Switch) -> str:
    with urllib.request.urlopen(f"http://{switch.address}/metrics") as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (0, 2**40), (2**70, 2), (0, -1), (2, 2)])
def test_a_rank_that_cannot_be_is_out_of_range(switch: Switch, rank: int, world_size: int) -> None:
    with pytest.raises(errors.RankOutOfRange, match=f"rank {rank} in a world of {world_size}"):
        Client([(switch.address, 1.0, None, None)], "job", rank, world_size)


def test_a_rank_that_is_no_number_is_a_type_error(switch: Switch) -> None:
    with pytest.raises(TypeError):
        Client([(switch.address, 1.0, None, None)], "job", "0", 1)  # type: ignore[arg-type]


def test_a_timeout_can_be_changed_either_way(switch: Switch) -> None:
    first, second = pair(switch)
    first.set_timeout(0.5)
    assert first.timeout == 0.5
    first.set_timeout(HANG)
    waiting = submit(first)
    time.sleep(1.0)
    submit(second).wait(HANG)
    waiting.wait(HANG)
    waiting = submit(first)
    first.set_timeout(0.1)
    with pytest.raises(errors.AllReduceTimeout):
        waiting.wait(HANG)
    with pytest.raises(ValueError, match="timeout"):
        first.set_timeout(-1.0)
    first.close()
    second.close()


def test_a_forked_process_has_a_closed_client_and_never_waits(switch: Switch) -> None:
    first, second = pair(switch)
    pending = submit(first, notify=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert first.next_completion() is None
            assert first.statistics()["completed"] == 0
            with pytest.raises(errors.Closed):
                submit(first)
            with pytest.raises(errors.Closed):
                pending.wait()
            assert pending.done()
            first.close()
            status = 0
        finally:
            os._exit(status)
    until = time.monotonic() + 20.0
    ended = (0, 0)
    while ended[0] == 0 and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process hangs")
    assert ended[1] == 0
    # The parent's membership is untouched.
    submit(second).wait(HANG)
    pending.wait(HANG)
    first.close()
    second.close()


SCENARIO = """
[network]
topology = "rack"
hosts = 3
[[job]]
system = "atp"
workers = 2
tensor = "12B"
tensors = 1
"""


def test_a_simulated_job_sums_what_it_is_given() -> None:
    sums, report = simulated_sum(SCENARIO, 1, array.array("f", [1, 2, 3, 0.5, 30, -3]).tobytes())
    assert array.array("f", sums).tolist() == [1.5, 32, 0]
    # 32 is beyond what ATP's fixed factor leaves room for: 21.4.
    assert '"overflows":1' in report


def test_what_a_simulated_job_cannot_sum_is_refused_with_the_cause() -> None:
    numbers = array.array("f", [0.0] * 6)
    with pytest.raises(ValueError, match="sytem"):
        simulated_sum(SCENARIO.replace("system", "sytem"), 1, numbers.tobytes())
    with pytest.raises(ValueError, match="5 elements are not as many for each of 2 workers"):
        simulated_sum(SCENARIO, 1, numbers[:5].tobytes())
    with pytest.raises(ValueError, match="rank 0 has 2 elements of a tensor of 3"):
        simulated_sum(SCENARIO, 1, numbers[:4].tobytes())
    with pytest.raises(ValueError, match="four bytes an element"):
        simulated_sum(SCENARIO, 1, b"123")
    with pytest.raises(ValueError, match="`tensors = 1`"):
        simulated_sum(SCENARIO.replace("tensors = 1", ""), 1, numbers.tobytes())
