"""Subgroups, splits, and groups that come after groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from conftest import Launch
from ranks import Me


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
    return str(backend.getBackendName())


def test_the_backend_is_called_fanin(launch: Launch) -> None:
    assert launch(named, 2).results() == ["fanin", "fanin"]
