"""ATP under PyTorch: racks, a server, and each of them that goes away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin_lab import netlab
from fanin_lab.netlab import SERVER, SERVER_ADDRESS, SWITCH, SWITCH_ADDRESS, Netlab, address
from laboratory import NAME, needs_lab
from ranks import Me, sums_on_switch
from test_ddp import BOUNDS, differences, train
from test_faults import Sum, both_ways, exact_across_a_restart, exact_loop, exact_without
from test_links import sums_over_the_laboratory


def by_atp(me: Me, body: Callable[..., Any], *args: Any) -> Any:
    """The body, in an environment that says so."""
    os.environ["FANIN_PROTOCOL"] = "atp"
    return body(me, *args)


def sums(me: Me) -> list[Any]:
    me.init()
    found: list[Any] = []
    for elements in (1, 1000, 250_001):
        ramp = torch.arange(elements) % 113
        integers = (ramp * (me.rank + 1)).to(torch.int32)
        dist.all_reduce(integers)
        found.append(int((integers != ramp * 6).sum()))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            floats = (ramp + me.rank).to(dtype)
            dist.all_reduce(floats, op=dist.ReduceOp.AVG)
            found.append(float((floats.double() - ramp - 1).abs().max()))
            found.append(floats.double().sum().item())
    return found


def test_sums_are_right_and_alike_on_all_ranks(launch: Launch, atp: str) -> None:
    sums_are_right(launch(by_atp, 3, sums, at=atp).results())


def sums_are_right(by_rank: Sequence[list[Any]]) -> None:
    first, *others = by_rank
    assert all(other == first for other in others)
    wrong, error_32, error_16, error_b16 = first[0::7], first[1::7], first[3::7], first[5::7]
    assert wrong == [0, 0, 0]
    assert max(error_32) < 1e-5
    assert max(error_16) <= 0.0625 / 2
    assert max(error_b16) <= 0.5 / 2


def metrics(me: Me) -> list[list[float]]:
    me.init()
    found = []
    for dtype in (torch.float32, torch.float64):
        loss_and_tokens = torch.tensor([0.1 + me.rank, 1e9, 1e-30], dtype=dtype)
        dist.all_reduce(loss_and_tokens)
        found.append(loss_and_tokens.tolist())
    one_nan = torch.full((4096,), 1.5)
    one_nan[me.rank] = torch.nan
    dist.all_reduce(one_nan)
    found.append([one_nan[3:].min().item(), one_nan[3:].max().item()])
    # ATP has no packets for them: the ranks' own services sum them.
    tokens = torch.tensor([2**53 + 1, -me.rank])
    dist.all_reduce(tokens)
    found.append(tokens.tolist())
    return found


def test_each_element_of_a_small_tensor_is_right_to_its_own_magnitude(
    launch: Launch, atp: str
) -> None:
    metrics_are_right(launch(by_atp, 3, metrics, at=atp).results())


def metrics_are_right(by_rank: Sequence[list[list[float]]]) -> None:
    tenths = sum(torch.tensor(0.1 + rank).double() for rank in range(3))
    for single, double, ones, tokens in by_rank:
        expected = torch.tensor([float(tenths), 3e9, 3e-30])
        torch.testing.assert_close(torch.tensor(single), expected, rtol=2.0**-24, atol=0.0)
        assert double == pytest.approx([3.3, 3e9, 3e-30], rel=1e-15)
        assert ones == [4.5, 4.5]
        assert tokens == [3 * 2**53 + 3, -3]


def test_large_and_small_gradients_in_one_tensor_are_summed(launch: Launch, atp: str) -> None:
    # Values whose sums no fixed factor of 10^8 leaves in 31 bits: original values, then factors.
    for found in launch(by_atp, 2, large, at=atp).results():
        assert found < 1e-6


def large(me: Me) -> float:
    me.init()
    exact = torch.linspace(-1e6, 1e6, 100_000, dtype=torch.float64)
    worst = 0.0
    for _ in range(4):
        tensor = exact.float()
        dist.all_reduce(tensor)
        worst = max(worst, ((tensor.double() - 2 * exact).abs().max() / 2e6).item())
    return worst


# The error bounds of sums of numbers up to this, in parts of it: by the fixed factor or as bfloat16
# would be; by a factor of their own; and by half of the smallest denormal.
TINY = {1e-6: 2.0**-7, 1e-9: 1e-6, 1e-20: 1e-6, 1e-37: 1e-6, 1e-42: 2e-3}


def tiny(me: Me) -> dict[float, float]:
    """The largest errors of sums of tiny numbers."""
    me.init()
    ramp = torch.linspace(-1.0, 1.0, 200_000, dtype=torch.float64)
    errors = dict.fromkeys(TINY, 0.0)
    for size in TINY:
        parts = [(ramp * size * (rank + 1)).float() for rank in range(me.world_size)]
        expected = torch.stack(parts).double().sum(0)
        # When no factor is known yet, and, of several at once, with those that were agreed on.
        for count in (1, 1, 4):
            tensors = [parts[me.rank].clone() for _ in range(count)]
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()
            off = max((tensor.double() - expected).abs().max().item() for tensor in tensors)
            errors[size] = max(errors[size], off / size)
    return errors


def test_tiny_gradients_are_summed_and_do_not_vanish(launch: Launch, atp: str) -> None:
    for errors in launch(by_atp, 2, tiny, at=atp).results():
        assert all(error <= TINY[size] for size, error in errors.items()), errors


def test_training_equals_gloos(launch: Launch, atp: str) -> None:
    ours = launch(by_atp, 2, train, "fanin", "none", at=atp).results()
    gloo = launch(train, 2, "gloo", "none").results()
    assert differences(ours[0], ours[1]) == 0  # bit-identical on all ranks
    assert differences(ours[0], gloo[0]) <= BOUNDS["none"]


def test_two_training_jobs_share_a_switch(launch: Launch, atp: str) -> None:
    alone = launch(by_atp, 2, train, "fanin", "none", at=atp).results()
    both = [launch(by_atp, 2, train, "fanin", "none", at=atp) for _ in range(2)]
    for job in both:
        first, second = job.results()
        assert differences(first, second) == 0
        # A sum does not depend on where it was added, but for the factor that overflows led to.
        assert differences(first, alone[0]) <= BOUNDS["none"]


class Chain:
    """The root and a rack's switch, as processes that can be killed."""

    def __init__(self, heartbeat_timeout: str = "20") -> None:
        self.server = SwitchProcess("--protocol", "atp", "--heartbeat-timeout", heartbeat_timeout)
        self.server.start()
        self.switch = SwitchProcess("--protocol", "atp", "--upstream", self.server.address)
        self.switch.start()


@pytest.fixture
def chain() -> Iterator[Chain]:
    running = Chain()
    yield running
    running.switch.kill()
    running.server.kill()


@pytest.mark.parametrize("killed", ["switch", "server"])
@both_ways
def test_sums_are_exact_across_a_restart(
    launch: Launch, chain: Chain, way: Callable[[Me, float], Sum], killed: str
) -> None:
    ranks = launch(by_atp, 2, exact_loop, way, at=chain.switch.address)
    exact_across_a_restart(ranks, getattr(chain, killed))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
@both_ways
def test_ranks_go_on_without_a_switch_that_stays_away(
    launch: Launch, chain: Chain, way: Callable[[Me, float], Sum], by: signal.Signals
) -> None:
    ranks = launch(by_atp, 2, exact_loop, way, at=chain.switch.address)
    exact_without(ranks, chain.switch, by)


@pytest.fixture
def two_servers(chain: Chain) -> Iterator[tuple[Chain, Chain]]:
    """Two servers of one job, each behind a switch of its own (§A.5)."""
    other = Chain()
    yield chain, other
    other.switch.kill()
    other.server.kill()


@pytest.mark.parametrize("with_its_switch", [False, True], ids=["alone", "with its switch"])
@both_ways
def test_another_server_of_a_job_takes_over_from_one_that_does_not_come_back(
    launch: Launch,
    two_servers: tuple[Chain, Chain],
    way: Callable[[Me, float], Sum],
    with_its_switch: bool,
) -> None:
    at = ",".join(each.switch.address for each in two_servers)
    ranks = launch(by_atp, 2, exact_loop, way, at=at)
    lost, _ = two_servers
    for _ in range(3):
        for rank in range(2):
            assert ranks.hear(rank) == "running"
    if with_its_switch:
        lost.switch.kill()
    exact_without(ranks, lost.server, signal.SIGKILL)


def test_the_protocol_is_taken_from_the_argument_then_the_environment(
    switch: str, atp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(at: str, **arguments: Any) -> None:
        with fanin.connect(at, job="protocol", rank=0, world_size=1, **arguments) as group:
            array = np.arange(10, dtype=np.int32)
            assert (group.all_reduce(array) == np.arange(10)).all()

    monkeypatch.delenv("FANIN_PROTOCOL", raising=False)
    connect(switch)
    connect(atp, protocol="atp")
    monkeypatch.setenv("FANIN_PROTOCOL", "atp")
    connect(atp)
    connect(switch, protocol="switchml")
    assert fanin.torch.Options().settings.protocol == "atp"
    assert fanin.torch.Options(protocol="switchml").settings.protocol == "switchml"
    monkeypatch.setenv("FANIN_PROTOCOL", "")
    assert fanin.torch.Options().settings.protocol == "switchml"
    monkeypatch.setenv("FANIN_PROTOCOL", "tcp")
    named = r"\"switchml\" or \"atp\" or \"goat\""
    with pytest.raises(ValueError, match=rf"^FANIN_PROTOCOL is 'tcp'.*{named}$"):
        connect(switch)


def test_who_speaks_another_protocol_is_told_what_to_set(switch: str, atp: str) -> None:
    for at, spoken in ((switch, "atp"), (atp, "switchml")):
        with pytest.raises(fanin.errors.ProtocolMismatch, match="FANIN_PROTOCOL"):
            fanin.connect(at, job="mismatch", rank=0, world_size=1, protocol=spoken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"wire_dtype is 'int8'.* or as bfloat16: leave it out"):
        fanin.connect(atp, job="int8", rank=0, world_size=1, protocol="atp", wire_dtype="int8")


def halves(me: Me) -> tuple[list[int], int]:
    """How many elements are wrong, by type."""
    me.init(pg_options=fanin.torch.Options(protocol="atp", wire_dtype="bfloat16"))
    ramp = torch.arange(100_003) % 100
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        floats = (ramp + me.rank).to(dtype)
        dist.all_reduce(floats)
        # Whole numbers below 256 are exact.
        wrong.append(int((floats.double() - (2 * ramp + 1)).abs().gt(0).sum()))
    return wrong, sums_on_switch()


def test_floats_of_any_type_travel_as_bfloat16(launch: Launch, atp: str) -> None:
    assert launch(halves, 2, at=atp).results() == [([0, 0, 0], 3)] * 2


def test_an_upstream_that_is_gone_is_named(chain: Chain) -> None:
    chain.server.kill()
    with pytest.raises(fanin.errors.SwitchUnreachable, match=chain.server.address):
        # Twice as long as a switch gives its upstream to answer.
        fanin.connect(
            chain.switch.address, job="gone", rank=0, world_size=1, timeout=6, protocol="atp"
        )


def split(me: Me) -> list[int]:
    os.environ.pop("FANIN_PROTOCOL", None)
    me.init(pg_options=fanin.torch.Options(protocol="atp"))
    half: Any = dist.split_group(None, [[0, 1]])
    tensor = torch.full((5,), me.rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor, group=half)
    return [int(x) for x in tensor]


def test_a_split_group_keeps_the_protocol(launch: Launch, atp: str) -> None:
    assert launch(split, 2, at=atp).results() == [[3] * 5] * 2


@needs_lab
def test_two_racks_whose_links_lose_a_hundredth_sum_exactly(launch: Launch, tmp_path: Any) -> None:
    with Netlab(4, racks=2, loss=0.01, name=NAME) as lab, contextlib.ExitStack() as stack:
        server = f"{SERVER_ADDRESS}:4800"
        popen = partial(lab.popen, SERVER)
        stack.enter_context(SwitchProcess("--protocol", "atp", listen=server, popen=popen))
        for rack in ("sw0", "sw1"):
            listen = f"{address(rack)}:4800"
            options = ("--protocol", "atp", "--upstream", server)
            popen = partial(lab.popen, rack)
            stack.enter_context(SwitchProcess(*options, listen=listen, popen=popen))
        spaces = [lab.namespace(f"w{i}") for i in range(4)]
        switches = [f"{address(lab.switch_of(i))}:4800" for i in range(4)]
        ranks = launch(in_a_rack, 4, switches, spaces, str(tmp_path / "store"))
        results = ranks.results()
        status_of = ["status", "--switch", switches[0], "--json"]
        inside = ["netlab", "exec", "--name", NAME, "w0", "--", sys.executable, "-m", "fanin"]
        command = [sys.executable, "-m", "fanin", *inside, *status_of]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
    status = json.loads(shown.stdout)
    assert [s["address"] for s in status["switches"]] == [switches[0]]
    assert all(result == results[0] for result in results)
    assert results[0][0] == 0


def two_to_a_machine(me: Me) -> tuple[list[Any], dict[str, int]]:
    me.init(pg_options=fanin.torch.Options(machine=f"machine {me.rank // 2}"))
    found = sums_of_types(me.world_size)
    before = statistics()
    dist.all_reduce(torch.ones(1_000_000))
    return found, {name: count - before[name] for name, count in statistics().items()}


def test_ranks_of_one_machine_sum_first_and_each_sends_its_part(
    launch: Launch, chain: Chain
) -> None:
    results = launch(by_atp, 4, two_to_a_machine, at=chain.switch.address).results()
    assert all(found == results[0][0] for found, _ in results)
    wrong, errors = results[0][0][0::2], results[0][0][1::2]
    assert max(wrong) == 0
    assert max(errors) < 1e-5
    # Half of a tensor of 4 MB a rank, in fragments of at least 1,344 bytes.
    sent = [counts["packets_sent"] for _, counts in results]
    assert all(0 < packets <= 2_000_000 / 1344 * 1.1 for packets in sent), sent


def sums_of_types(ranks: int) -> list[Any]:
    """Of each size, how many integers are wrong, and the largest error of floats."""
    found: list[Any] = []
    for elements in (1, 1000, 250_001):
        ramp = torch.arange(elements) % 113
        integers = (ramp * (dist.get_rank() + 1)).to(torch.int32)
        dist.all_reduce(integers)
        found.append(int((integers != ramp * (ranks * (ranks + 1) // 2)).sum()))
        floats = (ramp + dist.get_rank()).float()
        dist.all_reduce(floats, op=dist.ReduceOp.AVG)
        found.append(float((floats.double() - ramp - (ranks - 1) / 2).abs().max()))
    return found


def statistics() -> dict[str, int]:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    return dict(backend._channel._client.statistics())


@needs_lab
def test_windows_follow_the_marks_of_routers(launch: Launch, tmp_path: Any) -> None:
    # Both sums leave the server's machine by a link that is slower than the ranks'.
    rates = {"s0": 20_000_000}
    with (
        Netlab(2, spares=1, rate_bps=100_000_000, rates=rates, ecn_bytes=20_000, name=NAME) as lab,
        contextlib.ExitStack() as stack,
    ):
        server, switch = f"{address('s0')}:4800", f"{SWITCH_ADDRESS}:4800"
        popen = partial(lab.popen, "s0")
        stack.enter_context(SwitchProcess("--protocol", "atp", listen=server, popen=popen))
        options = ("--protocol", "atp", "--upstream", server)
        popen = partial(lab.popen, SWITCH)
        stack.enter_context(SwitchProcess(*options, listen=switch, popen=popen))
        spaces = [lab.namespace("w0"), lab.namespace("w1")]
        ranks = launch(marked, 2, spaces, str(tmp_path / "store"), at=switch)
        first, second = ranks.results()
        assert netlab.describe(NAME)["packets_marked"] > 0
    assert first == second
    assert first["error"] == 0
    assert first["marked"] > 0


def marked(me: Me, *args: Any) -> dict[str, float]:
    error, _ = by_atp(me, sums_over_the_laboratory, *args)
    return {"error": error, "marked": statistics()["marked"]}


def in_a_rack(me: Me, switches: list[str], *args: Any) -> Any:
    os.environ["FANIN_SWITCH"] = switches[me.rank]
    return by_atp(me, sums_over_the_laboratory, *args)


def test_a_server_that_stops_tells_every_rank(launch: Launch, chain: Chain) -> None:
    ranks = launch(by_atp, 2, told, at=chain.switch.address)
    for rank in range(2):
        assert ranks.hear(rank) == "running"
    assert chain.server.process is not None
    # It tells its ranks before it ends.
    threading.Thread(target=chain.server.process.terminate).start()
    for rank in range(2):
        assert ranks.result(rank) == "SwitchLost"


def told(me: Me) -> str:
    me.init()
    me.say("running")
    try:
        while True:
            dist.all_reduce(torch.ones(100_000))
    except fanin.errors.FaninError as error:
        return type(error).__name__
