"""Floats are right to their own magnitude by default, wherever and however they are summed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fanin.horovod as hvd
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin_lab import netlab
from fanin_lab.netlab import INTERFACE, SWITCH, SWITCH_ADDRESS, Netlab
from laboratory import NAME, needs_lab
from ranks import Me, sums_on_switch
from torch._C._distributed_c10d import FileStore

# Bits of the significand, and the smallest number above zero.
FLOATS = {
    torch.float64: (53, 2.0**-1074),
    torch.float32: (24, 2.0**-149),
    torch.float16: (11, 2.0**-24),
    torch.bfloat16: (8, 2.0**-133),
}
# A tensor too long to travel in its own type in every job: several packets for each of 4 ranks.
ELEMENTS = 20_012
# The longest packets are loopback's.
PACKET_MAX = 2048
# An Ethernet packet begins at each multiple: its large element is a neighbour of small ones.
STRIDE = 352


def hard(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Numbers of all magnitudes, with large ones, NaN, infinities and denormals among them."""
    dice = torch.Generator().manual_seed(rank)
    decades = 3 if dtype == torch.float16 else 7
    sizes = torch.rand(ELEMENTS, generator=dice, dtype=torch.float64) * 2 * decades - decades
    values = torch.randn(ELEMENTS, generator=dice, dtype=torch.float64) * 10**sizes
    values[::STRIDE] = 1e4 if dtype == torch.float16 else 1e8
    values[1::STRIDE] = 1e-4 if dtype == torch.float16 else 1e-8
    values[2::STRIDE] = FLOATS[dtype][1]
    if rank == 0:
        values[[5003, 5005]] = math.inf
    if rank == 1:
        values[5001] = math.nan
        values[5005] = -math.inf
    return values.to(dtype)


def expected(dtype: torch.dtype, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums, and how far off they may be.

    The ranks of a machine add up in float32, and there is a rounding to the type in each of at most
    two racks, and in the root.
    """
    parts = torch.stack([hard(dtype, rank) for rank in range(world_size)]).double()
    bits, smallest = FLOATS[dtype]
    magnitudes = parts.abs().sum(0)
    added = world_size * 2.0 ** -max(bits, 24) * magnitudes
    return parts.sum(0), 3 * 2.0**-bits * magnitudes + added + 2 * smallest


def wrong(got: torch.Tensor, sums: torch.Tensor, off: torch.Tensor) -> list[str]:
    found = []
    special = ~sums.isfinite()
    if not torch.equal(got.isnan(), sums.isnan()):
        found.append(f"{int(got.isnan().sum())} NaN for {int(sums.isnan().sum())}")
    if not torch.equal(got[special & ~sums.isnan()].double(), sums[special & ~sums.isnan()]):
        found.append("an infinity")
    worse = ((got.double() - sums).abs() > off) & ~special | (~got.isfinite() & ~special)
    if worse.any():
        at = int(worse.nonzero()[0])
        found.append(f"{int(worse.sum())}: at {at} {got[at]} for {sums[at]}, within {off[at]}")
    return found


def collectives(me: Me) -> tuple[list[str], list[str]]:
    """What is wrong of all sums, and the bits of those that all ranks get."""
    me.init()
    bits, found = [], []
    for dtype in FLOATS:
        sums, off = expected(dtype, me.world_size)
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, me.world_size)):
            tensor = hard(dtype, me.rank)
            dist.all_reduce(tensor, op)
            said = f"{op} of {dtype}: "
            # The mean is rounded once more.
            twice = 2.0 ** -FLOATS[dtype][0] * sums.abs() + FLOATS[dtype][1]
            bound = off if divisor == 1 else off / divisor + twice
            found += [said + what for what in wrong(tensor, sums / divisor, bound)]
            bits.append(digest(tensor))
        tensor = hard(dtype, me.rank)
        dist.reduce(tensor, 2)
        if me.rank == 2:
            found += [f"reduce of {dtype}: {what}" for what in wrong(tensor, sums, off)]
        part = torch.empty(ELEMENTS // me.world_size, dtype=dtype)
        dist.reduce_scatter_single(part, hard(dtype, me.rank))
        mine = slice(me.rank * len(part), (me.rank + 1) * len(part))
        found += [f"scatter of {dtype}: {what}" for what in wrong(part, sums[mine], off[mine])]
        whole = torch.empty(ELEMENTS, dtype=dtype)
        dist.all_gather_single(whole, part)
        found += [f"gathered {dtype}: {what}" for what in wrong(whole, sums, off)]
        bits.append(digest(whole))
        tensor = hard(dtype, me.rank)
        dist.broadcast(tensor, 1)
        if digest(tensor) != digest(hard(dtype, 1)):
            found.append(f"broadcast of {dtype}")
    assert sums_on_switch() > 0
    return found, bits


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def placed(me: Me, place: str, body: Callable[..., Any], *args: Any) -> Any:
    """Sums where the test says: each name is a way to sum."""
    os.environ.pop("FANIN_MACHINE", None)
    machines = {"own services": "abcd", "two machines": "aabb", "three and one": "aaab"}
    if place in machines:
        os.environ["FANIN_MACHINE"] = machines[place][me.rank]
    if place != "a switch":
        os.environ["FANIN_SWITCH"] = ""
    if place.startswith("two machines at "):
        os.environ["FANIN_MACHINE"] = "aabb"[me.rank]
        os.environ["FANIN_SWITCH"] = me.switch
    if place.startswith("racks "):
        os.environ["FANIN_SWITCH"] = place.split()[1 + me.rank // 2]
        os.environ["FANIN_PLAN"] = "switch"
        os.environ["FANIN_MACHINE"] = f"m{me.rank}"
    return body(me, *args)


PLACES = [
    "a switch",
    "own services",
    "one machine",
    "two machines",
    "three and one",
    "two machines at a switch",
]


@pytest.mark.parametrize("place", PLACES)
def test_each_element_is_right_to_its_own_magnitude(launch: Launch, place: str) -> None:
    results = launch(placed, 4, place, collectives).results()
    for found, bits in results:
        assert not found
        assert bits == results[0][1], "the same bits on all ranks"


@pytest.fixture
def racks() -> Iterator[str]:
    """A place where a rack sums for two ranks, and the root for it and two more."""
    with (
        SwitchProcess("--shards", "1") as root,
        SwitchProcess("--shards", "1", "--upstream", root.address) as rack,
    ):
        yield f"racks {rack.address} {root.address}"


def test_each_element_is_right_behind_a_rack(launch: Launch, racks: str) -> None:
    results = launch(placed, 4, racks, collectives).results()
    for found, bits in results:
        assert not found
        assert bits == results[0][1], "the same bits on all ranks"


def over_ethernet(
    me: Me, namespaces: list[str], meeting: str, body: Callable[[Me], Any], wire_dtype: str
) -> Any:
    netlab.enter(namespaces[me.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ["FANIN_WIRE_DTYPE"] = wire_dtype
    store = FileStore(meeting, me.world_size)
    me.init(store=store, rank=me.rank, world_size=me.world_size)
    return body(me)


def of_one(me: Me) -> tuple[list[str], str]:
    sums, off = expected(torch.float32, me.world_size)
    tensor = hard(torch.float32, me.rank)
    dist.all_reduce(tensor)
    return wrong(tensor, sums, off), digest(tensor)


@needs_lab
@pytest.mark.parametrize(("mtu", "elements"), [(1500, STRIDE), (9000, PACKET_MAX)])
def test_packets_of_ethernet_bound_what_is_spoiled_and_by_default_nothing_is(
    launch: Launch, tmp_path: Any, mtu: int, elements: int
) -> None:
    with Netlab(2, mtu=mtu, name=NAME) as lab:
        listen = f"{SWITCH_ADDRESS}:4800"
        spaces = [lab.namespace("w0"), lab.namespace("w1")]
        with SwitchProcess(listen=listen, popen=partial(lab.popen, SWITCH)):
            said: tuple[Any, ...] = (str(tmp_path / "native"), of_one, "native")
            first, second = launch(over_ethernet, 2, spaces, *said, at=listen).results()
            assert not first[0]
            assert first == second
            said = (str(tmp_path / "shared"), spoiled, "shared_exponent")
            for around in launch(over_ethernet, 2, spaces, *said, at=listen).results():
                assert all(1 < len(each) <= elements for each in around)


def prescaled(me: Me) -> list[str]:
    """Horovod's test_horovod_allreduce_prescale: of so few ranks it forgives nothing."""
    hvd.init()
    found = []
    dice = np.random.default_rng(1234)
    for dtype in (torch.float32, torch.float64):
        for dim in (1, 2, 3):
            factor = float(dice.uniform())
            tensor = torch.tensor(dice.integers(-100, 100, [17] * dim)).to(dtype)
            got = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor)
            multiplied = torch.tensor(factor, dtype=dtype) * tensor
            if not torch.equal(got, multiplied * me.world_size):
                off = (got - multiplied * me.world_size).abs().max()
                found.append(f"{dtype}, {dim}: {off}")
    hvd.shutdown()
    return found


@pytest.mark.parametrize("place", ["a switch", "own services", "one machine", "two machines"])
def test_what_horovod_prescales_is_right_to_the_last_bit(launch: Launch, place: str) -> None:
    assert launch(placed, 3, place, prescaled).results() == [[]] * 3


def by_adam(me: Me) -> float:
    """How far a parameter's update is from that on Gloo, in parts of it."""
    updates = []
    for name in ("gloo", "fanin"):
        me.init(name)
        parameter = torch.zeros(ELEMENTS, requires_grad=True)
        optimizer = torch.optim.Adam([parameter], lr=1.0)
        gradient = torch.full((ELEMENTS,), 1e-9 * (me.rank + 1))
        gradient[::STRIDE] = 1e3
        dist.all_reduce(gradient)
        parameter.grad = gradient
        optimizer.step()
        updates.append(parameter.detach().clone())
        dist.barrier()
        dist.destroy_process_group()
    return float(((updates[1] - updates[0]) / updates[0]).abs().max())


def test_adam_s_updates_are_those_on_gloo_beside_large_neighbours(launch: Launch) -> None:
    assert max(launch(by_adam, 2).results()) < 1e-5


def spoiled(me: Me) -> tuple[list[int], list[int]]:
    """Which elements a NaN and an infinity leave not finite."""
    tensor = torch.ones(ELEMENTS)
    if me.rank == 0:
        tensor[5000] = math.nan
        tensor[9000] = math.inf
    dist.all_reduce(tensor)
    assert (tensor[tensor.isfinite()] - 2).abs().max() < 1e-6
    bad = (~tensor.isfinite()).nonzero().flatten().tolist()
    return [at for at in bad if at < 7000], [at for at in bad if at >= 7000]


def where_exponents_are_shared(me: Me) -> tuple[list[int], list[int]]:
    os.environ["FANIN_WIRE_DTYPE"] = "shared_exponent"
    me.init()
    return spoiled(me)


def test_a_nan_spoils_a_packet_at_most_where_exponents_are_shared(launch: Launch) -> None:
    for around in launch(where_exponents_are_shared, 2).results():
        for at, elements in zip((5000, 9000), around, strict=True):
            assert at in elements
            assert elements == list(range(elements[0], elements[-1] + 1))
            assert STRIDE <= len(elements) <= PACKET_MAX, "as settings.md says"
