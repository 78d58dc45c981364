"""Racks of SwitchML under PyTorch: links that lose packets, and each switch that goes away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin.torch import Options
from fanin_lab.netlab import SERVER, SERVER_ADDRESS, Netlab, address
from laboratory import NAME, needs_lab
from ranks import Me
from test_faults import Sum, both_ways, exact_across_a_restart, exact_loop
from test_links import sums_over_the_laboratory

SHARDS = ("--shards", "1")


class Chain:
    """A root and a rack, as processes that can be killed."""

    def __init__(self) -> None:
        self.root = SwitchProcess(*SHARDS, "--heartbeat-timeout", "20")
        self.root.start()
        self.rack = SwitchProcess(*SHARDS, "--upstream", self.root.address)
        self.rack.start()


@pytest.fixture
def chain() -> Iterator[Chain]:
    running = Chain()
    yield running
    running.rack.kill()
    running.root.kill()


@pytest.mark.parametrize("killed", ["rack", "root"])
@both_ways
def test_sums_are_exact_across_a_restart(
    launch: Launch, chain: Chain, way: Callable[[Me, float], Sum], killed: str
) -> None:
    ranks = launch(one_in_the_rack, 2, [chain.rack.address, chain.root.address], exact_loop, way)
    exact_across_a_restart(ranks, getattr(chain, killed))


def one_in_the_rack(me: Me, switches: list[str], body: Callable[..., Any], *args: Any) -> Any:
    os.environ["FANIN_SWITCH"] = me.switch = switches[me.rank]
    os.environ["FANIN_PLAN"] = "switch"
    return body(me, *args)


@needs_lab
def test_two_racks_whose_links_lose_a_hundredth_sum_exactly(launch: Launch, tmp_path: Any) -> None:
    with Netlab(4, racks=2, loss=0.01, name=NAME) as lab, contextlib.ExitStack() as stack:
        root = f"{SERVER_ADDRESS}:4800"
        stack.enter_context(SwitchProcess(*SHARDS, listen=root, popen=partial(lab.popen, SERVER)))
        for rack in ("sw0", "sw1"):
            listen = f"{address(rack)}:4800"
            options = (*SHARDS, "--upstream", root)
            popen = partial(lab.popen, rack)
            stack.enter_context(SwitchProcess(*options, listen=listen, popen=popen))
        spaces = [lab.namespace(f"w{i}") for i in range(4)]
        switches = [f"{address(lab.switch_of(i))}:4800" for i in range(4)]
        store = str(tmp_path / "store")
        ranks = launch(one_in_the_rack, 4, switches, sums_over_the_laboratory, spaces, store)
        results = ranks.results()
    assert all(result == results[0] for result in results)
    assert results[0][0] == 0


def test_a_broadcast_is_right_in_a_job_with_racks(launch: Launch, chain: Chain) -> None:
    switches = [chain.rack.address, chain.root.address]
    others, root = launch(one_in_the_rack, 2, switches, moved).results()
    assert (others[0], root) == (7.0, [7.0, 2.0])


def moved(me: Me) -> list[float]:
    """What a broadcast of rank 1 and a reduction to it leave; Gloo leaves anything on others."""
    me.init()
    broadcast = torch.full((100_000,), 7.0 * me.rank)
    dist.broadcast(broadcast, src=1)
    reduced = torch.ones(100_000)
    dist.reduce(reduced, dst=1)
    return [broadcast.mean().item(), reduced.mean().item()]


def moved_beside_own_services(me: Me) -> tuple[int, float, float]:
    me.init(pg_options=Options(machine=f"machine {me.rank}", rate="1gbit"))
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    # So large that every service would have a part.
    tensor = torch.full((2_000_000,), 7.0 * me.rank)
    dist.broadcast(tensor, src=1)
    summed = torch.ones(2_000_000)
    dist.all_reduce(summed)
    services = len(backend._channel._client.switch.split(","))
    return services, tensor.mean().item(), summed.mean().item()


def test_a_broadcast_is_right_where_one_of_several_services_is_a_rack(launch: Launch) -> None:
    with (
        SwitchProcess(*SHARDS, "--rate", "1gbit") as root,
        SwitchProcess(*SHARDS, "--upstream", root.address) as rack,
    ):
        results = launch(moved_beside_own_services, 2, at=rack.address).results()
    assert results == [(3, 7.0, 2.0)] * 2
