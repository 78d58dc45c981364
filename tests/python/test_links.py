"""Sums over real links: some lose packets, some are cut, and some have unequal MTUs."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin.torch import backend
from fanin_lab import netlab
from fanin_lab.netlab import INTERFACE, SWITCH, SWITCH_ADDRESS, Netlab, address
from laboratory import NAME, needs_lab
from ranks import DEADLINE, Failure, Me
from torch._C._distributed_c10d import FileStore

pytestmark = pytest.mark.usefixtures("laboratory_cleared")


def sums_over_the_laboratory(me: Me, namespaces: list[str], meeting: str) -> list[float]:
    netlab.enter(namespaces[me.rank])
    # The machine's name has no address here: Gloo's own choice would be loopback.
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    store = FileStore(meeting, me.world_size)
    me.init("fanin", store=store, rank=me.rank, world_size=me.world_size)
    tensor = torch.arange(200_000, dtype=torch.float32).remainder_(113).mul_(me.rank + 1)
    dist.all_reduce(tensor)
    expected = np.arange(200_000) % 113 * sum(range(1, me.world_size + 1))
    return [float(np.abs(tensor.numpy() - expected).max()), float(tensor.double().sum())]


@needs_lab
def test_an_all_reduce_over_links_that_lose_a_hundredth_is_exact(
    launch: Launch, tmp_path: Any
) -> None:
    with Netlab(2, loss=0.01, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            spaces = [lab.namespace("w0"), lab.namespace("w1")]
            ranks = launch(sums_over_the_laboratory, 2, spaces, str(tmp_path / "store"), at=listen)
            first, second = ranks.results()
        assert netlab.describe(NAME)["packets_lost"] > 0
    assert first == second
    assert first[0] == 0


def sums_by_own_services(me: Me, namespaces: list[str], meeting: str) -> list[float]:
    netlab.enter(namespaces[me.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    # The links have no rate. A busy machine would be measured in its place, and might not sum.
    os.environ["FANIN_RATE"] = "assumed"
    store = FileStore(meeting, me.world_size)
    limit = timedelta(seconds=20)
    me.init("fanin", store=store, rank=me.rank, world_size=me.world_size, timeout=limit)
    tensor = torch.arange(200_000, dtype=torch.int32) * (me.rank + 1)
    dist.all_reduce(tensor)
    ranks = me.world_size * (me.world_size + 1) // 2
    assert torch.equal(tensor, torch.arange(200_000, dtype=torch.int32) * ranks)
    plan = backend.plan()
    assert plan is not None
    return [service["share"] for service in plan["services"]]


def cut_off(namespace: str, protocol: str) -> None:
    """Let nothing of a protocol in there that comes from w0."""
    rule = f"ip saddr {address('w0')} meta l4proto {protocol} drop"
    rules = f"table inet cut {{ chain in {{ type filter hook input priority 0; {rule}; }}; }}"
    command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
    subprocess.run(command, input=rules, text=True, check=True)


@needs_lab
@pytest.mark.parametrize(
    ("protocol", "there", "back"),
    [
        ("udp", "UDP: no packet gets there", "UDP: no packet comes back"),
        ("tcp", "TCP: no answer", "TCP: no answer"),
    ],
)
def test_a_machine_that_does_not_reach_one_service_is_named_on_all_ranks(
    launch: Launch, tmp_path: Any, protocol: str, there: str, back: str
) -> None:
    with Netlab(3, name=NAME) as lab:
        spaces = [lab.namespace(f"w{i}") for i in range(3)]
        cut_off(spaces[1], protocol)
        ranks = launch(sums_by_own_services, 3, spaces, str(tmp_path / "store"), at="")
        outcomes = [ranks.outcome(rank) for rank in range(3)]
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.kind == "SwitchUnreachable"
        assert outcome.message == outcomes[0].message
    places = {i: rf"rank {i} on \S+ \({re.escape(address(f'w{i}'))}\)" for i in range(3)}
    for asks, owner, cause in ((0, 1, there), (1, 0, back)):
        at = rf"at {re.escape(address(f'w{owner}'))}:\d+"
        pair = rf"{places[asks]} does not reach the service of {places[owner]} {at} \({cause}"
        assert re.search(pair, outcomes[0].message), outcomes[0].message
    assert "rank 2" not in outcomes[0].message
    assert "firewall" in outcomes[0].message


def sums_until_it_fails(me: Me, namespaces: list[str], meeting: str) -> None:
    netlab.enter(namespaces[me.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = FileStore(meeting, me.world_size)
    limit = timedelta(seconds=DEADLINE)
    me.init("fanin", store=store, rank=me.rank, world_size=me.world_size, timeout=limit)
    while True:
        dist.all_reduce(torch.ones(200_000))
        me.say("summed")


@needs_lab
def test_a_firewall_that_closes_later_is_named_by_who_is_cut_off(
    launch: Launch, tmp_path: Any
) -> None:
    with Netlab(2, name=NAME) as lab:
        spaces = [lab.namespace(f"w{i}") for i in range(2)]
        ranks = launch(sums_until_it_fails, 2, spaces, str(tmp_path / "store"), at="")
        for rank in range(2):
            assert ranks.hear(rank) == "summed"
        cut_off(spaces[1], "udp")
        outcomes = []
        for rank in range(2):
            while (told := ranks.next(rank))[0] == "said":
                pass
            outcomes.append(told[1])
    # The other one may hear of it by its end.
    (named, *_) = [o for o in outcomes if o.kind == "SwitchUnreachable"]
    ways = ((1, "gets there", 0), (0, "comes back", 1))
    pairs = (
        rf"switch {re.escape(address(f'w{there}'))}:\d+ .*"
        rf"\(UDP: no packet {cause}, from {re.escape(address(f'w{here}'))}\)"
        for there, cause, here in ways
    )
    assert any(re.search(pair, named.message) for pair in pairs), named.message


@needs_lab
def test_machines_whose_links_have_unequal_mtus_sum(launch: Launch, tmp_path: Any) -> None:
    with Netlab(2, name=NAME) as lab:
        spaces = [lab.namespace("w0"), lab.namespace("w1")]
        # Wider than what it hangs on: its long packets are lost, and nobody says so.
        command = ["ip", "-n", spaces[0], "link", "set", "dev", INTERFACE, "mtu", "9000"]
        subprocess.run(command, check=True)
        ranks = launch(sums_by_own_services, 2, spaces, str(tmp_path / "store"), at="")
        assert ranks.results() == [[0.5, 0.5]] * 2
