"""When something breaks: a typed error, on every rank, within the timeout, that says whom."""

from __future__ import annotations

import http.server
import os
import random
import re
import signal
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess, switch_here
from fanin import _fanin, errors
from fanin._settings import Settings
from ranks import DEADLINE, Failure, Me, Ranks, wait_until
from test_wire import PREAMBLE, SLOT


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
            join(f"127.0.0.1:{server.server_port}", "web", 0, 1, timeout=3600)()
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
    told = next(
        str(future.exception())
        for future in futures
        if isinstance(future.exception(), errors.WorldSizeMismatch)
    )
    assert re.search(r"says world_size [23], .* say [23];", told), told


@pytest.mark.parametrize(
    ("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 4097), (0, 2**40), (2**40, 2**41)]
)
def test_a_rank_that_cannot_be_is_refused_before_anything_is_sent(
    rank: int, world_size: int
) -> None:
    with pytest.raises(errors.RankOutOfRange, match=f"rank {rank} of world size {world_size}"):
        join("no-such-switch:1", "impossible", rank, world_size)()


# A gRPC server of one's own behind TLS, in bytes: HTTP/2 frames (RFC 9113) with literal headers.

SETTINGS, HEADERS, DATA, END_STREAM, ACK = 4, 1, 0, 1, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def answers_in_order(listener: socket.socket, answers: list[bytes]) -> None:
    """Answers the calls of one client with these messages, whatever they ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("switch.pem"))
    context.set_alpn_protocols(["h2"])
    while answers:
        accepted, _ = listener.accept()
        if not accepted.recv(1, socket.MSG_PEEK):  # only to see whether somebody is there
            accepted.close()
            continue
        connection = context.wrap_socket(accepted, server_side=True)
        with connection, connection.makefile("rb") as stream:
            stream.read(24)
            connection.sendall(frame(SETTINGS, 0, 0))
            while answers and len(head := stream.read(9)) == 9:
                length = int.from_bytes(head[:3], "big")
                kind, flags, number = struct.unpack(">BBI", head[3:])
                stream.read(length)
                if kind == SETTINGS and not flags & ACK:
                    connection.sendall(frame(SETTINGS, ACK, 0))
                if kind == DATA and flags & END_STREAM:
                    message = answers.pop(0)
                    began = b"\x88" + b"\x00\x0ccontent-type\x10application/grpc"  # :status 200
                    ended = b"\x00\x0bgrpc-status\x010"
                    connection.sendall(
                        frame(HEADERS, 4, number, began)
                        + frame(DATA, 0, number, struct.pack(">BI", 0, len(message)) + message)
                        + frame(HEADERS, 4 | END_STREAM, number, ended)
                    )
            stream.read()  # until the client hangs up


@pytest.mark.parametrize(
    ("answers", "theirs", "said"),
    [
        # StatusReply: wire_version = 9.
        ([b"\x10\x09"], 9, "wire version 9, this process 6"),
        # Our version, of no protocol.
        ([b"\x10\x06"], 6, "another control protocol, of the same wire version 6"),
        # The status of our version, of protocol "switchml", and
        # JoinReply: refusal: version_mismatch: theirs = 6, ours = 9.
        (
            [b"\x10\x06\x62\x08switchml", b"\x12\x06\x0a\x04\x08\x06\x10\x09"],
            9,
            "wire version 9, this process 6",
        ),
    ],
    ids=["status", "control", "join"],
)
def test_a_switch_of_another_version_is_told_from_ours(
    answers: list[bytes], theirs: int, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answers_in_order, args=(listener, answers), daemon=True)
        thread.start()
        with pytest.raises(errors.ProtocolVersionMismatch) as caught:
            join(f"127.0.0.1:{listener.getsockname()[1]}", "old", 0, 1, timeout=3600)()
        thread.join(DEADLINE)
    assert (caught.value.ours, caught.value.theirs) == (6, theirs)
    assert said in str(caught.value)


def test_ranks_that_never_come_are_named(switch: str) -> None:
    # Only one rank joins: the second of two to give up would name the first, which has left by
    # then.
    with pytest.raises(errors.JoinTimeout) as caught:
        join(switch, "absent", 1, 4, timeout=2)()
    assert caught.value.missing_ranks == [0, 2, 3]
    assert "ranks 0, 2 and 3 did not join" in str(caught.value)
    assert f"at switch {switch} is incomplete after " in str(caught.value)
    assert caught.value.switch == switch
    assert caught.value.waited is not None
    assert caught.value.waited > 1.9
    assert caught.value.tensor is None


def never_comes(me: Me, absent: int) -> None:
    me.init()
    if me.rank == absent:
        me.hear()
    else:
        dist.new_group(timeout=timedelta(seconds=1))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_make_a_group_is_named_within_the_groups_timeout(
    launch: Launch, absent: int
) -> None:
    ranks = launch(never_comes, 2, absent)
    failure = ranks.outcome(1 - absent)  # not after the 30 minutes of the default group
    assert isinstance(failure, Failure)
    assert failure.kind == "JoinTimeout"
    assert failure.fields["missing_ranks"] == [absent]
    assert f"rank {absent}" in failure.message
    ranks.tell(absent, "go")
    ranks.result(absent)


def test_a_pool_that_is_too_small_says_how_much_was_asked_and_is_free() -> None:
    with switch_here(pool_units=64) as switch:
        with pytest.raises(errors.PoolExhausted) as caught:
            _fanin.Client(
                [(switch.address, 1.0, None, None)],
                "big",
                0,
                1,
                Settings(in_flight=4096),
                timeout=5,
            )
        error = caught.value
        assert error.asked > error.free
        assert error.free == 64
        # A slot has 256 elements, as the pool is; a slot of the job may be larger.
        assert error.asked % 4096 == 0
        assert re.search(rf"{error.asked}\b.*\b{error.free}\b", str(error)), error


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
        for array in (ours, theirs):
            assert f"sum of {array.size} {array.dtype}" in str(future.exception())
        assert re.search(r"ranks (0 and 1|1 and 0) disagree", str(future.exception()))
    first.close()
    second.close()


def test_an_empty_array_against_one_that_is_not(switch: str) -> None:
    first, second = pair(switch, "empty")
    empty, full = np.ones(0, np.float32), np.ones(5, np.float32)
    # Nothing is sent of the empty array, so that its own end tells nothing yet.
    assert first.all_reduce(empty) is empty
    handles = [first.all_reduce_async(full.copy())]
    handles += [second.all_reduce_async(full.copy()) for _ in range(2)]
    for handle in handles:
        with pytest.raises(errors.CollectiveMismatch, match="sum of 5 float32"):
            handle.wait()
    first.close()
    second.close()


def empty_or_not(me: Me) -> None:
    me.init(timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(0 if me.rank == 0 else 5))
    dist.all_reduce(torch.ones(5))


def test_an_empty_tensor_against_one_that_is_not(launch: Launch) -> None:
    ranks = launch(empty_or_not, 2)
    for rank in range(2):
        failure = ranks.outcome(rank)
        assert isinstance(failure, Failure)
        assert failure.kind == "CollectiveMismatch"


def served_or_not(me: Me) -> None:
    me.init()
    dist.set_timeout(timedelta(seconds=2))
    dist.all_reduce(torch.ones(5), dist.ReduceOp.SUM if me.rank == 0 else dist.ReduceOp.MAX)


def test_an_op_that_is_served_against_one_that_is_not(launch: Launch) -> None:
    ranks = launch(served_or_not, 2)
    failure = ranks.outcome(0)
    assert isinstance(failure, Failure)
    assert failure.kind == "AllReduceTimeout"
    assert failure.fields["missing_ranks"] == [1]
    assert "all_reduce with a dtype, op or device that the services do not take" in failure.message
    assert "sum of 5 float32 (all-reduce 0)" in failure.message
    assert failure.fields["tensor"] == errors.Tensor(0, 5, "float32", "sum")
    assert failure.fields["waited"] >= 2
    assert isinstance(ranks.outcome(1), Failure)


def patient(me: Me) -> float:
    me.init(timeout=timedelta(seconds=4))
    dist.set_timeout(timedelta(seconds=DEADLINE))
    tensor = torch.ones(1)
    if me.rank == 1:
        me.hear()
    me.say("all-reduce")
    dist.all_reduce(tensor)
    return tensor.item()


def test_the_timeout_of_a_group_can_be_lengthened(launch: Launch) -> None:
    ranks = launch(patient, 2)
    assert ranks.hear(0) == "all-reduce"
    time.sleep(5)  # longer than the timeout that the group was made with
    ranks.tell(1, "go")
    assert ranks.hear(1) == "all-reduce"
    assert ranks.results() == [2, 2]


def test_a_rank_that_leaves_is_named(switch: str) -> None:
    first, second = pair(switch, "leaves")
    handle = first.all_reduce_async(np.ones(10, np.float32))
    second.close()
    with pytest.raises(errors.RankLeft) as caught:
        handle.wait()
    assert caught.value.rank == 1
    assert caught.value.tensor == errors.Tensor(0, 10, "float32", "sum")
    assert caught.value.switch == switch
    assert caught.value.waited is not None
    said = f"this ended the sum of 10 float32 (all-reduce 0) over switch {switch} after"
    assert said in str(caught.value)
    first.close()


def test_a_rank_that_does_not_take_part_is_named(switch: str) -> None:
    first, second = pair(switch, "absent-minded", timeout=2)
    first.all_reduce(np.ones(0, np.float32))  # counts, and waits for nobody
    handles = [first.all_reduce_async(np.ones(n, np.float32), op="avg") for n in (100_000, 7)]
    with pytest.raises(errors.AllReduceTimeout) as caught:
        handles[0].wait(0.25)  # only this wait ends
    error = caught.value
    assert error.tensor == errors.Tensor(1, 100_000, "float32", "avg")
    assert (error.missing_ranks, error.switch, error.waited) == ([1], switch, 0.25)
    assert "within 0.25 s" in str(error)

    said = re.escape(f"average of 100000 float32 (all-reduce 1) over switch {switch} did not ")
    for handle, elements in zip(handles, (100_000, 7), strict=True):
        with pytest.raises(errors.AllReduceTimeout, match=said) as caught:
            handle.wait()
        error = caught.value
        # The one that this error ends, which waited for the one that took too long.
        assert error.tensor == errors.Tensor(1 if elements > 7 else 2, elements, "float32", "avg")
        assert re.search(r"within \d+(\.\d+)? s: .* no contribution of rank 1;", str(error))
        assert ("this ended the average of 7 float32 (all-reduce 2)" in str(error)) == (
            elements == 7
        )
        assert (error.missing_ranks, error.switch) == ([1], switch)
        assert error.waited is not None
        assert error.waited >= 2
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
        failure = ranks.outcome(rank)
        assert isinstance(failure, Failure)
        assert failure.kind == "RankLost"
        assert failure.fields["rank"] == 1
        assert "rank 1 is lost" in failure.message
        number, elements, dtype, op, collective = failure.fields["tensor"]
        assert (elements, dtype, op, collective) == (2_000_000, "float32", "sum", "all_reduce")
        assert f"sum of 2000000 float32 (all-reduce {number})" in failure.message


Sum = Callable[[Any], object]


def by_numpy(me: Me, timeout: float) -> Sum:
    """An all-reduce in place of NumPy arrays, by `fanin.connect`."""
    return fanin.connect(job="by-numpy", rank=me.rank, world_size=2, timeout=timeout).all_reduce


def by_torch(me: Me, timeout: float) -> Sum:
    """The same, by the torch backend."""
    me.init(timeout=timedelta(seconds=timeout))
    return lambda array: dist.all_reduce(torch.from_numpy(array))


both_ways = pytest.mark.parametrize("way", [by_numpy, by_torch])


def endless_loop(me: Me, way: Callable[[Me, float], Sum], timeout: float) -> None:
    all_reduce = way(me, timeout)
    me.say("running")
    while True:
        all_reduce(np.ones(1_000_000, np.float32))


@both_ways
def test_a_switch_that_is_killed_is_reported_within_the_timeout(
    launch: Launch, switch_process: SwitchProcess, way: Callable[[Me, float], Sum]
) -> None:
    ranks = launch(endless_loop, 2, way, 5.0, at=switch_process.address)
    for rank in range(2):
        assert ranks.hear(rank) == "running"
    switch_process.kill()
    for rank in range(2):
        failure = ranks.outcome(rank)
        assert isinstance(failure, Failure)
        assert failure.kind == "SwitchLost"
        assert re.search(r"was lost: gone for \d+\.\d s", failure.message), failure.message
        assert "sum of 1000000 float32 (all-reduce " in failure.message
        assert failure.fields["switch"] == switch_process.address
        assert failure.fields["tensor"].elements == 1_000_000
        assert failure.fields["waited"] > 0


def exact_loop(me: Me, way: Callable[[Me, float], Sum]) -> int:
    """Counts wrong elements over all-reduces, some before and some after the switch restarts."""
    all_reduce = way(me, 40)
    base = np.arange(500_000, dtype=np.int32)
    wrong = after = 0
    restarted = False
    while after < 10:
        array = base * (me.rank + 1)
        all_reduce(array)
        wrong += int((array != 3 * base).sum())
        if not restarted:
            me.say("running")
            # All ranks stop after the same number: rank 0 decides, and says so with the next sum.
            decision = flag(me)
            all_reduce(decision)
            restarted = bool(decision[0])
        else:
            after += 1
    return wrong


def flag(me: Me) -> Any:
    heard = me.rank == 0 and me.parent.poll()
    return np.array([1 if heard else 0], dtype=np.int32)


@both_ways
def test_sums_are_exact_across_a_restart_of_the_switch(
    launch: Launch, switch_process: SwitchProcess, way: Callable[[Me, float], Sum]
) -> None:
    ranks = launch(exact_loop, 2, way, at=switch_process.address)
    exact_across_a_restart(ranks, switch_process)


def exact_across_a_restart(ranks: Ranks, process: SwitchProcess) -> None:
    """Kills the process while two ranks are in `exact_loop`, and starts it again."""
    for _ in range(3):
        for rank in range(2):
            assert ranks.hear(rank) == "running"
    process.kill()
    process.start()
    exact_to_the_end(ranks)


def exact_without(ranks: Ranks, switch: SwitchProcess, by: signal.Signals) -> None:
    """Kills or stops the switch for good while two ranks are in `exact_loop`."""
    for _ in range(3):
        for rank in range(2):
            assert ranks.hear(rank) == "running"
    assert switch.process is not None
    switch.process.send_signal(by)
    exact_to_the_end(ranks)


def exact_to_the_end(ranks: Ranks) -> None:
    """Tells `exact_loop` what happened; its last sums come after that."""
    ranks.tell(0, "it was killed")
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


def test_packets_that_are_not_for_a_switch_are_counted_by_reason() -> None:
    with switch_here() as noisy:
        host, port = noisy.address.split(":")

        def dropped() -> dict[str, int]:
            with urllib.request.urlopen(f"http://{noisy.address}/metrics", timeout=5) as page:
                text = page.read().decode()
            found = re.findall(r'^fanin_packets_dropped_total\{reason="(\w+)"\} (\d+)$', text, re.M)
            return {reason: int(count) for reason, count in found if count != "0"}

        # docs/wire.md: magic, version, kind, job, generation, worker, shard; then a slot's header.
        preambles = {
            "malformed": (0xBEEF, 1, 1, 7, 0, 0, 0),
            "version": (0xFA51, 1, 1, 7, 0, 0, 0),
            "unknown_job": (0xFA51, 6, 1, 7, 0, 0, 0),
            "out_of_range": (0xFA51, 6, 1, 7, 0, 0, 200),
        }
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for fields in preambles.values():
                udp.sendto(PREAMBLE.pack(*fields) + bytes(SLOT.size), (host, int(port)))
        wait_until(lambda: dropped() == dict.fromkeys(preambles, 1), "each is counted once", 10)


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(errors.PoolExhausted("12 asked", asked=12, free=3)))
    assert (str(error), error.asked, error.free) == ("12 asked", 12, 3)
    lost = pickle.loads(pickle.dumps(errors.RankLost("gone", rank=os.getpid())))
    assert lost.rank == os.getpid()
    tensor = errors.Tensor(4, 7, "float32", "sum")
    late = errors.AllReduceTimeout("late", missing_ranks=[2], tensor=tensor, waited=1.5)
    late = pickle.loads(pickle.dumps(late))
    assert (late.tensor, late.waited, late.missing_ranks) == (tensor, 1.5, [2])
