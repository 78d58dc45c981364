"""`fanin netlab`: links that are there, are shaped, lose packets, and go away again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fanin_lab import netlab
from fanin_lab.netlab import (
    INTERFACE,
    NICS_MAX,
    RACKS_MAX,
    SERVER,
    SPARES_MAX,
    SWITCH,
    SWITCH_ADDRESS,
    WORKERS_MAX,
    Netlab,
    NetlabError,
    address,
)
from fanin_lab.netlab.lab import UPLINK
from fanin_lab.netlab.queues import PRIORITIES, threshold_bytes
from laboratory import NAME, needs_lab
from ranks import DEADLINE, wait_until

pytestmark = pytest.mark.usefixtures("laboratory_cleared")

# Answers each datagram with what it was, to whom it came from.
ECHO = f"""
import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
echo.bind(("{SWITCH_ADDRESS}", 7))
print("ready", flush=True)
while True:
    echo.sendto(*echo.recvfrom(65535))
"""

# Sends trains of 10 datagrams, one system call each, and prints how many datagrams came back.
TRAINS = f"""
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.setsockopt(socket.SOL_UDP, 103, 100)  # UDP_SEGMENT
out.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
for _ in range(int(sys.argv[1])):
    out.sendto(bytes(1000), ("{SWITCH_ADDRESS}", 7))
back = 0
out.settimeout(2)
try:
    while back < 10 * int(sys.argv[1]):
        back += len(out.recv(2000)) == 100
except TimeoutError:
    pass
print(back)
"""

# The sender sends a train of 10 datagrams; the receiver takes trains whole, as they arrive.
TRAIN_OUT = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.setsockopt(socket.SOL_UDP, 103, 100)  # UDP_SEGMENT
out.sendto(bytes(1000), (sys.argv[1], 7))
"""
MARKS_IN = """
import json, socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.settimeout(20)
    receiver.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
    receiver.bind((sys.argv[1], 9))
    print("ready", flush=True)
    print(json.dumps([receiver.recvmsg(2000, 100)[1][0][2][0] for _ in range(40)]))
"""
MARKS_OUT = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(sys.argv[2]))
    for _ in range(40):
        sender.sendto(bytes(1400), (sys.argv[1], 9))
"""
TRAIN_IN = """
import socket, sys
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.setsockopt(socket.SOL_UDP, 104, 1)  # UDP_GRO
here.bind((sys.argv[1], 7))
print("ready", flush=True)
came = []
while sum(came) < 1000:
    came.append(len(here.recv(65535)))
print(came)
"""


# Prints the addresses that refuse a connection to a port where nobody listens: they are there.
KNOCK = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), timeout=5)
    except ConnectionRefusedError:
        print(address)
"""


def fanin(*arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fanin", "netlab", *arguments]
    return subprocess.run(
        command, timeout=DEADLINE, check=False, capture_output=True, text=True, **keywords
    )


def echoed(lab: Netlab, trains: int) -> int:
    """How many of ten times so many datagrams go from w0 to the switch and back."""
    server = lab.popen(SWITCH, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = lab.popen(
            "w0", [sys.executable, "-c", TRAINS, str(trains)], stdout=subprocess.PIPE, text=True
        )
        return int(client.communicate(timeout=DEADLINE)[0])
    finally:
        server.kill()
        server.communicate()


@needs_lab
def test_packets_go_through_and_the_laboratory_goes_away() -> None:
    up = fanin("up", "--name", NAME, "--workers", "2", "--mtu", "1400")
    assert up.returncode == 0, up.stderr
    lab = Netlab(2, name=NAME)
    assert echoed(lab, 3) == 30
    shown = fanin("exec", "--name", NAME, "w1", "--", "ip", "-json", "address", "show", INTERFACE)
    (link,) = json.loads(shown.stdout)
    assert (link["mtu"], link["addr_info"][0]["local"]) == (1400, netlab.address("w1"))
    assert fanin("exec", "--name", NAME, "w1", "--", "sh", "-c", "exit 7").returncode == 7
    down = fanin("down", "--name", NAME)
    assert (down.returncode, down.stdout) == (0, "removed w0 w1 sw\n")
    assert netlab.members(NAME) == []
    again = fanin("down", "--name", NAME)
    assert (again.returncode, again.stdout) == (0, "there was no laboratory\n")


@needs_lab
def test_workers_of_two_racks_reach_their_switch_the_server_and_each_other() -> None:
    with Netlab(3, racks=2, rate_bps=50_000_000, name=NAME) as lab:
        there = ["w0", "w1", "w2", "sw0", "sw1", SERVER]
        assert netlab.members(NAME) == there
        assert [lab.switch_of(i) for i in range(3)] == ["sw0", "sw0", "sw1"]
        addresses = [address(member) for member in there[3:]]
        others = [*addresses, netlab.address("w1")]
        knocking = lab.popen(
            "w2", [sys.executable, "-c", KNOCK, *others], stdout=subprocess.PIPE, text=True
        )
        assert knocking.communicate(timeout=DEADLINE)[0].split() == others
        for member, interface in (
            ("w2", INTERFACE),
            ("sw1", "w2"),
            ("sw1", "uplink"),
            (SERVER, "sw1"),
        ):
            command = ["tc", "-n", lab.namespace(member), "-j", "qdisc", "show", "dev", interface]
            (qdisc,) = json.loads(subprocess.check_output(command))
            assert (qdisc["kind"], qdisc["options"]["rate"]) == ("tbf", 50_000_000 / 8)
        state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
        assert all(worker["connected"] for worker in state["workers"])
        assert [bridge["address"] for bridge in state["bridges"]] == addresses
    assert netlab.members(NAME) == []
    with pytest.raises(NetlabError, match="3 racks of 2 workers"):
        Netlab(2, racks=3, name=NAME)


@needs_lab
def test_links_are_shaped_both_ways() -> None:
    with Netlab(2, rate_bps=50_000_000, queue_bytes=200_000, name=NAME) as lab:
        # A machine's own interface queues a thousand packets, whatever a switch's port does.
        for member, interface, limit in (("w1", INTERFACE, 1_514_000), (SWITCH, "w1", 200_000)):
            tc = ["tc", "-n", lab.namespace(member), "-j", "-r"]
            command = [*tc, "qdisc", "show", "dev", interface]
            (qdisc,) = json.loads(subprocess.check_output(command))
            assert (qdisc["kind"], qdisc["options"]["rate"]) == ("tbf", 50_000_000 / 8)
            assert qdisc["options"]["limit"] == limit
        state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
    assert state["switch"]["address"] == SWITCH_ADDRESS
    for worker in state["workers"]:
        assert worker["connected"]
        assert (worker["up_rate_bps"], worker["down_rate_bps"]) == (50_000_000, 50_000_000)
    with pytest.raises(NetlabError, match="no link has a rate"):
        Netlab(2, queue_bytes=200_000, name=NAME)
    Netlab(2, rate_bps=50_000_000, queue_bytes=9014, mtu=9000, name=NAME)
    with pytest.raises(NetlabError, match="with an MTU of 9000 it needs 9014"):
        Netlab(2, rate_bps=50_000_000, queue_bytes=9013, mtu=9000, name=NAME)


@needs_lab
def test_a_link_may_burst_as_much_as_it_is_told() -> None:
    rate = ("--rate", "50mbit", "--burst", "64KB")
    up = fanin("up", "--name", NAME, "--workers", "1", *rate)
    assert up.returncode == 0, up.stderr
    assert "bursts of 64 kB" in up.stdout
    tc = ["tc", "-n", f"fanin-{NAME}-w0", "-j", "-r", "qdisc", "show", "dev", INTERFACE]
    (qdisc,) = json.loads(subprocess.check_output(tc))
    # tc counts it in ticks of its clock.
    assert qdisc["options"]["burst"] == pytest.approx(64_000, rel=0.01)
    with pytest.raises(NetlabError, match="a burst, and no link has a rate"):
        Netlab(2, burst_bytes=200_000, name=NAME)
    with pytest.raises(NetlabError, match="with an MTU of 9000 it needs 9014"):
        Netlab(2, rate_bps=50_000_000, burst_bytes=9013, mtu=9000, name=NAME)


@needs_lab
def test_a_switch_marks_what_waits_behind_more_than_it_is_told() -> None:
    links: dict[str, Any] = {"rates": {"w1": 5_000_000}, "queue_bytes": 100_000}
    with Netlab(2, rate_bps=100_000_000, ecn_bytes=20_000, name=NAME, **links) as lab:
        marks = []
        # ECN-capable packets, and others (RFC 3168).
        for ecn in (2, 0):
            receives = [sys.executable, "-c", MARKS_IN, address("w1")]
            receiver = lab.popen("w1", receives, stdout=subprocess.PIPE, text=True)
            assert receiver.stdout is not None
            receiver.stdout.readline()
            sends = [sys.executable, "-c", MARKS_OUT, address("w1"), str(ecn)]
            assert lab.popen("w0", sends).wait(DEADLINE) == 0
            marks.append(json.loads(receiver.communicate(timeout=DEADLINE)[0]))
        state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
    capable, others = marks
    assert others == [0] * 40
    # As many as have room before the threshold, and what drains meanwhile.
    assert 20_000 // 1514 <= capable.index(3) <= 25, capable
    assert set(capable) == {2, 3}
    assert state["packets_marked"] == capable.count(3)
    with pytest.raises(NetlabError, match="marks, and no link has a rate"):
        Netlab(2, ecn_bytes=20_000, name=NAME)
    with pytest.raises(NetlabError, match="with an MTU of 9000 it needs 9014"):
        Netlab(2, rate_bps=50_000_000, ecn_bytes=9013, mtu=9000, name=NAME)


@needs_lab
@pytest.mark.skipif(shutil.which("ethtool") is None, reason="missing: ethtool (apt-get install)")
@pytest.mark.parametrize("offload", [True, False])
def test_without_offload_for_udp_trains_arrive_as_single_packets(offload: bool) -> None:
    with Netlab(2, udp_offload=offload, name=NAME) as lab:
        here = address("w1")
        takes = [sys.executable, "-c", TRAIN_IN, here]
        receiver = lab.popen("w1", takes, stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        assert lab.popen("w0", [sys.executable, "-c", TRAIN_OUT, here]).wait(DEADLINE) == 0
        told, _ = receiver.communicate(timeout=DEADLINE)
    assert json.loads(told) == ([1000] if offload else [100] * 10)


@needs_lab
def test_spare_machines_have_one_link_and_each_link_the_rate_that_it_is_told() -> None:
    rates = ("--rate", "100mbit", "--rate-of", "w1=50mbit", "--spare-rate", "200mbit")
    up = fanin("up", "--name", NAME, "--workers", "2", "--spares", "2", *rates)
    assert up.returncode == 0, up.stderr
    assert "2 spare machines, s0 at 10.77.0.209 to s1 at 10.77.0.210" in up.stdout
    state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
    assert [worker["name"] for worker in state["workers"]] == ["w0", "w1"]
    assert [spare["address"] for spare in state["spares"]] == ["10.77.0.209", "10.77.0.210"]
    machines = [*state["workers"], *state["spares"]]
    assert all(machine["connected"] for machine in machines)
    for way in ("up_rate_bps", "down_rate_bps"):
        found = [machine[way] for machine in machines]
        assert found == [100_000_000, 50_000_000, 200_000_000, 200_000_000]
    others = [netlab.address(member) for member in ("w0", "w1", "s1", SWITCH)]
    knock = (sys.executable, "-c", KNOCK, *others)
    assert fanin("exec", "--name", NAME, "s0", "--", *knock).stdout.split() == others
    shown = fanin("status", "--name", NAME).stdout.splitlines()
    assert [line.split()[0] for line in shown[:5]] == [SWITCH, "w0", "w1", "s0", "s1"]
    assert "up 200mbit, down 200mbit" in shown[3]
    assert fanin("down", "--name", NAME).stdout == "removed w0 w1 s0 s1 sw\n"


@needs_lab
def test_spare_machines_stand_above_racks() -> None:
    with Netlab(2, racks=2, spares=1, name=NAME) as lab:
        others = [netlab.address(member) for member in ("w0", "w1", "sw0", SERVER)]
        knocking = lab.popen(
            "s0", [sys.executable, "-c", KNOCK, *others], stdout=subprocess.PIPE, text=True
        )
        assert knocking.communicate(timeout=DEADLINE)[0].split() == others
        assert netlab.members(NAME) == ["w0", "w1", "s0", "sw0", "sw1", SERVER]


@needs_lab
def test_the_links_of_racks_may_have_rates_of_their_own() -> None:
    with Netlab(2, racks=2, rate_bps=10**8, rates={"sw0": 2 * 10**8}, name=NAME) as lab:
        for switch, rate in (("sw0", "200Mbit"), ("sw1", "100Mbit")):
            for member, end in ((switch, UPLINK), (SERVER, switch)):
                shown = lab.popen(
                    member, ["tc", "qdisc", "show", "dev", end], stdout=subprocess.PIPE, text=True
                )
                assert f"rate {rate}" in shown.communicate(timeout=DEADLINE)[0], (member, end)


@needs_lab
def test_workers_have_further_links_in_subnets_of_their_own() -> None:
    rates = ("--rate", "100mbit", "--rate-of", "eth1=50mbit", "--rate-of", "w1:eth1=20mbit")
    options = ("--workers", "2", "--nics", "2", "--spares", "1", *rates)
    up = fanin("up", "--name", NAME, *options)
    assert up.returncode == 0, up.stderr
    assert "100mbit links (eth1 50mbit, w1:eth1 20mbit), 2 to each worker" in up.stdout
    state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
    links = [link for worker in state["workers"] for link in [worker, *worker["further"]]]
    assert [link["address"] for link in links] == [
        netlab.address(worker, nic) for worker in ("w0", "w1") for nic in range(2)
    ]
    assert all(link["connected"] for link in links)
    for way in ("up_rate_bps", "down_rate_bps"):
        assert [link[way] for link in links] == [10**8, 5 * 10**7, 10**8, 2 * 10**7]
    assert state["spares"][0]["further"] == []
    others = [netlab.address("w1"), netlab.address("w1", 1), netlab.address(SWITCH, 1)]
    knock = (sys.executable, "-c", KNOCK, *others)
    assert fanin("exec", "--name", NAME, "w0", "--", *knock).stdout.split() == others
    shown = fanin("status", "--name", NAME).stdout.splitlines()
    assert [line.split()[0] for line in shown[:6]] == [SWITCH, "w0", "eth1", "w1", "eth1", "s0"]
    assert fanin("down", "--name", NAME).stdout == "removed w0 w1 s0 sw\n"


def test_more_than_there_is_room_for_and_rates_of_nobody_are_refused() -> None:
    with pytest.raises(NetlabError, match=f"209 workers: a laboratory has 1 to {WORKERS_MAX}"):
        Netlab(209)
    with pytest.raises(NetlabError, match=f"33 spare machines: .* up to {SPARES_MAX}"):
        Netlab(1, spares=33)
    with pytest.raises(NetlabError, match="a rate of spare machines, and there is none"):
        Netlab(1, spare_rate_bps=10**9)
    with pytest.raises(NetlabError, match="a rate of w2: the machines are w0 w1 s0"):
        Netlab(2, spares=1, rates={"w2": 10**9})
    with pytest.raises(NetlabError, match="a rate of sw2: the machines are w0 w1 sw0 sw1"):
        Netlab(2, racks=2, rates={"sw2": 10**9})
    with pytest.raises(NetlabError, match=f"9 links of a worker: it has 1 to {NICS_MAX}"):
        Netlab(1, nics=9)
    with pytest.raises(NetlabError, match="several links of a worker and several racks"):
        Netlab(2, nics=2, racks=2)
    for wrong in ("eth2", "w2:eth1", "s0:eth1"):
        with pytest.raises(NetlabError, match=f"a rate of {wrong}: the machines are w0 w1 s0 eth1"):
            Netlab(2, nics=2, spares=1, rates={wrong: 10**9})
    most = Netlab(WORKERS_MAX, spares=SPARES_MAX, racks=RACKS_MAX).rates
    addresses = {netlab.address(member) for member in [*most, "sw0", f"sw{RACKS_MAX - 1}", SERVER]}
    assert len(addresses) == WORKERS_MAX + SPARES_MAX + 3


@needs_lab
def test_links_lose_single_packets_of_a_train() -> None:
    with Netlab(1, loss=0.2, name=NAME) as lab:
        back = echoed(lab, 40)
        state = netlab.describe(NAME)
    assert (state["workers"][0]["up_loss"], state["workers"][0]["down_loss"]) == (0.2, 0.2)
    # Of 400 packets out and 320 back, 144 are expected to be lost, give or take 10; if trains were
    # lost as one, it could be 80 at most.
    assert 80 < state["packets_lost"] <= 400 - back


@needs_lab
def test_links_lose_so_many_packets_in_a_row() -> None:
    with Netlab(1, loss=0.25, loss_burst=10, name=NAME) as lab:
        back = echoed(lab, 40)
        state = netlab.describe(NAME)
    assert (state["workers"][0]["up_loss"], state["workers"][0]["down_loss"]) == (0.25, 0.25)
    # Each link loses 10 of 40 packets: 100 of 400 out, and 70 to 80 of the 300 back.
    assert 170 <= state["packets_lost"] <= 180
    assert back == 400 - state["packets_lost"]


def test_bursts_of_loss_that_cannot_be_are_refused() -> None:
    with pytest.raises(NetlabError, match="bursts of loss, and no link loses anything"):
        Netlab(1, loss_burst=10)
    with pytest.raises(NetlabError, match="0 packets lost in a row: a burst has 1 to"):
        Netlab(1, loss=0.1, loss_burst=0)


@needs_lab
def test_up_replaces_what_there_is_and_down_clears_what_is_half_built() -> None:
    Netlab(3, name=NAME).up()
    Netlab(1, name=NAME).up()
    assert netlab.members(NAME) == ["w0", SWITCH]
    # As after a crash: a namespace with no link, none for the switch, and something running.
    netlab.down(NAME)
    half = f"fanin-{NAME}-w4"
    subprocess.run(["ip", "netns", "add", half], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", half, "sleep", "1000"])
    wait_until(lambda: netlab.processes(NAME, "w4") == [left.pid], "it runs")
    assert "missing" in fanin("status", "--name", NAME).stdout
    assert fanin("down", "--name", NAME).stdout == "removed w4\n"
    assert left.wait(DEADLINE) == -signal.SIGTERM
    assert netlab.members(NAME) == []


@needs_lab
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_and_an_exception_leave_no_laboratory(sent: signal.Signals) -> None:
    program = f"""
import time
from fanin_lab.netlab import Netlab
with Netlab(1, name={NAME!r}):
    print("up", flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert netlab.members(NAME)
    process.send_signal(sent)
    process.communicate(timeout=DEADLINE)
    assert netlab.members(NAME) == []
    with pytest.raises(ZeroDivisionError), Netlab(1, name=NAME):
        _ = 1 / 0
    assert netlab.members(NAME) == []


@needs_lab
def test_a_laboratory_that_is_there_is_not_replaced_unasked() -> None:
    up = ("up", "--name", NAME, "--workers", "1")
    assert fanin(*up).returncode == 0
    try:
        refused = fanin(*up)
        assert refused.returncode == 1
        assert "there is a laboratory (w0 sw)" in refused.stderr
        assert "--replace" in refused.stderr
        assert fanin(*up, "--replace").returncode == 0
    finally:
        fanin("down", "--name", NAME)


@needs_lab
def test_what_is_not_there_is_named() -> None:
    missing = fanin("exec", "--name", NAME, "w0", "--", "true")
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "fanin netlab up" in missing.stderr
    assert fanin("up", "--name", NAME, "--workers", "1", "--rate", "fast").returncode == 2
    unclear = fanin("up", "--name", NAME, "--workers", "1", "--rate-of", "w0")
    assert unclear.returncode == 2
    assert "write w3=500mbit" in unclear.stderr


def test_without_root_or_tools_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(NetlabError, match="sudo"):
            Netlab(1, name=NAME).up()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetlabError, match="apt-get install -y iproute2 nftables"):
        Netlab(1, loss=0.1, name=NAME).up()
    with pytest.raises(NetlabError, match="apt-get install -y ethtool iproute2"):
        Netlab(1, udp_offload=False, name=NAME).up()


# Sends packets of 1,000 bytes in trains: CLASS:PACKETS. Their traffic class is what they carry.
CLASSES = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.setsockopt(socket.SOL_UDP, 103, 1000)  # UDP_SEGMENT
out.setsockopt(socket.SOL_SOCKET, 32, 1 << 24)  # SO_SNDBUFFORCE
for told in sys.argv[2:]:
    traffic_class, packets = map(int, told.split(":"))
    out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)
    while packets:
        train = min(packets, 40)
        out.sendto(bytes([traffic_class]) * 1000 * train, (sys.argv[1], 7))
        packets -= train
"""
# Prints the classes of packets as they arrive, until none has for twice as long as a queue takes.
ARRIVALS = """
import json, socket, sys
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
here.bind((sys.argv[1], 7))
print("ready", flush=True)
came = []
try:
    while True:
        came.append(here.recv(2000)[0])
        here.settimeout(2)
except TimeoutError:
    print(json.dumps(came))
"""


def arrived(lab: Netlab, *trains: tuple[int, int]) -> list[int]:
    """The traffic classes of packets that w0 sent to w1, in the order in which they came."""
    there = address("w1")
    receiver = lab.popen(
        "w1", [sys.executable, "-c", ARRIVALS, there], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    told = [f"{traffic_class}:{packets}" for traffic_class, packets in trains]
    assert lab.popen("w0", [sys.executable, "-c", CLASSES, there, *told]).wait(DEADLINE) == 0
    came, _ = receiver.communicate(timeout=DEADLINE)
    found: list[int] = json.loads(came)
    return found


# Class selectors of front and back layers, and what makes them ECN-capable.
FRONT, BACK, CAPABLE = 6 << 5, 0 << 5, 2


@pytest.fixture
def queues() -> Iterator[Netlab]:
    """Two machines; what the first sends waits before the slower link of the second."""
    rates = {"w0": 100_000_000, "w1": 1_000_000}
    with Netlab(2, rates=rates, queue_bytes=100_000, queues="dlcp", name=NAME) as lab:
        yield lab


@needs_lab
def test_front_layers_overtake_back_ones_in_queues_as_dlcp_asks_for_them(queues: Netlab) -> None:
    came = arrived(queues, (BACK | CAPABLE, 60), (FRONT | CAPABLE, 60))
    assert len(came) == 120, "as much as the memory holds waits"
    first = came.index(FRONT | CAPABLE)
    # Some back ones had left before the first front one was there.
    assert first < 30
    assert came[first:].index(BACK | CAPABLE) >= 50
    # The last queue's own part of the link lets one pass at most.
    behind = came[first + 61 :]
    assert set(behind) == {BACK | CAPABLE}


@needs_lab
def test_only_unimportant_packets_are_dropped_before_the_memory_is_full(queues: Netlab) -> None:
    of = {
        traffic_class: arrived(queues, (traffic_class, 80)).count(traffic_class)
        for traffic_class in (FRONT, BACK, FRONT | CAPABLE, BACK | CAPABLE)
    }
    # With headers 1,042 bytes each. An eighth of 100 kB and half of it may wait; a burst has left.
    assert 11 <= of[FRONT] < of[BACK] < 80
    assert of[BACK] >= 47
    assert of[FRONT | CAPABLE] == of[BACK | CAPABLE] == 80
    # Beyond the memory all are dropped.
    assert arrived(queues, (FRONT | CAPABLE, 160)).count(FRONT | CAPABLE) < 160


@needs_lab
def test_links_with_queues_as_dlcp_asks_for_them_are_shaped_and_shown() -> None:
    up = fanin("up", "--name", NAME, "--workers", "2", "--rate", "50mbit", "--queues", "dlcp")
    try:
        assert up.returncode == 0, up.stderr
        assert "queues as DLCP asks for them" in up.stdout
        state = json.loads(fanin("status", "--name", NAME, "--json").stdout)
        for worker in state["workers"]:
            assert worker["connected"]
            assert (worker["up_rate_bps"], worker["down_rate_bps"]) == (50_000_000, 50_000_000)
        assert echoed(Netlab(2, name=NAME), 3) == 30
    finally:
        fanin("down", "--name", NAME)


@needs_lab
def test_the_recipe_for_linux_routers_makes_the_queues_of_the_laboratory() -> None:
    manual = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    (recipe,) = re.findall(r"```\n(dev=eth1.*?)```", manual, re.DOTALL)
    with Netlab(1, nics=2, name=NAME) as lab:
        shell = lab.popen("w0", ["sh", "-e"], stdin=subprocess.PIPE, text=True)
        shell.communicate(recipe, timeout=DEADLINE)
        assert shell.returncode == 0
        tc = ["tc", "-n", lab.namespace("w0"), "-j", "qdisc", "show", "dev", "eth1"]
        shown = json.loads(subprocess.check_output(tc))
    found = {each["parent"]: each["options"]["limit"] for each in shown if each["kind"] == "bfifo"}
    memory = 500_000
    expected = {f"1:1{priority}": memory for priority in range(PRIORITIES)}
    expected |= {f"1:2{each}": threshold_bytes(each, memory) for each in range(PRIORITIES)}
    assert found == expected


def test_queues_that_cannot_be_are_refused() -> None:
    with pytest.raises(NetlabError, match="queues dlcp, and no link has a rate"):
        Netlab(2, queues="dlcp")
    with pytest.raises(NetlabError, match="with an MTU of 1500 they need 12112"):
        Netlab(2, rate_bps=10**9, queue_bytes=12_111, queues="dlcp")
    with pytest.raises(NetlabError, match="queues 'red': fifo or dlcp"):
        Netlab(2, rate_bps=10**9, queues="red")
