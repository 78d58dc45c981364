"""When something breaks: a typed error, on every rank, within the timeout, that says whom."""

from __future__ import annotations

import http.server
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import fanin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import _fanin, errors
from ranks import DEADLINE, Failure, Me


def in_threads(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Runs the calls at the same time; the futures are done when this returns."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def join(
    switch: str, job: str, rank: int, world_size: int, timeout: float = 20
) -> Callable[[], fanin.Group]:
    return lambda: fanin.connect(switch, job=job, rank=rank, world_size=world_size, timeout=timeout)


# Joining


def test_no_switch_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(errors.SwitchUnreachable, match=address):
        join(address, "nobody", 0, 1, timeout=5)()


def test_a_web_server_at_the_address() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises((errors.NotASwitch, errors.SwitchUnreachable)) as caught:
            join(f"127.0.0.1:{server.server_port}", "web", 0, 1, timeout=5)()
        assert type(caught.value) is errors.NotASwitch
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_rank_that_is_taken(switch: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        rivals = {pool.submit(join(switch, "twice", 0, 2)) for _ in range(2)}
        # The job waits for rank 1, and one of the two is refused at once.
        (refused,), (admitted,) = wait(rivals, DEADLINE, return_when=FIRST_COMPLETED)
        assert isinstance(refused.exception(), errors.DuplicateRank)
        assert "0" in str(refused.exception())
        with join(switch, "twice", 1, 2)(), admitted.result(DEADLINE):
            pass


def test_ranks_that_disagree_about_the_world_size(switch: str) -> None:
    futures = in_threads(
        join(switch, "sizes", 0, 2, timeout=4), join(switch, "sizes", 1, 3, timeout=4)
    )
    kinds = {type(future.exception()) for future in futures}
    assert errors.WorldSizeMismatch in kinds
    assert type(None) not in kinds


def test_ranks_that_never_come_are_named(switch: str) -> None:
    # One rank only: of two, the second to give up would name the first, which has left by then.
    with pytest.raises(errors.JoinTimeout) as caught:
        join(switch, "absent", 1, 4, timeout=2)()
    assert caught.value.missing_ranks == [0, 2, 3]
    for rank in ("0", "2", "3"):
        assert rank in str(caught.value)


def test_a_pool_that_is_too_small_says_how_much_was_asked_and_is_free() -> None:
    switch = _fanin.Switch(pool_slots=64)
    try:
        with pytest.raises(errors.PoolExhausted) as caught:
            _fanin.Client(switch.address, "big", 0, 1, timeout=5, slots=4096)
        error = caught.value
        assert error.asked > error.free
        assert str(error.asked) in str(error)
        assert str(error.free) in str(error)
    finally:
        switch.stop()


# Disagreeing


def pair(switch: str, job: str, timeout: float = 20) -> list[fanin.Group]:
    return [
        future.result()
        for future in in_threads(*(join(switch, job, rank, 2, timeout) for rank in (0, 1)))
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (np.ones(1000, np.float32), np.ones(1001, np.float32)),
        (np.ones(1000, np.float32), np.ones(1000, np.int32)),
        (np.ones(3, np.int32), np.ones(100_000, np.int32)),
    ],
    ids=["length", "dtype", "very different length"],
)
def test_ranks_that_disagree_are_told(switch: str, ours: Any, theirs: Any) -> None:
    job = f"disagree-{ours.dtype}-{theirs.dtype}-{theirs.size}"
    first, second = pair(switch, job)
    futures = in_threads(
        lambda: first.all_reduce(ours.copy()), lambda: second.all_reduce(theirs.copy())
    )
    for future in futures:
        assert isinstance(future.exception(), errors.CollectiveMismatch)
    first.close()
    second.close()


def test_a_rank_that_leaves_is_named(switch: str) -> None:
    first, second = pair(switch, "leaves")
    handle = first.all_reduce_async(np.ones(10, np.float32))
    second.close()
    with pytest.raises(errors.RankLeft) as caught:
        handle.wait()
    assert caught.value.rank == 1
    first.close()


def test_a_rank_that_does_not_take_part_is_named(switch: str) -> None:
    first, second = pair(switch, "absent-minded", timeout=2)
    began = time.monotonic()
    with pytest.raises(errors.AllReduceTimeout) as caught:
        first.all_reduce(np.ones(100_000, np.float32))
    assert time.monotonic() - began < 10
    assert caught.value.missing_ranks == [1]
    first.close()
    second.close()


# Dying


def loop(me: Me, length: int) -> None:
    me.init(timeout=timedelta(seconds=20))
    tensor = torch.ones(length)
    dist.all_reduce(tensor)
    me.say("running")
    while True:
        dist.all_reduce(tensor.fill_(1))


def test_a_rank_killed_in_mid_all_reduce_is_named_by_the_others(launch: Launch) -> None:
    ranks = launch(loop, 3, 2_000_000)
    for rank in range(3):
        assert ranks.hear(rank) == "running"
    ranks.kill(1)
    for rank in (0, 2):
        failure = ranks.outcome(rank, 30)
        assert isinstance(failure, Failure)
        assert failure.kind == "RankLost"
        assert failure.fields["rank"] == 1
        assert "1" in failure.message


def loop_of_numpy(me: Me, timeout: float) -> None:
    group = fanin.connect(job="dying-switch", rank=me.rank, world_size=2, timeout=timeout)
    me.say("running")
    while True:
        group.all_reduce(np.ones(1_000_000, np.float32))


def test_a_switch_that_is_killed_is_reported_within_the_timeout(
    launch: Launch, switch_process: SwitchProcess
) -> None:
    ranks = launch(loop_of_numpy, 2, 5.0, at=switch_process.address)
    for rank in range(2):
        assert ranks.hear(rank) == "running"
    began = time.monotonic()
    switch_process.kill()
    for rank in range(2):
        failure = ranks.outcome(rank, 30)
        assert isinstance(failure, Failure)
        assert failure.kind == "SwitchLost"
    assert time.monotonic() - began < 15


def exact_loop(me: Me) -> int:
    """Counts wrong elements over all-reduces, some before and some after the switch restarts."""
    group = fanin.connect(job="restarts", rank=me.rank, world_size=2, timeout=40)
    base = np.arange(500_000, dtype=np.int32)
    wrong = after = 0
    restarted = False
    while after < 10:
        array = base * (me.rank + 1)
        group.all_reduce(array)
        wrong += int((array != 3 * base).sum())
        if not restarted:
            me.say("running")
            # All ranks stop after the same number: rank 0 decides, and says so with the next sum.
            restarted = bool(group.all_reduce(flag(me))[0])
        else:
            after += 1
    group.close()
    return wrong


def flag(me: Me) -> Any:
    heard = me.rank == 0 and me.parent.poll()
    return np.array([1 if heard else 0], dtype=np.int32)


def test_sums_are_exact_across_a_restart_of_the_switch(
    launch: Launch, switch_process: SwitchProcess
) -> None:
    ranks = launch(exact_loop, 2, at=switch_process.address)
    for _ in range(3):
        for rank in range(2):
            assert ranks.hear(rank) == "running"
    switch_process.kill()
    switch_process.start()
    ranks.tell(0, "the switch was restarted")
    for rank in range(2):
        while (outcome := ranks.next(rank))[0] == "said":
            pass
        assert outcome == ("ended", 0)


# Noise


def counted(me: Me, rounds: int) -> int:
    group = fanin.connect(job="noise", rank=me.rank, world_size=2, timeout=40)
    wrong = 0
    for round_ in range(rounds):
        array = np.full(300_000, round_ + me.rank, dtype=np.int32)
        group.all_reduce(array)
        wrong += int((array != 2 * round_ + 1).sum())
        if round_ == 0:
            me.say("running")
    group.close()
    return wrong


def test_random_bytes_on_both_ports_do_no_harm(launch: Launch, switch: str) -> None:
    host, port = switch.split(":")
    dice = random.Random(11)
    enough = threading.Event()

    def datagrams() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            while not enough.is_set():
                udp.sendto(dice.randbytes(dice.randrange(1, 1500)), (host, int(port)))

    def streams() -> None:
        while not enough.is_set():
            try:
                with socket.create_connection((host, int(port)), timeout=1) as tcp:
                    tcp.sendall(dice.randbytes(dice.randrange(1, 5000)))
            except OSError:
                pass  # refused or reset: as it should be

    ranks = launch(counted, 2, 20)
    threads = [threading.Thread(target=noise) for noise in (datagrams, streams)]
    for thread in threads:
        thread.start()
    try:
        for rank in range(2):
            assert ranks.hear(rank) == "running"
        assert ranks.results() == [0, 0]
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(errors.PoolExhausted("12 asked", asked=12, free=3)))
    assert (str(error), error.asked, error.free) == ("12 asked", 12, 3)
    lost = pickle.loads(pickle.dumps(errors.RankLost("gone", rank=os.getpid())))
    assert lost.rank == os.getpid()
