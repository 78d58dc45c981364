"""Groups of several backends, splits that leave ranks out, and what a group hands on."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from ranks import Me, sums_on_switch
from test_groups import total
from torch._C import _distributed_c10d as c10d

NCCL_OPTIONS: Any = getattr(c10d, "ProcessGroupNCCL", None)


def is_member(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def some_left_out(me: Me) -> list[Any]:
    seen: list[Any] = []
    group: Any = dist.split_group(split_ranks=[[0, 2]])
    seen.append(is_member(group))
    if is_member(group):
        seen.append([total(me.rank + 1, group), dist.get_world_size(group)])
        inner: Any = dist.split_group(group, [[1]])
        seen.append(is_member(inner))
    seen.append(total(me.rank))  # and the parent goes on
    two: Any = dist.split_group(split_ranks=[[1], [2]])
    seen.append([is_member(two), total(me.rank, two) if is_member(two) else None])
    dist.barrier()
    return seen


def some_left_out_in_detail(me: Me, backend: str) -> list[Any]:
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    me.init(backend)
    return some_left_out(me)


def some_left_out_of(me: Me, backend: str) -> list[Any]:
    me.init(backend)
    return some_left_out(me)


BACKENDS = ["fanin", "cpu:fanin,cuda:gloo", "cpu:gloo,cuda:fanin"]


@pytest.mark.parametrize("body", [some_left_out_of, some_left_out_in_detail])
@pytest.mark.parametrize("backend", BACKENDS)
def test_split_group_with_ranks_in_no_split(launch: Launch, backend: str, body: Any) -> None:
    assert launch(body, 3, backend).results() == launch(some_left_out_of, 3, "gloo").results()


def by_torchs_names(me: Me) -> list[bool]:
    """The method itself, of a plain group of Gloo beside one of ours."""
    me.init("gloo")
    ours: Any = dist.new_group(backend="fanin")
    options: Any = {"ranks": [1], "timeout": timedelta(seconds=60)}
    splits: list[Any] = []
    for group in (dist.group.WORLD, ours):
        assert group is not None
        splits.append(group.split_group(**options))
    return [split is not None for split in splits]


def test_split_group_takes_torchs_keywords(launch: Launch) -> None:
    assert launch(by_torchs_names, 2).results() == [[False] * 2, [True] * 2]


def gloo_options() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device()]
    return options


def with_options(me: Me, backend: str, kind: str | None) -> list[int]:
    """What a program on NCCL or Gloo has in its `pg_options` is for those."""
    kinds: dict[str | None, Any] = {
        None: lambda: None,
        "base": lambda: c10d.Backend.Options("other"),
        "gloo": gloo_options,
        "nccl": lambda: NCCL_OPTIONS.Options(),
        "fanin": lambda: fanin.torch.Options(),
        "none of torch's": lambda: {"high_priority": True},
    }
    me.init(backend, pg_options=kinds[kind]())
    groups = [None, dist.new_group(pg_options=kinds[kind]())]
    if kind != "none of torch's":
        groups.append(dist.split_group(split_ranks=[[0, 1]], pg_options=kinds[kind]()))
    sums = [total(me.rank + 1, group) for group in groups]
    dist.barrier()
    return sums


KINDS = [None, "base", "gloo", "fanin", "none of torch's"]
KINDS += ["nccl"] if NCCL_OPTIONS is not None else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_other_backends_are_ignored(
    launch: Launch, backend: str, kind: str | None
) -> None:
    for sums in launch(with_options, 2, backend, kind).results():
        assert set(sums) == {3}


def of_other_backends(me: Me, default: str, other: str) -> list[Any]:
    """Some of the ranks in groups of a backend that is not the default one's."""
    me.init(default)
    seen: list[Any] = []
    for ranks in ([0, 2], [1], [0, 1, 2]):
        group: Any = dist.new_group(ranks, backend=other, timeout=timedelta(seconds=50))
        if me.rank in ranks:
            gathered: list[Any] = [None] * len(ranks)
            dist.all_gather_object(gathered, me.rank, group=group)
            seen.append([dist.get_backend(group), total(me.rank, group), gathered])
            on_switch = sums_on_switch(group) if len(ranks) > 1 else 0
            assert on_switch == (other == "fanin" and len(ranks) > 1)
    dist.barrier()
    return seen


@pytest.mark.parametrize(("default", "other"), [("gloo", "fanin"), ("fanin", "gloo")])
def test_groups_of_another_backend_than_the_default(
    launch: Launch, default: str, other: str
) -> None:
    everyone = [other, 3, [0, 1, 2]]
    pair = [other, 2, [0, 2]]
    expected = [[pair, everyone], [[other, 1, [1]], everyone], [pair, everyone]]
    assert launch(of_other_backends, 3, default, other).results() == expected


def merged(me: Me) -> Any:
    group: Any = dist.group.WORLD
    assert group is not None
    # Torch counts in the store who comes: a part of it for each merging.
    store = c10d.PrefixStore(f"merging {dist.get_backend()}", group.get_group_store())
    whole = group.merge_remote_group(store, me.world_size, timedelta(seconds=50), "all", "merged")
    tensor = torch.full((3,), me.rank, dtype=torch.int32)
    whole.allreduce([tensor]).wait()
    return [whole.size(), whole.group_name, whole.group_desc, tensor.tolist(), whole.name()]


def merged_on_both(me: Me) -> Any:
    return me.on_both(merged)


def test_groups_are_merged(launch: Launch) -> None:
    for gloo, ours in launch(merged_on_both, 2).results():
        assert ours[:-1] == gloo[:-1] == [2, "all", "merged", [1] * 3]


def recorded(me: Me, backend: str) -> set[str]:
    me.init(backend)
    pair: Any = dist.new_group(group_desc="a pair")
    tensor = torch.ones(2)
    for group in (None, pair):
        # Gloo's on both, and Gloo is who writes.
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        dist.all_to_all_single(torch.empty(2), tensor, group=group)
    text = c10d._dump_fr_trace_json()
    return {str(entry["process_group"][0]) for entry in json.loads(text)["entries"]}


def test_flight_recorder_entries_have_the_groups_name(launch: Launch) -> None:
    gloo = launch(recorded, 2, "gloo").results()
    assert gloo[0] == {"0", "1"}
    assert launch(recorded, 2, "fanin").results() == gloo
