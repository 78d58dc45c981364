"""Ways that are cut in mid-run: who waits says for whom and where, and a short cut ends nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from conftest import SwitchProcess, free_address
from fanin import _fanin
from fanin_lab import netlab
from fanin_lab.netlab import INTERFACE, SWITCH, SWITCH_ADDRESS, Netlab
from laboratory import NAME, needs_lab
from programs import BY_NUMPY, Program, Start

LISTEN = f"{SWITCH_ADDRESS}:4800"
# Nobody waits as long for a typed error.
TIMEOUT = "45"

SUMS = f"""
import itertools
# The switch is to sum also with protocols in which ranks may sum themselves.
plan = "switch" if os.environ.get("FANIN_PROTOCOL", "switchml") == "switchml" else None
group = connect(job="silence", timeout={TIMEOUT}, plan=plan)
say("joined")
for sums in itertools.count():
    if sums == 5 and (on := os.environ.get("GOES_ON")):
        say("rests")
        # Until the test has changed the network: no length of time is part of what is tested.
        while not os.path.exists(on):
            time.sleep(0.01)
    array = np.full(int(os.environ["ELEMENTS"]), rank + 1, np.float32)
    array[0] = rank == 0 and os.path.exists(os.environ.get("ENOUGH", "/nowhere"))
    group.all_reduce(array)
    assert (array[1:] == 3).all(), array
    if array[0]:
        break
say("done")
"""

Ranks = list[Program]


@contextlib.contextmanager
def two_ranks(
    lab: Netlab, *options: str, elements: int = 50_000, said: Mapping[str, str] | None = None
) -> Iterator[Ranks]:
    """Two ranks, each on a machine of its own, that sum at a switch until they are told to end."""
    command, *more = options or ("switch",)
    ranks: Ranks = []
    there = partial(lab.popen, SWITCH)
    with SwitchProcess(*more, command=command, listen=LISTEN, popen=there):
        try:
            for rank in range(2):
                place = {"RANK": str(rank), "WORLD_SIZE": "2", "FANIN_SWITCH": LISTEN}
                environment = {**place, "ELEMENTS": str(elements), **(said or {})}
                within = ["ip", "netns", "exec", lab.namespace(f"w{rank}"), sys.executable]
                ranks.append(Program([*within, "-c", BY_NUMPY + SUMS], environment))
            for program in ranks:
                program.line("^joined$")
            yield ranks
        finally:
            for program in ranks:
                program.end()


@contextlib.contextmanager
def between_two_sums(ranks: Ranks, on: Path) -> Iterator[None]:
    """While ranks rest: a cut in the middle of a sum may reach a rank alone, for which others wait.

    The ranks were started with the path `on` as `GOES_ON`.
    """
    for rank in ranks:
        rank.line("^rests$")
    yield
    on.touch()


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with Netlab(2, name=NAME) as there:
        yield there
    netlab.down(NAME)


def drops(namespace: str, what: str, *hooks: str) -> None:
    """Let nothing of this in there, or out, until the table `silence` is deleted."""
    chains = (
        f"chain {hook}s {{ type filter hook {hook} priority 0; {what} drop; }};" for hook in hooks
    )
    filters(namespace, f"table inet silence {{ {' '.join(chains)} }}")


def filters(namespace: str, rules: str) -> None:
    command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
    subprocess.run(command, input=rules, text=True, check=True)


def has_mtu(lab: Netlab, machine: str, interface: str, mtu: int) -> None:
    command = ["ip", "-n", lab.namespace(machine), "link", "set", interface, "mtu", str(mtu)]
    subprocess.run(command, check=True)


def bridge_of(lab: Netlab) -> str:
    """The interface of the switch's machine that has its address."""
    listed = ["ip", "-n", lab.namespace(SWITCH), "-o", "-4", "address", "show"]
    lines = subprocess.check_output(listed, text=True).splitlines()
    (line,) = [line for line in lines if f" {SWITCH_ADDRESS}/" in line]
    return line.split()[1]


def is_cut_off(rank: Program, cause: str) -> None:
    """Says so on standard error, and ends by the typed error, which is not the timeout's."""
    switch = LISTEN.replace(".", r"\.")
    rank.line(rf"^fanin: rank \d: cut off from switch {switch} \(UDP: {cause}.*trying once more$")
    assert rank.wait() == 1
    assert f"fanin.errors.SwitchUnreachable: switch {LISTEN} did not answer" in rank.text()


@needs_lab
def test_answers_that_are_lost_to_all_ranks_are_told_and_end_the_job(
    lab: Netlab, tmp_path: Path
) -> None:
    on = tmp_path / "on"
    with two_ranks(lab, elements=10, said={"GOES_ON": str(on)}) as ranks:
        with between_two_sums(ranks, on):
            drops(lab.namespace(SWITCH), "udp sport 4800", "output")
        for rank in ranks:
            says = f"waiting for switch {LISTEN} in sum of 10 float32 .*; it waits for no rank"
            rank.line(f"^fanin: rank .: {says}")
        for rank in ranks:
            is_cut_off(rank, "no packet comes back, from ")


@needs_lab
@pytest.mark.parametrize("protocol", ["switchml", "atp", "goat"])
def test_a_service_whose_mtu_falls_is_named_by_all_ranks(
    lab: Netlab, tmp_path: Path, protocol: str
) -> None:
    on = tmp_path / "on"
    said = {"GOES_ON": str(on), "FANIN_PROTOCOL": protocol}
    with two_ranks(lab, "switch", "--protocol", protocol, said=said) as ranks:
        with between_two_sums(ranks, on):
            has_mtu(lab, SWITCH, bridge_of(lab), 900)
        for rank in ranks:
            is_cut_off(rank, r"packets of \d+ bytes")


@needs_lab
def test_a_rank_whose_mtu_falls_says_so_and_the_other_waits_for_it(lab: Netlab) -> None:
    with two_ranks(lab) as ranks:
        has_mtu(lab, "w1", INTERFACE, 900)
        refused = (
            rf"packets of \d+ bytes, which the job has, are longer than {INTERFACE} carries here"
        )
        ranks[1].line(rf"^fanin: rank 1: {refused} on the way to switch .*: its MTU is 900 now")
        ranks[0].line(r"^fanin: rank 0: waiting for rank 1 in sum of 50000 float32 ")
        is_cut_off(ranks[1], refused)
        assert "waiting for rank 1" not in ranks[1].text()
        assert ranks[0].wait() == 1


@needs_lab
@pytest.mark.parametrize("where", ["at its own interface", "on the way, and nobody says so"])
def test_with_a_loss_bound_too_a_rank_whose_long_packets_are_lost_says_so(
    lab: Netlab, where: str
) -> None:
    with two_ranks(lab, elements=500_000, said={"FANIN_LOSS_BOUND": "0.05"}) as ranks:
        if where == "at its own interface":
            has_mtu(lab, "w1", INTERFACE, 900)
        else:
            long = f"ip saddr {netlab.address('w1')} meta l4proto udp meta length > 900"
            drops(lab.namespace(SWITCH), long, "input")
        is_cut_off(ranks[1], r"packets of \d+ bytes")
        ranks[0].line(r"^fanin: rank 0: waiting for rank 1 in sum of 500000 float32 ")
        assert ranks[0].wait() == 1


@needs_lab
@pytest.mark.parametrize("what", ["meta l4proto { tcp, udp }", "meta l4proto tcp"])
@pytest.mark.parametrize("seconds", [2.5, 3.5, 4.0, 4.5])
def test_a_link_that_is_cut_for_less_than_the_heartbeat_timeout_ends_nothing(
    lab: Netlab, tmp_path: Path, seconds: float, what: str
) -> None:
    enough = tmp_path / "enough"
    with two_ranks(
        lab, "switch", "--heartbeat-timeout", "5", said={"ENOUGH": str(enough)}
    ) as ranks:
        space = lab.namespace("w1")
        drops(space, what, "input", "output")
        time.sleep(seconds)  # the cut itself, of which the length is what is tried
        filters(space, "delete table inet silence")
        enough.touch()
        for rank in ranks:
            rank.line("^done$")
            assert rank.wait() == 0


STAYS = """
group = connect(job="stays")
say("joined")
time.sleep(3600)
"""


def test_a_port_is_free_again_though_a_process_that_was_forked_lives_on(start: Start) -> None:
    address = free_address()
    switch = _fanin.Switch(address)
    start(BY_NUMPY + STAYS, 0, 1, address).line("^joined$")
    helper = os.fork()
    if helper == 0:
        signal.pause()
        os._exit(0)
    try:
        switch.stop()
        _fanin.Switch(address).stop()
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)


LINGERS = """
import threading
from fanin import _fanin

switch = _fanin.Switch()
service = [(switch.address, 1.0, None, None)]
client = _fanin.Client(service, "stays", 0, 1, timeout=20)
stops = threading.Thread(target=switch.stop, args=(60,), daemon=True)
stops.start()
for number in range(20):
    _fanin.Client(service, f"joins{number}", 0, 1, timeout=20, hosted=switch).close()
print("asked", flush=True)
client.close()
stops.join()
"""


def test_a_switch_that_lingers_lets_who_asks_it_something_go_on(start: Start) -> None:
    program = start(LINGERS, 0, 1, "")
    program.line("^asked$")
    assert program.wait() == 0
