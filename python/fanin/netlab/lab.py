"""Building a laboratory, being in it, and removing it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fanin import _signals
from fanin.netlab.kernel import (
    NetlabError,
    batch,
    checked_name,
    inside,
    namespace_of,
    require_root,
    require_tools,
    run,
)

SWITCH = "sw"
SWITCH_ADDRESS = "10.77.0.254"
"""The bridge's: what the switch listens on, and all workers reach."""
SERVER = "server"
SERVER_ADDRESS = SWITCH_ADDRESS
"""Of a laboratory with several racks, where it stands above their switches."""
WORKERS_MAX = 240
RACKS_MAX = 10
MTU_MIN, MTU_DEFAULT, MTU_MAX = 576, 1500, 65535
INTERFACE = "eth0"
"""The link, as a worker sees it."""

BRIDGE = "br0"
UPLINK = "uplink"
"""The link to the server, as the switch of a rack sees it."""
_RUN = Path("/run/netns")
_BRIDGE_FILTERS = Path("/proc/sys/net/bridge")  # each namespace has its own
# nftables draws an integer below this: the loss in millionths.
_LOSS_UNIT = 1_000_000
# How much may go at the machine's rate, and how long the rest may wait before it is dropped.
_TBF = "burst 128k latency 50ms"
# How long processes in a laboratory that is removed have to end after SIGTERM, in seconds.
_TERMINATION = 2.0
_CLONE_NEWNET = 0x40000000


class Netlab:
    """A laboratory that lives as long as its ``with`` block, also when a signal ends that.

    ``rate_bps`` shapes each link both ways; None leaves it to the machine. ``loss`` is the fraction
    of IP packets that each link loses, independently, in each direction; links that can lose (0 is
    a loss, None is not) carry no trains, which costs the machine several times as much for a byte.
    Laboratories with different names do not see each other.

    With several ``racks`` the workers are divided among ``sw0``, ``sw1``, .., each with a link to
    ``server``: a bridge as well, so that any two can talk.
    """

    def __init__(
        self,
        workers: int,
        *,
        racks: int = 1,
        rate_bps: int | None = None,
        loss: float | None = None,
        mtu: int = MTU_DEFAULT,
        name: str = "",
    ) -> None:
        if not 1 <= workers <= WORKERS_MAX:
            raise NetlabError(f"{workers} workers: a laboratory has 1 to {WORKERS_MAX}")
        if not 1 <= racks <= min(workers, RACKS_MAX):
            raise NetlabError(
                f"{racks} racks of {workers} workers: 1 to {RACKS_MAX}, none of them empty"
            )
        if not MTU_MIN <= mtu <= MTU_MAX:
            raise NetlabError(f"an MTU of {mtu}: IPv4 over Ethernet has {MTU_MIN} to {MTU_MAX}")
        if loss is not None and not 0 <= loss <= 0.5:
            raise NetlabError(f"a loss of {loss}: a fraction of at most 0.5")
        self.workers = workers
        self.racks = racks
        self.rate_bps = rate_bps
        self.loss = loss
        self.mtu = mtu
        self.name = checked_name(name)
        self._signals = contextlib.ExitStack()

    def up(self) -> None:
        """Build it, in place of the one of that name if there is one."""
        require_root()
        require_tools("ip", "tc", *(["nft"] if self.loss else []))
        down(self.name)
        try:
            self._build()
        except BaseException:
            down(self.name)
            raise

    def down(self) -> None:
        """Remove it with all processes in it. Idempotent."""
        down(self.name)

    def namespace(self, member: str) -> str:
        """Return the name under which `ip netns` knows ``w0``, .. or ``sw``."""
        return namespace_of(self.name, member)

    def switch_of(self, worker: int) -> str:
        """Return the switch of the worker's rack: ``sw``, or one of ``sw0``, ``sw1``, .."""
        if self.racks == 1:
            return SWITCH
        return f"{SWITCH}{worker * self.racks // self.workers}"

    def popen(self, member: str, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command in ``w0``, .. or ``sw``; the keywords are `subprocess.Popen`'s."""
        return subprocess.Popen(inside(self.namespace(member), command), **keywords)

    def __enter__(self) -> Netlab:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_signals.as_exit())
            self.up()
            self._signals = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._signals, _signals.ignored():
            self.down()

    def _build(self) -> None:
        ports: dict[str, list[str]] = {self.switch_of(i): [] for i in range(self.workers)}
        for i in range(self.workers):
            ports[self.switch_of(i)].append(f"w{i}")
        create = [f"netns add {self.namespace(switch)}" for switch in ports]
        for switch, of_switch in ports.items():
            for worker in of_switch:
                create.append(f"netns add {self.namespace(worker)}")
                create.append(self._link(worker, INTERFACE, switch, worker))
        if self.racks > 1:
            create.append(f"netns add {self.namespace(SERVER)}")
            for switch, of_switch in ports.items():
                create.append(self._link(switch, UPLINK, SERVER, switch))
                of_switch.append(UPLINK)
            ports[SERVER] = [switch for switch in ports if switch != SERVER]
        batch(["ip"], create)
        for bridge, of_bridge in ports.items():
            self._build_bridge(bridge, of_bridge)
        for i in range(self.workers):
            worker = self.namespace(f"w{i}")
            link = f"link set {INTERFACE} mtu {self.mtu} {self._segments()} up"
            own = f"addr add {address(i)}/24 dev {INTERFACE}"
            batch(["ip", "-n", worker], ["link set lo up", link, own])
            self._impair(worker, [INTERFACE])
        for bridge, of_bridge in ports.items():
            self._impair(self.namespace(bridge), of_bridge)

    def _link(self, below: str, end: str, above: str, port: str) -> str:
        # Born in their namespaces: a name in ours could be taken, or be left behind.
        below, above = self.namespace(below), self.namespace(above)
        return f"link add {end} netns {below} type veth peer name {port} netns {above}"

    def _build_bridge(self, member: str, ports: Sequence[str]) -> None:
        namespace = self.namespace(member)
        link = f"mtu {self.mtu} {self._segments()} up"
        batch(
            ["ip", "-n", namespace],
            [
                "link set lo up",
                f"link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                *(f"link set {port} master {BRIDGE} {link}" for port in ports),
                f"link set {BRIDGE} {link}",
                f"addr add {bridge_address(member)}/24 dev {BRIDGE}",
            ],
        )
        # Where br_netfilter is loaded, the bridge would route and filter what it has to pass on.
        if filters := sorted(map(str, _BRIDGE_FILTERS.glob("bridge-nf-call-*"))):
            run(inside(namespace, ["tee", *filters]), "0")

    def _impair(self, namespace: str, interfaces: Sequence[str]) -> None:
        """Shape what the interfaces send, and lose some of what they receive."""
        if self.rate_bps is not None:
            shape = f"root tbf rate {self.rate_bps}bit {_TBF}"
            batch(["tc", "-n", namespace], [f"qdisc add dev {i} {shape}" for i in interfaces])
        if self.loss:
            rules = self._rules(self.loss, interfaces)
            run(inside(namespace, ["nft", "-f", "-"]), rules, f"nft in {namespace}")

    def _segments(self) -> str:
        # A link that takes no train makes the kernel cut it first, TCP's and UDP_SEGMENT's alike,
        # so that a packet is a packet for the rules below. veth does not join them again: no GRO.
        return "" if self.loss is None else "gso_max_segs 1"

    def _rules(self, loss: float, interfaces: Sequence[str]) -> str:
        millionths = round(loss * _LOSS_UNIT)
        # At the receiving end: the packet has taken its time on the link, and whoever sent it does
        # not hear of its loss, as it would (EPERM) from a rule on its own output. ARP is spared.
        return f"""
table netdev fanin {{
  chain loss {{
    type filter hook ingress devices = {{ {", ".join(interfaces)} }} priority 0; policy accept;
    ether type ip numgen random mod {_LOSS_UNIT} < {millionths} counter drop
  }}
}}
"""


def address(worker: int) -> str:
    """Return the worker's address."""
    return f"10.77.0.{worker + 1}"


def bridge_address(member: str) -> str:
    """Return the address of ``sw``, ``sw0``, .. or ``server``."""
    rack = member.removeprefix(SWITCH)
    return f"10.77.0.{WORKERS_MAX + 1 + int(rack)}" if rack.isdecimal() else SWITCH_ADDRESS


def down(name: str = "") -> list[str]:
    """Remove the laboratory of that name, whole or not, and end what runs in it.

    Returns the members that there were.
    """
    require_root()
    require_tools("ip")
    found = members(name)
    namespaces = [namespace_of(name, member) for member in found]
    _end_processes(namespaces)
    for namespace in namespaces:
        run(["ip", "netns", "del", namespace])
    return found


def members(name: str = "") -> list[str]:
    """Return what there is of the laboratory of that name: workers in their order, then the rest.

    That is ``sw``, or ``sw0``, ``sw1``, .. and ``server``.
    """
    prefix = re.escape(namespace_of(checked_name(name), ""))
    pattern = re.compile(prefix + r"(server|sw\d*|w(\d+))")
    try:
        matches = [match for entry in _RUN.iterdir() if (match := pattern.fullmatch(entry.name))]
    except FileNotFoundError:  # nobody has made a namespace since the machine started
        return []
    return [m[1] for m in sorted(matches, key=_place)]


def _place(match: re.Match[str]) -> tuple[int, str]:
    rest = (WORKERS_MAX, WORKERS_MAX + 1)[match[1] == SERVER]
    return int(match[2]) if match[2] else rest, match[1]


def names() -> list[str]:
    """Return the names of the laboratories that there are, whole or not."""
    pattern = re.compile(r"fanin-(?:([a-z0-9]+)-)?(?:server|sw\d*|w\d+)")
    try:
        matches = [match for entry in _RUN.iterdir() if (match := pattern.fullmatch(entry.name))]
    except FileNotFoundError:
        return []
    return sorted({match[1] or "" for match in matches})


def processes(name: str, member: str) -> list[int]:
    """Return the ids of the processes in the member, without this one."""
    shown = run(["ip", "netns", "pids", namespace_of(name, member)])
    return [pid for pid in map(int, shown.split()) if pid != os.getpid()]


def enter(namespace: str) -> None:
    """Move the calling thread, and the threads that it starts, into the network namespace."""
    with (_RUN / namespace).open() as opened:
        # os.setns is Python 3.12's.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(opened.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


def _end_processes(namespaces: Sequence[str]) -> None:
    def living() -> set[int]:
        listed = " ".join(run(["ip", "netns", "pids", namespace]) for namespace in namespaces)
        return set(map(int, listed.split())) - {os.getpid()}

    deadline = time.monotonic() + _TERMINATION
    asked: set[int] = set()
    while pids := living():
        late = time.monotonic() > deadline
        for pid in pids if late else pids - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            return
        asked |= pids
        time.sleep(0.02)
