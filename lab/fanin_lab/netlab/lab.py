"""Building a laboratory, being in it, and removing it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fanin import _signals

from fanin_lab.netlab import queues as queues_of
from fanin_lab.netlab.kernel import (
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
"""The server's address; in a laboratory with several racks it stands above their switches."""
WORKERS_MAX = 208
SPARES_MAX = 32
RACKS_MAX = 10
MTU_MIN, MTU_DEFAULT, MTU_MAX = 576, 1500, 65535
_ETHERNET_HEADER = 14  # bytes, which a queue counts and an MTU does not
INTERFACE = "eth0"
"""The link, as a worker or a spare machine sees it; the further links of workers are eth1, .."""
NICS_MAX = 4

_FIRST = {"w": 1, "s": WORKERS_MAX + 1, SWITCH: WORKERS_MAX + SPARES_MAX + 1}
"""The last part of the first address of workers, spare machines, and switches of racks."""
_MACHINE = re.compile(r"(w|s|sw)(\d+)")
_MEMBER = r"server|sw\d*|s\d+|w\d+"

BRIDGE = "br0"
UPLINK = "uplink"
"""The link to the server, as the switch of a rack sees it."""
_RUN = Path("/run/netns")
_BRIDGE_FILTERS = Path("/proc/sys/net/bridge")  # each namespace has its own
# nftables draws an integer below this: the loss in millionths.
_LOSS_UNIT = 1_000_000
LOSS_BURST_MAX = 10_000
# How many bytes may go at the machine's rate: as many as a timer of it may be late for, and a few
# frames. On a slow link more would be a good part of what is measured.
_BURST_MAX = 128 << 10
_BURST_S = 0.004
_BURST_FRAMES = 4
# The rate of a queue that marks, as a part of its link's.
_PHANTOM = 0.95
# Packets that a machine's own interface queues, as the kernel has it (txqueuelen).
_OWN_QUEUE = 1000
# How long the rest may wait before it is dropped, where nobody says how much of it may.
_LATENCY_S = 0.05
# How long processes in a laboratory that is removed have to end after SIGTERM, in seconds.
_TERMINATION = 2.0
_CLONE_NEWNET = 0x40000000


class Netlab:
    """A laboratory that lives as long as its ``with`` block, also when a signal ends that.

    ``rate_bps`` shapes each link both ways; None leaves it to the machine. At a switch's end
    of a shaped link ``queue_bytes`` may wait, or what it carries in 50 ms; at a machine's end 1,000
    packets may wait, or more if ``queue_bytes`` is more. With ``queues`` "dlcp" that is for each of
    the queues that DLCP asks for (`fanin_lab.netlab.queues`), and links carry no trains, as where
    they can lose. After a pause a link carries ``burst_bytes`` as fast as the machine; None chooses
    a burst that suits the rate. Switches mark ECN-capable packets (RFC 3168) that would wait behind
    ``ecn_bytes`` of others, each counted as a full one; None marks none. Without ``udp_offload``
    the interfaces do not cut UDP's trains, as many clouds' do not: the kernel cuts them, and
    packets arrive singly. TCP's trains stay whole. ``loss`` is the fraction of IP packets that each
    link loses, independently, in each direction; links that can lose (0 is a loss, None is not) or
    mark carry no trains, which costs the machine several times as much for a byte. With a
    ``loss_burst`` a link does not lose packets at random, but so many in a row, and then none for
    as long as makes it that fraction. Laboratories with different names do not see each other.

    ``spares`` are machines more, ``s0``, ``s1``, .., each with one link of its own, where ``sw``
    has the links of all: what is summed there crosses a link such as a worker's. Their links have
    ``spare_rate_bps``, or the workers' rate; ``rates`` are of single machines, by their names.

    With several ``racks`` the workers are divided among ``sw0``, ``sw1``, .., each with a link to
    ``server``: a bridge as well, so that any two can talk. Spare machines then hang on that. The
    switches' links have ``rate_bps``, or others by ``rates``.

    With several ``nics`` workers have further links, ``eth1``, .., each to a bridge of its own at
    ``sw`` and with a subnet of its own. They have ``rate_bps``; ``rates`` has others by the names
    ``eth1``, .. for all workers, and ``w0:eth1`` for one of them.
    """

    def __init__(
        self,
        workers: int,
        *,
        spares: int = 0,
        racks: int = 1,
        nics: int = 1,
        rate_bps: int | None = None,
        spare_rate_bps: int | None = None,
        rates: Mapping[str, int] | None = None,
        queue_bytes: int | None = None,
        queues: str = queues_of.FIFO,
        burst_bytes: int | None = None,
        ecn_bytes: int | None = None,
        udp_offload: bool = True,
        loss: float | None = None,
        loss_burst: int | None = None,
        mtu: int = MTU_DEFAULT,
        name: str = "",
    ) -> None:
        if not 1 <= workers <= WORKERS_MAX:
            raise NetlabError(f"{workers} workers: a laboratory has 1 to {WORKERS_MAX}")
        if not 0 <= spares <= SPARES_MAX:
            raise NetlabError(f"{spares} spare machines: a laboratory has up to {SPARES_MAX}")
        if spare_rate_bps is not None and not spares:
            raise NetlabError("a rate of spare machines, and there is none: say how many, too")
        if not 1 <= racks <= min(workers, RACKS_MAX):
            raise NetlabError(
                f"{racks} racks of {workers} workers: 1 to {RACKS_MAX}, none of them empty"
            )
        if not 1 <= nics <= NICS_MAX:
            raise NetlabError(f"{nics} links of a worker: it has 1 to {NICS_MAX}")
        if nics > 1 and racks > 1:
            raise NetlabError("several links of a worker and several racks: say one of them")
        if not MTU_MIN <= mtu <= MTU_MAX:
            raise NetlabError(f"an MTU of {mtu}: IPv4 over Ethernet has {MTU_MIN} to {MTU_MAX}")
        if loss is not None and not 0 <= loss <= 0.5:
            raise NetlabError(f"a loss of {loss}: a fraction of at most 0.5")
        if loss_burst is not None and not loss:
            raise NetlabError("bursts of loss, and no link loses anything: say how much, too")
        if loss_burst is not None and not 1 <= loss_burst <= LOSS_BURST_MAX:
            raise NetlabError(
                f"{loss_burst} packets lost in a row: a burst has 1 to {LOSS_BURST_MAX}"
            )
        self.workers = workers
        self.spares = spares
        self.racks = racks
        self.rate_bps = rate_bps
        self.rates: dict[str, int | None] = dict.fromkeys(_named("w", workers), rate_bps)
        """The rates of the machines' links, both ways; None: unshaped. Workers come first."""
        self.rates |= dict.fromkeys(_named("s", spares), spare_rate_bps or rate_bps)
        rates = dict(rates or {})
        self.nics = nics
        self.further = {
            interface(number): {
                worker: rates.pop(f"{worker}:{interface(number)}", usual)
                for worker in _named("w", workers)
            }
            for number in range(1, nics)
            for usual in [rates.pop(interface(number), rate_bps)]
        }
        """The rates of workers' further links, by interface and worker."""
        switches = _named(SWITCH, racks) if racks > 1 else []
        self.uplinks = {switch: rates.pop(switch, rate_bps) for switch in switches}
        """The rates of the links of racks' switches to the server."""
        if unknown := rates.keys() - self.rates.keys():
            there = [*self.rates, *self.further, *self.uplinks]
            raise NetlabError(f"a rate of {min(unknown)}: the machines are {' '.join(there)}")
        self.rates |= rates
        links = [self.rates, *self.further.values(), self.uplinks]
        shaped = [bps for of_link in links for bps in of_link.values()]
        if queue_bytes is not None and not any(shaped):
            raise NetlabError("a queue, and no link has a rate that would fill it: say one, too")
        if queue_bytes is not None and queue_bytes < mtu + _ETHERNET_HEADER:
            raise NetlabError(
                f"a queue of {queue_bytes} bytes: none has room for a full packet, so each would "
                f"be dropped; with an MTU of {mtu} it needs {mtu + _ETHERNET_HEADER}"
            )
        if queues not in queues_of.KINDS:
            raise NetlabError(f"queues {queues!r}: {' or '.join(queues_of.KINDS)}")
        if queues == queues_of.DLCP and not any(shaped):
            raise NetlabError(
                f"queues {queues}, and no link has a rate that would fill them: say one, too"
            )
        least = queues_of.PARTS * (mtu + _ETHERNET_HEADER)
        if queues == queues_of.DLCP and queue_bytes is not None and queue_bytes < least:
            raise NetlabError(
                f"queues {queues} of {queue_bytes} bytes: the lowest threshold is an eighth, with "
                f"no room for a full packet; with an MTU of {mtu} they need {least}"
            )
        if burst_bytes is not None and not any(shaped):
            raise NetlabError("a burst, and no link has a rate that it would exceed: say one, too")
        if ecn_bytes is not None and not any(shaped):
            raise NetlabError("marks, and no link has a rate whose queue they would tell of")
        if ecn_bytes is not None and ecn_bytes < mtu + _ETHERNET_HEADER:
            raise NetlabError(
                f"marks from {ecn_bytes} bytes: a single packet would be marked; with an MTU of "
                f"{mtu} it needs {mtu + _ETHERNET_HEADER}"
            )
        if burst_bytes is not None and burst_bytes < mtu + _ETHERNET_HEADER:
            raise NetlabError(
                f"a burst of {burst_bytes} bytes: a link sends no packet that is larger than its "
                f"burst; with an MTU of {mtu} it needs {mtu + _ETHERNET_HEADER}"
            )
        self.queue_bytes = queue_bytes
        self.queues = queues
        self.burst_bytes = burst_bytes
        self.ecn_bytes = ecn_bytes
        self.udp_offload = udp_offload
        self.loss = loss
        self.loss_burst = loss_burst
        self.mtu = mtu
        self.name = checked_name(name)
        self._signals = contextlib.ExitStack()

    def up(self) -> None:
        """Build it, in place of the one of that name if there is one."""
        require_root()
        require_tools(
            *("ip", "tc"),
            *(["nft"] if self.loss or self.ecn_bytes is not None else []),
            *([] if self.udp_offload else ["ethtool"]),
        )
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
        """Return the name under which `ip netns` knows ``w0``, .., ``s0``, .. or ``sw``."""
        return namespace_of(self.name, member)

    def switch_of(self, worker: int) -> str:
        """Return the switch of the worker's rack: ``sw``, or one of ``sw0``, ``sw1``, .."""
        if self.racks == 1:
            return SWITCH
        return f"{SWITCH}{worker * self.racks // self.workers}"

    def popen(self, member: str, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command in a member; the keywords are `subprocess.Popen`'s."""
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
        for i, worker in enumerate(_named("w", self.workers)):
            ports[self.switch_of(i)].append(worker)
        uplinks = list(ports) if self.racks > 1 else []
        if uplinks:
            ports[SERVER] = []
        ports[list(ports)[-1]] += _named("s", self.spares)
        create = [f"netns add {self.namespace(member)}" for member in [*ports, *self.rates]]
        for bridge, of_bridge in ports.items():
            create += [self._link(machine, INTERFACE, bridge, machine) for machine in of_bridge]
        for switch in uplinks:
            create.append(self._link(switch, UPLINK, SERVER, switch))
            ports[switch].append(UPLINK)
            ports[SERVER].append(switch)
        for further, workers in self.further.items():
            create += [self._link(each, further, SWITCH, port(each, further)) for each in workers]
        batch(["ip"], create)
        for bridge, of_bridge in ports.items():
            self._build_bridge(bridge, BRIDGE, of_bridge, address(bridge))
        for number, (further, workers) in enumerate(self.further.items(), 1):
            at = address(SWITCH, number)
            self._build_bridge(SWITCH, f"br{number}", [port(w, further) for w in workers], at)
        # A switch's port has a small buffer, and a machine's own interface has not.
        own_queue = _OWN_QUEUE * (self.mtu + _ETHERNET_HEADER)
        for machine in self.rates:
            rates = self._rates_of(machine)
            namespace = self.namespace(machine)
            links = [
                line
                for number, name in enumerate(rates)
                for line in (
                    f"link set {name} mtu {self.mtu} {self._segments()} up",
                    f"addr add {address(machine, number)}/24 dev {name}",
                )
            ]
            batch(["ip", "-n", namespace], ["link set lo up", *links])
            self._impair(namespace, rates, self._fifos(rates, own_queue))
        for bridge, of_bridge in ports.items():
            rates = self.rates | self.uplinks | {UPLINK: self.uplinks.get(bridge)}
            rates = {end: rates.get(end) for end in of_bridge}
            for further, of_workers in self.further.items():
                rates |= {port(worker, further): bps for worker, bps in of_workers.items()}
            at_ports = self._fifos(rates, 0) if self.queues == queues_of.FIFO else self._dlcp(rates)
            self._impair(self.namespace(bridge), rates, at_ports, marks_bytes=self.ecn_bytes)

    def _rates_of(self, machine: str) -> dict[str, int | None]:
        """Return the rates of a machine's links, by interface."""
        further = {name: of[machine] for name, of in self.further.items() if machine in of}
        return {INTERFACE: self.rates[machine], **further}

    def _link(self, below: str, end: str, above: str, port: str) -> str:
        # Born in their namespaces: a name in ours could be taken, or be left behind.
        below, above = self.namespace(below), self.namespace(above)
        return f"link add {end} netns {below} type veth peer name {port} netns {above}"

    def _build_bridge(self, member: str, bridge: str, ports: Sequence[str], at: str) -> None:
        namespace = self.namespace(member)
        link = f"mtu {self.mtu} {self._segments()} up"
        batch(
            ["ip", "-n", namespace],
            [
                "link set lo up",
                f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                *(f"link set {port} master {bridge} {link}" for port in ports),
                f"link set {bridge} {link}",
                f"addr add {at}/24 dev {bridge}",
            ],
        )
        # Where br_netfilter is loaded, the bridge would route and filter what it has to pass on.
        if filters := sorted(map(str, _BRIDGE_FILTERS.glob("bridge-nf-call-*"))):
            run(inside(namespace, ["tee", *filters]), "0")

    def _burst(self, rate_bps: int) -> int:
        if self.burst_bytes is not None:
            return self.burst_bytes
        late = min(_BURST_MAX, int(rate_bps / 8 * _BURST_S))
        return max(late, _BURST_FRAMES * (self.mtu + _ETHERNET_HEADER))

    def _fifos(self, rates: Mapping[str, int | None], queue_bytes_min: int) -> list[str]:
        """Return what tc is told of interfaces that send at their rates, each from one queue."""
        queue = f"latency {_LATENCY_S}s"
        if self.queue_bytes is not None:
            queue = f"limit {max(self.queue_bytes, queue_bytes_min)}"
        return [
            f"qdisc add dev {interface} root tbf rate {rate_bps}bit "
            f"burst {self._burst(rate_bps)} {queue}"
            for interface, rate_bps in rates.items()
            if rate_bps is not None
        ]

    def _dlcp(self, rates: Mapping[str, int | None]) -> list[str]:
        """Return the same of DLCP's queues."""
        frame = self.mtu + _ETHERNET_HEADER
        lines = []
        for interface, rate_bps in rates.items():
            if rate_bps is not None:
                usual = max(int(rate_bps / 8 * _LATENCY_S), queues_of.PARTS * frame)
                memory = usual if self.queue_bytes is None else self.queue_bytes
                burst = self._burst(rate_bps)
                lines += queues_of.dlcp(interface, rate_bps, burst, memory, frame)
        return lines

    def _impair(
        self,
        namespace: str,
        rates: Mapping[str, int | None],
        shape: Sequence[str],
        marks_bytes: int | None = None,
    ) -> None:
        """Shape what the interfaces send, mark some of it, and lose some of what they receive."""
        if shape:
            batch(["tc", "-n", namespace], shape)
        if not self.udp_offload:
            for interface in rates:
                off = ["ethtool", "--features", interface, "tx-udp-segmentation", "off"]
                run(inside(namespace, off))
        rules = self._losses(namespace, list(rates)) if self.loss else ""
        if marks_bytes is not None:
            rules += _marks(rates, marks_bytes, self.mtu)
        if rules:
            rules = f"table netdev fanin {{{rules}}}"
            run(inside(namespace, ["nft", "-f", "-"]), rules, f"nft in {namespace}")

    def _segments(self) -> str:
        # A link that takes no train makes the kernel cut it first, TCP's and UDP_SEGMENT's alike,
        # so that a packet is a packet for the rules below and for DLCP's queues. veth does not join
        # them again: no GRO.
        counts = self.loss is not None or self.ecn_bytes is not None
        return "gso_max_segs 1" if counts or self.queues != queues_of.FIFO else ""

    def _losses(self, namespace: str, interfaces: Sequence[str]) -> str:
        # At the receiving end: the packet has taken its time on the link, and whoever sent it does
        # not hear of its loss, as it would (EPERM) from a rule on its own output. ARP is spared.
        lost = self._lost(namespace, interfaces)
        rules = "\n".join(f"    ether type ip {each} counter drop" for each in lost)
        return f"""
  chain loss {{
    type filter hook ingress devices = {{ {", ".join(interfaces)} }} priority 0; policy accept;
{rules}
  }}
"""

    def _lost(self, namespace: str, interfaces: Sequence[str]) -> list[str]:
        """Return what holds for the packets that are lost."""
        assert self.loss
        if self.loss_burst is None:
            return [f"numgen random mod {_LOSS_UNIT} < {round(self.loss * _LOSS_UNIT)}"]
        period = round(self.loss_burst / self.loss)
        # Links that carry alike streams do not lose the same packets.
        dice = random.Random(namespace.removeprefix(namespace_of(self.name, "")))
        begins = [dice.randrange(period - self.loss_burst + 1) for _ in interfaces]
        return [
            f'iifname "{each}" numgen inc mod {period} {begin}-{begin + self.loss_burst - 1}'
            for each, begin in zip(interfaces, begins, strict=True)
        ]


def _marks(rates: Mapping[str, int | None], threshold: int, mtu: int) -> str:
    # A phantom queue marks: a counter of what goes into the port's queue, which drains a little
    # slower than that (Alizadeh et al., HULL, NSDI 2012). Not every kernel has a queue that marks.
    # It counts packets: nftables has no counter of bytes that holds less than a second's.
    frame = mtu + _ETHERNET_HEADER
    return "".join(
        f"""
  chain marks_{number} {{
    type filter hook egress device "{interface}" priority 0; policy accept;
    ether type ip limit rate over {round(bps / 8 / frame * _PHANTOM)}/second \
burst {threshold // frame} packets ip ecn {{ ect0, ect1 }} counter ip ecn set ce
  }}
"""
        for number, (interface, bps) in enumerate(rates.items())
        if bps is not None
    )


def address(member: str, nic: int = 0) -> str:
    """Return the address of ``w0``, .., ``s0``, .., ``sw``, ``sw0``, .. or ``server``.

    `nic` is the number of the link: the further ones of workers have subnets of their own.
    """
    if member in (SWITCH, SERVER):
        last = SWITCH_ADDRESS.rpartition(".")[2]
    else:
        match = _MACHINE.fullmatch(member)
        assert match, member
        last = str(_FIRST[match[1]] + int(match[2]))
    return f"10.{77 + nic}.0.{last}"


def interface(nic: int) -> str:
    """Return the name of a worker's link, by its number."""
    return f"eth{nic}"


def port(worker: str, further: str) -> str:
    """Return the switch's end of a worker's further link."""
    return f"{worker}.{further}"


def _named(kind: str, count: int) -> list[str]:
    return [f"{kind}{i}" for i in range(count)]


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
    """Return what there is of the laboratory of that name.

    Workers, then spare machines, each in their order; then ``sw``, or ``sw0``, ``sw1``, .. and
    ``server``.
    """
    prefix = re.escape(namespace_of(checked_name(name), ""))
    pattern = re.compile(f"{prefix}({_MEMBER})")
    try:
        matches = [match for entry in _RUN.iterdir() if (match := pattern.fullmatch(entry.name))]
    except FileNotFoundError:  # nobody has made a namespace since the machine started
        return []
    return sorted((match[1] for match in matches), key=_place)


def is_machine(member: str) -> bool:
    """Whether it has one link of its own: a worker or a spare machine."""
    match = _MACHINE.fullmatch(member)
    return match is not None and match[1] != SWITCH


def _place(member: str) -> tuple[int, int]:
    match = _MACHINE.fullmatch(member)
    kind, number = (match[1], int(match[2])) if match else (member, 0)
    return ("w", "s", SWITCH, SERVER).index(kind), number


def names() -> list[str]:
    """Return the names of the laboratories that there are, whole or not."""
    pattern = re.compile(f"fanin-(?:([a-z0-9]+)-)?(?:{_MEMBER})")
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
