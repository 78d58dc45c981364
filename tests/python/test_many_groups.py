"""Hundreds of groups: what each costs its process, beside Gloo, and what comes back."""

from __future__ import annotations

import gc
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import Options
from ranks import Me, wait_until

GROUPS = 24


class Held(NamedTuple):
    """What a process has of the kernel."""

    threads: int
    descriptors: int


def held() -> Held:
    return Held(*(len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")))


def groups(me: Me, backend: str) -> Held:
    """What many groups of all ranks hold; they give it back once they are destroyed."""
    named: Any = {"pg_options": Options(machine=f"m{me.rank}")} if backend == "fanin" else {}
    me.init(backend, **named)
    tensor = torch.ones(10)

    def more(than: Held) -> Held:
        return Held(*(max(one - other, 0) for one, other in zip(held(), than, strict=True)))

    def all_of(count: int) -> list[Any]:
        made: list[Any] = [dist.new_group(backend=backend, **named) for _ in range(count)]
        for group in made:
            dist.all_reduce(tensor.fill_(1), group=group)
            assert tensor[0] == me.world_size
        return made

    # The first group brings threads of its own, and the default one sums for the first time.
    first = all_of(1)
    dist.barrier()
    before = held()
    made = all_of(GROUPS)
    dist.barrier()
    with_groups = held()
    me.say("made")
    # No rank takes leave while another one counts.
    dist.barrier()
    while made:
        dist.destroy_process_group(made.pop())
    gc.collect()
    # Threads that end, and connections whose other end has just gone, take a moment.
    wait_until(lambda: more(before) <= (0, 0), "all that the groups held is given back")
    dist.barrier()
    dist.destroy_process_group(first[0])
    return Held(*(one - other for one, other in zip(with_groups, before, strict=True)))


def test_many_groups_hold_no_more_than_gloos_and_give_it_back(launch: Launch) -> None:
    def of(backend: str) -> list[Held]:
        ranks = launch(groups, 4, backend, at="")
        # Making them takes most of the time.
        assert [ranks.hear(rank) for rank in range(4)] == ["made"] * 4
        return ranks.results()

    of_gloo, of_fanin = (of(backend) for backend in ("gloo", "fanin"))
    for gloo, fanin in zip(of_gloo, of_fanin, strict=True):
        assert fanin.threads <= gloo.threads, (fanin, gloo)
        assert fanin.descriptors <= gloo.descriptors, (fanin, gloo)
