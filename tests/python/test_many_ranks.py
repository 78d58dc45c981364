"""More ranks than a switch has places: racks sum for theirs, and the root for the racks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import many_ranks
import numpy as np
import pytest
from conftest import SwitchProcess
from fanin_lab.netlab import SERVER, SERVER_ADDRESS, Netlab, address
from laboratory import NAME, needs_lab
from many_ranks import Protocol, ranks_of_a_rack
from ranks import DEADLINE

# What the root is told, and the switches before it.
OPTIONS: dict[Protocol, tuple[str, ...]] = {
    "switchml": ("--shards", "1"),
    "atp": ("--protocol", "atp"),
}
Popen = Callable[..., "subprocess.Popen[str]"]


def all_sum_exactly(
    protocol: Protocol,
    racks: Sequence[tuple[str, Popen, Popen]],
    root: str,
    of_root: Popen,
    of_each: int,
) -> None:
    """Ranks behind racks, of which each has an address, and who starts what there."""
    own = OPTIONS[protocol]
    world_size = of_each * len(racks)
    with contextlib.ExitStack() as stack:
        top = SwitchProcess(*own, listen=root, popen=of_root)
        stack.enter_context(top)
        programs = []
        for number, (listen, popen_switch, popen_ranks) in enumerate(racks):
            options = (*own, "--upstream", top.address)
            rack = stack.enter_context(SwitchProcess(*options, listen=listen, popen=popen_switch))
            arguments = [rack.address, of_each * number, of_each, world_size, protocol]
            program = popen_ranks(
                [sys.executable, many_ranks.__file__, *map(str, arguments)],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(program.kill)
            programs.append(program)
        results = [json.loads(program.communicate(timeout=4 * DEADLINE)[0]) for program in programs]
    ranks = np.arange(world_size)
    short = np.arange(100) * world_size + ranks.sum()
    expected = {"alike": True, "sum": [[float((ranks % 7).sum())], short.tolist()]}
    assert results == [expected] * len(racks)


@pytest.mark.parametrize(("protocol", "of_each"), [("switchml", 32), ("atp", 27)])
def test_more_ranks_than_one_switch_has_places_for_sum_behind_three(
    protocol: Protocol, of_each: int
) -> None:
    racks: list[tuple[str, Popen, Popen]] = [
        ("127.0.0.1:0", subprocess.Popen, subprocess.Popen) for _ in range(3)
    ]
    all_sum_exactly(protocol, racks, "127.0.0.1:0", subprocess.Popen, of_each)


@pytest.mark.parametrize(("protocol", "places"), [("switchml", 64), ("atp", 32)])
def test_ranks_that_find_no_place_are_told_of_racks(protocol: Protocol, places: int) -> None:
    with SwitchProcess(*OPTIONS[protocol]) as root:
        told = ranks_of_a_rack(root.address, 0, places + 1, places + 1, protocol)
    assert told["alike"]
    assert f"{places + 1} ranks and switches of the job are at the root itself" in told["sum"]
    assert "put switches between (fanin switch --upstream)" in told["sum"]


@needs_lab
@pytest.mark.parametrize("protocol", ["switchml", "atp"])
def test_256_ranks_of_eight_machines_sum_exactly_behind_eight_racks(protocol: Protocol) -> None:
    with Netlab(8, racks=8, name=NAME) as lab:
        racks: list[tuple[str, Popen, Popen]] = [
            (f"{address(f'sw{i}')}:4800", partial(lab.popen, f"sw{i}"), partial(lab.popen, f"w{i}"))
            for i in range(8)
        ]
        of_root = partial(lab.popen, SERVER)
        all_sum_exactly(protocol, racks, f"{SERVER_ADDRESS}:4800", of_root, 32)
