"""Subgroups, splits, and groups that come after groups."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin._settings import Settings
from fanin.torch import DistributedOptimizer
from fanin.torch.rendezvous.membership import Patience, agree
from fanin.torch.rendezvous.rank_list import Listed
from ranks import Me, sums_on_switch
from torch import nn, optim
from torch._C._distributed_c10d import FileStore, HashStore
from torch.nn.parallel import DistributedDataParallel


def total(value: int, group: Any = None) -> int:
    tensor = torch.tensor([value], dtype=torch.int32)
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def subgroups(me: Me) -> None:
    me.init()
    pair = dist.new_group([0, 2])
    everyone = dist.new_group()
    assert total(me.rank) == 3
    if me.rank != 1:
        assert total(me.rank + 1, pair) == 4
    assert total(1, everyone) == 3
    if me.rank != 1:
        dist.destroy_process_group(pair)
    assert total(1) == 3

    split: Any = dist.split_group(split_ranks=[[0, 1], [2]])
    assert total(me.rank + 1, split) == 3
    assert dist.get_backend(split) == "fanin"


def test_new_group_and_split_group(launch: Launch) -> None:
    launch(subgroups, 3).results()


def job_of(group: Any) -> str:
    backend: Any = group._get_backend(torch.device("cpu"))
    return str(backend._channel._client.job)


MEMBERS = [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 3], [1, 2], [0, 1, 2, 3]]
# Not a multiple of a chunk, and longer than a window: the groups' packets are under way together.
ELEMENTS = 200_001


def overlapping(me: Me) -> list[str | None]:
    """Sums in all groups at the same time; each rank begins with another group."""
    me.init()
    groups: list[Any] = [dist.new_group(members) for members in MEMBERS]
    mine = [index for index, members in enumerate(MEMBERS) if me.rank in members]
    # Each rank takes its groups in an order of its own, and each group its sums in one order.
    order = mine[me.rank % len(mine) :] + mine[: me.rank % len(mine)]
    base = torch.arange(ELEMENTS, dtype=torch.int32)
    tensors = {(i, turn): base * (i + 1) + me.rank + turn for i in order for turn in range(3)}
    works = [
        dist.all_reduce(tensors[i, turn], group=groups[i], async_op=True)
        for turn in range(3)
        for i in order
    ]
    for work in works:
        assert work is not None
        work.wait()
    for (i, turn), tensor in tensors.items():
        n = len(MEMBERS[i])
        assert torch.equal(tensor, n * (base * (i + 1) + turn) + sum(MEMBERS[i])), (i, turn)
    for i in mine:
        assert sums_on_switch(groups[i]) == 3
    assert sums_on_switch() == 0
    return [job_of(group) if i in mine else None for i, group in enumerate(groups)]


def test_overlapping_groups_sum_at_the_same_time_each_as_a_job_of_its_own(launch: Launch) -> None:
    jobs = list(zip(*launch(overlapping, 4).results(), strict=True))
    for members, names in zip(MEMBERS, jobs, strict=True):
        assert len(set(names) - {None}) == 1
        assert [rank for rank, name in enumerate(names) if name is not None] == members
    assert len({name for names in jobs for name in names} - {None}) == len(MEMBERS)


def of_a_list(me: Me, lists: list[list[int]]) -> Any:
    """What a rank sums in the group of its list, or which lists it is told of."""
    me.init()
    dist.barrier()  # who is told leaves, and others might still connect to it
    try:
        group: Any = dist.new_group(lists[me.rank])
    except errors.GroupMismatch as mismatch:
        return mismatch.lists if f"{me.rank} was given {lists[me.rank]}" in str(mismatch) else None
    summed = total(me.rank + 1, group)
    # Nobody leaves a rank that is to read its list.
    me.say("summed")
    me.hear()
    return summed


def test_ranks_that_were_given_other_lists_are_told(launch: Launch) -> None:
    every, pair = [0, 1, 2], [0, 1]
    # The first one of the longer list knows, the others hear it from it.
    told = launch(of_a_list, 3, [every, pair, every]).results()
    assert told == [{0: every, 1: pair}, {1: pair, 0: every}, {2: every, 1: pair}]
    ranks = launch(of_a_list, 3, [pair, pair, every])
    for rank in range(2):
        assert ranks.hear(rank) == "summed"
    assert ranks.result(2) == {2: every, 0: pair}
    for rank in range(2):
        ranks.tell(rank, "go")
    assert [ranks.result(rank) for rank in range(2)] == [3, 3]


def test_lists_of_an_attempt_that_ended_are_not_told_to_the_next() -> None:
    store = HashStore()

    def listed(attempt: str, index: int, ranks: list[int]) -> Listed:
        return Listed(store, ranks, index, "a group", attempt)

    every, pair = [0, 1, 2], [0, 1]
    first, other, last = listed("1", 0, every), listed("1", 1, pair), listed("1", 2, every)
    for each in (first, other, last):
        with pytest.raises(errors.GroupMismatch):
            each.look()
    for each in [listed("2", index, every) for index in range(3)]:
        each.look()


def of_some(me: Me) -> int:
    me.init()
    pair: Any = dist.new_group([0, 1])
    if me.rank < 2:
        net = nn.Linear(2, 2)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, pair)
        optimizer.close()
    # Torch names it by how many groups each rank has made.
    return total(1, dist.new_group(timeout=timedelta(seconds=20)))


def test_an_optimizer_of_some_ranks_leaves_the_names_of_later_groups_alone(launch: Launch) -> None:
    assert launch(of_some, 3).results() == [3, 3, 3]


def test_groups_of_one_name_and_other_ranks_never_meet(launch: Launch) -> None:
    ranks = launch(of_a_list, 4, [[0, 1], [0, 1], [2, 3], [2, 3]])
    for rank in range(4):
        assert ranks.hear(rank) == "summed"
        ranks.tell(rank, "go")
    assert ranks.results() == [3, 3, 7, 7]


def again(me: Me) -> list[int]:
    sums = []
    for generation in range(3):
        me.init()
        sums.append(total(generation + 1))
        dist.destroy_process_group()
    return sums


def test_destroy_and_init_again_over_the_same_store(launch: Launch) -> None:
    assert launch(again, 2).results() == [[2, 4, 6]] * 2


def test_two_runs_at_a_time_on_one_switch_do_not_meet(launch: Launch) -> None:
    runs = [launch(again, 2) for _ in range(2)]
    for run in runs:
        assert run.results() == [[2, 4, 6]] * 2


def beside_gloo(me: Me, default: str, other: str) -> tuple[list[float], int]:
    """DDP on a group of another backend than the default one's."""
    me.init(default)
    group = dist.new_group(backend=other)
    torch.manual_seed(6)
    model = DistributedDataParallel(nn.Linear(9, 2), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 9), me.rank + step / 4)).square().mean().backward()
        optimizer.step()
    assert total(1) == total(1, group) == 2
    trained = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return trained.tolist(), sums_on_switch(group)


def test_a_group_of_fanin_beside_one_of_gloo_and_the_reverse(launch: Launch) -> None:
    (ours, sums), _ = launch(beside_gloo, 2, "gloo", "fanin").results()
    (theirs, none), _ = launch(beside_gloo, 2, "fanin", "gloo").results()
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert (sums, none) == (4, 0)


def by_a_file(me: Me, file: str) -> int:
    me.init(init_method=f"file://{file}", rank=me.rank, world_size=me.world_size)
    return total(me.rank + 1)


def test_ranks_that_meet_in_a_file(launch: Launch, tmp_path: Path) -> None:
    assert launch(by_a_file, 2, str(tmp_path / "store")).results() == [3, 3]


def test_rank_0_is_named_if_it_does_not_come_to_the_file(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(errors.JoinTimeout, match="rank 0 did not join") as caught:
        agree(store, 1, 2, "0", Settings(), Patience.of(0.1))
    assert caught.value.missing_ranks == [0]


def mixed(me: Me) -> None:
    me.init("cpu:fanin,cuda:gloo")
    assert total(1) == 2


def test_one_backend_for_each_device(launch: Launch) -> None:
    launch(mixed, 2).results()


def named(me: Me) -> str:
    me.init()
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    dist.barrier()  # a rank that has ended is missed by one that still joins
    return str(backend.getBackendName())


def test_the_backend_is_called_fanin(launch: Launch) -> None:
    assert launch(named, 2).results() == ["fanin", "fanin"]


def lazily(me: Me) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    me.init()
    other = dist.new_group()

    def most(group: Any = None) -> int:
        tensor = torch.tensor([me.rank])
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)  # by Gloo
        return int(tensor.item())

    assert most() == 2
    assert most(other) == 2
    dist.destroy_process_group(other)
    del other
    gc.collect()
    again = dist.new_group()
    assert most(again) == 2
    assert most() == 2


def test_groups_whose_gloo_connects_lazily_stay_apart(launch: Launch) -> None:
    launch(lazily, 3).results()
