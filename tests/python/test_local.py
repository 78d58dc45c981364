"""The ranks of one machine sum in shared memory, before and after the network."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fanin.errors import RankLost
from fanin.torch.works.collectives import DTYPES
from ranks import DEADLINE, Me, Ranks

Launch = Callable[..., Ranks]

ELEMENTS = [0, 1, 257, 5000, 2_000_003]
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


def join(me: Me, machines: str | None = None) -> Any:
    """Makes the default group without a switch; returns its client.

    `machines` has a letter for the machine of each rank; without, it is known who shares one.
    """
    os.environ["FANIN_SWITCH"] = ""
    os.environ.pop("FANIN_MACHINE", None)
    if machines is not None:
        os.environ["FANIN_MACHINE"] = machines[me.rank]
    me.init()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return backend._channel._client


def summed(me: Me, machines: str | None) -> tuple[str, list[bytes], list[str]]:
    """What became of tensors of all types; where they were summed; what is not as expected."""
    client = join(me, machines)
    # All have mapped it, so that nobody can find it any more.
    assert not list(Path("/dev/shm").glob(f"fanin-*{client.job.split('#')[1]}*"))
    world = range(me.world_size)
    got, wrong = [], []
    for dtype in DTYPES:
        for elements in ELEMENTS:
            # Whole numbers, whose sums are exact in every type and on the wire nearly so.
            tensors = [(torch.arange(elements) % 7 + rank).to(dtype) for rank in world]
            ours = tensors[me.rank].clone()
            dist.all_reduce(ours)
            expected = torch.stack(tensors).double().sum(0)
            if not torch.allclose(ours.double(), expected, rtol=0, atol=1e-4):
                wrong.append(f"{elements} {dtype}")
            got.append(ours.contiguous().view(torch.uint8).numpy().tobytes())
            if dtype.is_floating_point:
                ours = tensors[me.rank].clone()
                dist.all_reduce(ours, dist.ReduceOp.AVG)
                if not torch.allclose(
                    ours.double(), expected / me.world_size, rtol=2**-8, atol=1e-4
                ):
                    wrong.append(f"mean of {elements} {dtype}")
    return client.switch, got, wrong


@pytest.mark.parametrize(
    "machines",
    [None, "aabb", "abab", "aaab"],
    ids=["one machine", "two", "in turn", "three and one"],
)
def test_sums_of_all_types_are_right_and_have_the_same_bits(
    launch: Launch, machines: str | None
) -> None:
    results = launch(summed, 4, machines).results()
    for switch, got, wrong in results:
        assert not wrong
        assert got == results[0][1]
        assert (switch == "") == (machines is None)


def two_columns(me: Me) -> tuple[int, int]:
    client = join(me, "aabb")
    dist.all_reduce(torch.ones(1_000_000))
    statistics = client.statistics()
    return statistics["completed"], statistics["packets_sent"]


def test_each_rank_of_a_machine_sends_its_part_once(launch: Launch) -> None:
    sent = [packets for _, packets in launch(two_columns, 4).results()]
    # Half a tensor of 4 MB a rank, in packets of at least 1,024 bytes (and of 8 KiB on loopback).
    assert all(0 < packets <= 2_000_000 / 1024 * 1.1 for packets in sent), sent


def sum_until_lost(me: Me, machines: str | None, victim: int) -> tuple[type, int | None]:
    join(me, machines)
    if me.rank != victim:
        me.say("here")
    tensor, part = torch.ones(800_000), torch.ones(200_000)
    whole = torch.ones(200_000)
    try:
        while True:
            tensor.fill_(1)
            dist.all_reduce(tensor)
            assert bool((tensor == me.world_size).all()), "a wrong sum"
            dist.reduce_scatter_single(part, tensor)
            assert bool((part == me.world_size**2).all()), "a wrong sum"
            dist.broadcast(part.mul_(me.rank), 1)
            assert bool((part == me.world_size**2).all()), "of another rank"
            dist.all_gather_single(whole, part[:50_000].fill_(me.rank))
            assert whole[::50_000].tolist() == list(range(me.world_size))
            if me.rank == victim:
                me.say("summed")
    except Exception as error:
        return type(error), getattr(error, "rank", None)


@pytest.mark.parametrize(("machines", "victim"), [(None, 0), (None, 2), ("aabb", 1), ("aabb", 3)])
def test_a_killed_rank_is_named_and_no_sum_is_wrong(
    launch: Launch, machines: str | None, victim: int
) -> None:
    ranks = launch(sum_until_lost, 4, machines, victim)
    assert ranks.hear(victim) == "summed"
    ranks.kill(victim)
    for rank in {0, 1, 2, 3} - {victim}:
        assert ranks.hear(rank) == "here"
        assert ranks.result(rank) == (RankLost, victim)


def sum_in_one_column_until_lost(me: Me) -> tuple[type, int | None]:
    join(me, "aabb")
    # So small that the first column has all of it, and the second none.
    tensor = torch.ones(1000)
    try:
        while True:
            dist.all_reduce(tensor.fill_(1))
            assert bool((tensor == me.world_size).all()), "a wrong sum"
            if me.rank == 3:
                me.say("summed")
    except Exception as error:
        return type(error), getattr(error, "rank", None)


def test_a_killed_rank_is_named_by_other_machines_although_its_column_has_nothing_to_do(
    launch: Launch,
) -> None:
    ranks = launch(sum_in_one_column_until_lost, 4)
    assert ranks.hear(3) == "summed"
    ranks.kill(3)
    assert [ranks.result(rank) for rank in range(3)] == [(RankLost, 3)] * 3


def hide_shared_memory(options: str) -> None:
    """Gives this process a /dev/shm of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[int] = [libc.unshare(CLONE_NEWNS)]
    made.append(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    made.append(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options.encode()))
    assert made == [0, 0, 0], "a /dev/shm of its own"


def alone(me: Me, options: str, machines: str | None) -> tuple[str, float, list[str]]:
    hide_shared_memory(options)
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fanin").addHandler(handler)
    client = join(me, machines)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    part = torch.ones(50_000)
    dist.reduce_scatter_single(part, tensor.clone())
    dist.all_gather_single(tensor, part / 2)
    return client.switch, tensor.sum().item(), warned


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(
    ("options", "machines"),
    [("size=64k", "aa"), ("size=64m", None)],
    ids=["too small", "one each, as containers have"],
)
def test_without_a_shared_dev_shm_the_ranks_sum_over_loopback(
    launch: Launch, options: str, machines: str | None
) -> None:
    warned: list[str] = []
    for switch, total, said in launch(alone, 2, options, machines).results():
        assert switch.startswith("127.0.0.1:")
        assert total == 200_000
        warned += said
    assert bool(warned) == (machines is not None)
    assert all("Give /dev/shm more room" in text for text in warned)


def disagree(me: Me) -> str:
    join(me)
    with pytest.raises(Exception, match="disagree") as raised:
        dist.all_reduce(torch.ones(100 + me.rank))
    return type(raised.value).__name__


def test_different_tensors_are_told(launch: Launch) -> None:
    assert launch(disagree, 2).results() == ["CollectiveMismatch"] * 2


def fork_and_sum(me: Me) -> float:
    join(me)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        # Nothing of the memory is here, and nothing of it is left with this one's end.
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(tensor)
    return tensor.sum().item()


def test_a_forked_child_leaves_the_memory_alone(launch: Launch) -> None:
    assert launch(fork_and_sum, 2).results(DEADLINE) == [400_000.0] * 2
