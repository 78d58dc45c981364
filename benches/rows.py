"""The rows of docs/performance.md: what is run, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fanin_lab.papers.byteps.equations import optimal
from fanin_lab.units import rate_bps, shown_time

HEADERS = 1482 / 1408
"""What is on an Ethernet link with an MTU of 1500, by what of it is payload."""
QUICK_WORKERS = 2
QUICK_BYTES = 100_000


@dataclass(frozen=True)
class Command:
    """One `fanin bench allreduce`, run once a round."""

    what: str
    """Workers, links, tensor, as the document says it. No two commands say the same."""
    workers: int
    size_bytes: int
    links: str = ""
    """Options that build a laboratory; without any, it runs on loopback."""
    options: str = ""
    repeat: int = 5
    times: float = 1.0
    """The bound, in units of payload / rate: of one switch with a link for each worker it is 1."""
    whole: bool = False
    """Whether its options are about as many workers as these."""
    peers: str = "gloo"
    """Who takes turns with fanin, as `--baseline` has it."""

    def arguments(self) -> list[str]:
        """Return what follows `fanin bench allreduce`."""
        size = f"{self.size_bytes // 1000}KB"
        if self.size_bytes % 1_000_000 == 0:
            size = f"{self.size_bytes // 1_000_000}MB"
        return [
            *("--workers", str(self.workers), *self.links.split(), "--size", size),
            *(*self.options.split(), "--repeat", str(self.repeat)),
            *([] if self.peers == "gloo" else ["--baseline", self.peers]),
        ]

    def bound_s(self) -> float:
        """Return what nobody is faster than, headers not counted; the links have a rate."""
        words = self.links.split()
        return self.times * 8 * self.size_bytes / rate_bps(words[words.index("--rate") + 1])

    def quick(self) -> Command:
        """Return it so small that it takes no time, and says nothing about speed."""
        options = f"{self.options} --warmup 0".strip()
        workers = self.workers if self.whole else QUICK_WORKERS
        size = min(self.size_bytes, QUICK_BYTES)
        return replace(self, workers=workers, size_bytes=size, options=options, repeat=1)


Round = Mapping[Command, Mapping[str, Any]]
"""Of one round, the ``runs[0]`` of each command's JSON."""


Against = Command | Literal["bound", "gloo", "tcp", "alone", "reliable"]


@dataclass(frozen=True)
class Check:
    """What is asked of a command, held against another figure of the same round.

    Against Gloo, which takes turns with fanin within the command, ``limit`` is how many times as
    fast fanin is at least. Against TCP it is the share of the link's rate that TCP has at least
    while fanin sums, and against "alone" how fast fanin is at least beside TCP, as a share of how
    fast it is without. Against "reliable" it is how many times as long sums with a loss bound take
    at most as those of the same job without one. Else it is how many times as long fanin takes at
    most.
    """

    command: Command
    limit: float
    against: Against
    than: str = ""
    """The other command's figure, in words."""
    cpu: bool = False
    """Whether it is the CPU seconds that are compared, of all processes that sum."""
    same_bits: bool = False
    """Whether the sums must be those of the other command, bit by bit."""
    headers: bool = False
    """Whether what is asked allows for the headers of its packets, beyond the bound."""
    p99: bool = False
    """Whether it is about the 99th percentile in place of the median."""

    def asked(self) -> str:
        """Return what is asked in words."""
        if self.against == "tcp":
            return f"TCP has at least {self.limit:.0%} of the link"
        if self.against == "alone":
            return f"fanin keeps at least {self.limit:.0%} of its rate"
        if self.cpu:
            than = "Gloo's" if self.against == "gloo" else self.than
            return f"at most {self.limit:g} times {than} CPU s/GB"
        if self.against == "reliable":
            what = "99th percentile" if self.p99 else "median"
            return f"with the bound, at most {self.limit:g} times the {what} without"
        if self.against == "gloo":
            return f"at least {self.limit:g} times as fast as Gloo"
        if self.against == "bound":
            limit_s = self.limit * self._over_bound() * self.command.bound_s()
            headers = " with headers" if self.headers else ""
            return f"at most {self.limit:g} times the bound{headers}: {shown_time(limit_s)}"
        bits = ", the same bits" if self.same_bits else ""
        return f"at most {self.limit:g} times {self.than}{bits}"

    def needs(self) -> list[Command]:
        """Return the commands that must have run."""
        return [*([self.against] if isinstance(self.against, Command) else []), self.command]

    def figure(self, found: Round) -> float:
        """Return what ``limit`` limits, at the medians of that round."""
        run = found[self.command]
        if self.against == "tcp":
            return float(run["backends"]["fanin"]["bulk_bps"] / run["links"]["rate_bps"])
        if self.cpu:
            other = found[self.against] if isinstance(self.against, Command) else run
            backend = "fanin" if isinstance(self.against, Command) else "gloo"
            return cpu_s_per_gb(run, "fanin") / cpu_s_per_gb(other, backend)
        if self.against == "reliable":
            figure = "p99_s" if self.p99 else "median_s"
            bounded, reliable = (run["backends"][name][figure] for name in ("bounded", "fanin"))
            return float(bounded / reliable)
        ours = median_s(run, "fanin")
        if self.against in ("gloo", "alone"):
            return median_s(run, self.against) / ours
        if self.against == "bound":
            return ours / float(run["bound_s"]) / self._over_bound()
        assert isinstance(self.against, Command)
        return ours / median_s(found[self.against], "fanin")

    def _over_bound(self) -> float:
        return HEADERS if self.headers else 1.0

    def met(self, figure: float) -> bool:
        """Whether that is what was asked."""
        is_least = self.against in ("gloo", "tcp", "alone") and not self.cpu
        return figure >= self.limit if is_least else figure <= self.limit

    def bits_agree(self, found: Round) -> bool:
        """Whether the sums of that round were the other command's, where that is asked."""
        if not self.same_bits:
            return True
        one, other = ([s["digest"] for s in fanin_samples(found[c])] for c in self.needs())
        return one == other


def median_s(run: Mapping[str, Any], backend: str) -> float:
    """Return a backend's median time in a run's JSON."""
    return float(run["backends"][backend]["median_s"])


def cpu_s_per_gb(run: Mapping[str, Any], backend: str) -> float:
    """Return a backend's CPU seconds for a gigabyte, of ranks and of what only sums."""
    found = run["backends"][backend]
    ours = found["switch_cpu_s_per_gb"] if backend == "fanin" else 0.0
    return float(found["ranks_cpu_s_per_gb"] + ours)


def fanin_samples(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return fanin's samples in a run's JSON."""
    samples: list[Mapping[str, Any]] = run["backends"]["fanin"]["samples"]
    return samples


MB = 1_000_000
# Open MPI takes turns where the network or the tensor is new, and not where only fanin's way is.
_PEERS = "gloo,openmpi"

GIGABIT = Command("8, 1 Gbit/s, 25 MB", 8, 25 * MB, "--rate 1gbit", peers=_PEERS)
BUCKETS = Command(
    "8, 1 Gbit/s, 25 tensors of 1 MB in flight", 8, 25 * MB, "--rate 1gbit", "--buckets 25"
)
BFLOAT16 = Command(
    "8, 1 Gbit/s, 25 MB, bfloat16 on the wire",
    *(8, 25 * MB, "--rate 1gbit", "--wire-dtype bfloat16"),
)
HALF = Command("8, 500 Mbit/s, 25 MB", 8, 25 * MB, "--rate 500mbit", peers=_PEERS)
HALF_LONG = Command(
    "8, 500 Mbit/s, 100 MB", 8, 100 * MB, "--rate 500mbit", "--warmup 1", 3, peers="none"
)
JUMBO = Command("8, 1 Gbit/s, MTU 9000, 25 MB", 8, 25 * MB, "--rate 1gbit --mtu 9000", peers=_PEERS)
# An MTU is what makes it a laboratory, of links as fast as the machine.
UNSHAPED = Command("4, unshaped, 25 MB", 4, 25 * MB, "--mtu 1500", repeat=15, peers=_PEERS)
LOOPBACK = Command("4, loopback, 25 MB", 4, 25 * MB, repeat=15)
UNSHAPED_SMALL = Command("4, unshaped, 4 kB", 4, 4_000, "--mtu 1500", repeat=15, peers=_PEERS)
LOOPBACK_SMALL = Command("4, loopback, 4 kB", 4, 4_000, repeat=15)
# Many clouds' interfaces do not cut UDP's trains. Gloo's and Open MPI's TCP keeps its own.
CUT = Command("4, 1 Gbit/s, 25 MB", 4, 25 * MB, "--rate 1gbit", peers=_PEERS)
UNCUT = Command(
    "4, 1 Gbit/s, no segmentation offload for UDP, 25 MB",
    *(4, 25 * MB, "--rate 1gbit --no-udp-offload"),
    peers=_PEERS,
)
# A loss of 0 is one: offload is off in all three, so that a packet is a packet.
LOSSLESS = Command("4, 1 Gbit/s, loss 0, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 0", peers="none")
LOSS = Command(
    "4, 1 Gbit/s, loss 0.1 %, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 0.1%", peers="none"
)
LOSS_HIGH = Command(
    "4, 1 Gbit/s, loss 1 %, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 1%", peers="none"
)
# Without offload, two cores are no faster than such links are at 1 Gbit/s.
SLOW_LOSSLESS, SLOW_LOSS, SLOW_LOSS_HIGH = (
    Command(
        f"4, 200 Mbit/s, loss {words}, 25 MB",
        *(4, 25 * MB, f"--rate 200mbit --loss {loss}", "--warmup 1"),
        peers="none",
    )
    for words, loss in (("0", "0"), ("0.1 %", "0.1%"), ("1 %", "1%"))
)

# Machines behind one link each, which sum themselves, alone or with k more that only sum.
_OWN = "--plan own --warmup 1"


def _split(k: int, links: str = "", words: str = "", rate: str = "1 Gbit/s") -> Command:
    options = f"--warmup 1 --spares {k}" if k else _OWN
    more = f", {k} more" if k else ""
    what = f"8, {rate}{words}, own services{more}, 25 MB"
    links = f"--rate {rate.removesuffix('/s').replace(' ', '').lower()}{links}"
    return Command(
        what, 8, 25 * MB, links, options, 3, optimal(8, k), peers="gloo" if k else _PEERS
    )


OWN, *MORE = map(_split, (0, 1, 2, 4, 8))
# Sixteen machines share two cores here. At a fifth of the rate these are no bottleneck.
SLOW, *SLOW_MORE = (_split(k, rate="200 Mbit/s") for k in (0, 2, 4, 8))
# The interfaces of virtual machines tell no rate.
UNTOLD = _split(1, " --untold", ", rates untold")
# Buffers of a port: 100 and 200 kB are those of cheap switches.
SHALLOW, SMALL = (_split(0, f" --queue {size}KB", f", ports with {size} kB") for size in (100, 200))
DEEP, *DEEP_MORE = (
    _split(k, " --queue 512KB --burst 128KB", ", ports with 512 kB, bursts of 128 kB")
    for k in (0, 2, 4, 8)
)
OWN_BFLOAT16 = replace(
    OWN,
    what="8, 1 Gbit/s, own services, 25 MB, bfloat16 on the wire",
    options=f"{_OWN} --wire-dtype bfloat16",
    peers="gloo",
)
OWN_INT8 = replace(
    OWN,
    what="8, 1 Gbit/s, own services, 25 MB, int8 on the wire",
    options=f"{_OWN} --wire-dtype int8",
    peers="gloo",
)
ONE_LINK = Command(
    "8, 1 Gbit/s, one switch behind a link such as theirs, 25 MB",
    *(8, 25 * MB, "--rate 1gbit", "--spares 1 --plan switch --warmup 1", 3),
    times=8,
)
UNEQUAL = Command(
    "4, 1 Gbit/s, one of them 500 Mbit/s, 1 more of 2.5 Gbit/s, 25 MB",
    *(4, 25 * MB, "--rate 1gbit --rate-of w3=500mbit"),
    *("--warmup 1 --spares 1 --spare-rate 2.5gbit", 3),
    times=2,
    whole=True,
)
# With equal shares it would take 1.4 times the bound.
UNEQUAL_UNTOLD = replace(
    UNEQUAL,
    what=UNEQUAL.what.replace(", 25 MB", ", rates untold, 25 MB"),
    links=f"{UNEQUAL.links} --untold",
)
# Two interfaces of each machine. So slow that the processor is no limit.
ONE_NIC, TWO_NICS = (
    Command(
        f"4, {links} 200 Mbit/s, own services, 25 MB",
        *(4, 25 * MB, f"--rate 200mbit --nics {nics}", _OWN, 3, optimal(4, 0) / nics),
        peers="none",
    )
    for nics, links in ((1, "one link of"), (2, "two links of"))
)
GROUPED = Command(
    "2 machines of 4, 1 Gbit/s, own services, 25 MB",
    *(8, 25 * MB, "--rate 1gbit", f"{_OWN} --ranks-per-machine 4", 3),
    times=optimal(2, 0),
    whole=True,
)
LOCAL, LOCAL_8 = (
    Command(f"{n} on one machine, no network, 25 MB", n, 25 * MB, "", _OWN, 15) for n in (4, 8)
)
UNSHAPED_OWN, UNSHAPED_OWN_8 = (
    Command(
        f"{n}, unshaped, own services, 25 MB",
        *(n, 25 * MB, "--mtu 1500", _OWN, 15),
        peers=_PEERS,
    )
    for n in (4, 8)
)
OWN_SMALL = Command(
    "4, 1 Gbit/s, own services, 4 kB", 4, 4_000, "--rate 1gbit", _OWN, 15, peers=_PEERS
)
BESIDE_TCP = Command(
    "4, 1 Gbit/s, own services, beside TCP, 25 MB",
    *(4, 25 * MB, "--rate 1gbit --background tcp", f"{_OWN} --calls 2", 3),
)
# Racks of switches, of which each is the switch of its workers.
RACKS_ATP, RACKS_SWITCHML = (
    Command(
        f"8 in two racks, 1 Gbit/s, {words}, 25 MB",
        *(8, 25 * MB, "--rate 1gbit --racks 2", f"--warmup 1 --protocol {protocol}", 3),
    )
    for protocol, words in (("atp", "ATP"), ("switchml", "SwitchML"))
)

# Values of two bytes, at a rate at which two cores are no limit: float32 as bfloat16, and bfloat16.
ATP_SLOW, ATP_ROUNDED, ATP_HALVES = (
    Command(
        f"8, 200 Mbit/s, ATP, 25 MB of {words}",
        *(8, 25 * MB, "--rate 200mbit", f"--warmup 1 --protocol atp{options}", 3),
    )
    for options, words in (
        ("", "float32"),
        (" --wire-dtype bfloat16", "float32, bfloat16 on the wire"),
        (" --dtype bfloat16", "bfloat16"),
    )
)
# Sums have four bytes: the racks' links carry twice as much.
RACKS_HALVES = Command(
    "8 in two racks with links of 400 Mbit/s, 200 Mbit/s, ATP, 25 MB of bfloat16",
    *(8, 25 * MB, "--rate 200mbit --racks 2 --rate-of sw0=400mbit --rate-of sw1=400mbit"),
    *("--warmup 1 --protocol atp --dtype bfloat16", 3),
)


def _tail(size: int, words: str, repeat: int) -> Command:
    return Command(
        f"4, 100 Mbit/s, bursts of 6 kB, loss 0.1 %, 8 in a row, {words}, 4 % may be lost",
        *(4, size, "--rate 100mbit --burst 6KB --loss 0.1% --loss-burst 8"),
        *("--plan switch --loss-bound 0.04 --calls 1", repeat),
    )


TAILS = [_tail(64_000, "64 kB", 1000), _tail(250_000, "250 kB", 600), _tail(MB, "1 MB", 200)]
"""A burst of losses meets one sum of 64 kB in twenty: few sums do not show the slowest hundredth.
Without segmentation offload a bucket of 1 MB takes two cores 21 ms and more, and links of 1 Gbit/s
8 ms: there they would show the processor. After a pause a shaped link of the laboratory carries
50 kB as fast as the machine, which is most of a bucket of 64 kB. Ports of switches do not, and DLCP
keeps to the rate; so these links carry 6 kB so."""


def _fast(n: int, rate: str) -> Command:
    what = f"{n}, {rate} Gbit/s, own services, 25 MB"
    return Command(what, n, 25 * MB, f"--rate {rate}gbit", _OWN, 9, optimal(n, 0), whole=True)


FAST = [_fast(4, "2.5"), _fast(4, "10"), _fast(2, "25")]
"""Nothing is asked of them: how far they come says how many cores a machine needs at these rates.
All machines share the cores of one here, so the CPU, and not the link, is the bottleneck at 10 and
25 Gbit/s."""

CHECKS = [
    Check(GIGABIT, 1.08, "bound"),
    Check(GIGABIT, 1.65, "gloo"),
    Check(BUCKETS, 1.12, GIGABIT, "the time of one tensor of 25 MB"),
    Check(BFLOAT16, 0.56, GIGABIT, "the time with float32 on the wire"),
    Check(HALF, 1.07, "bound"),
    Check(HALF_LONG, 1.07, "bound"),
    Check(JUMBO, 1.04, "bound"),
    Check(UNSHAPED, 1.4, "gloo"),
    Check(LOOPBACK, 1.4, "gloo"),
    Check(UNSHAPED_SMALL, 2.0, "gloo"),
    Check(LOOPBACK_SMALL, 2.0, "gloo"),
    Check(UNCUT, 1.15, CUT, "the time with offload"),
    Check(LOSS, 1.02, LOSSLESS, "the time without loss", same_bits=True),
    Check(LOSS_HIGH, 1.08, LOSSLESS, "the time without loss", same_bits=True),
    Check(SLOW_LOSS, 1.02, SLOW_LOSSLESS, "the time without loss", same_bits=True),
    Check(SLOW_LOSS_HIGH, 1.08, SLOW_LOSSLESS, "the time without loss", same_bits=True),
    Check(OWN, 1.09, "bound"),
    Check(OWN, 1.0, "gloo"),
    Check(OWN, 1.15, "gloo", cpu=True),
    Check(SHALLOW, 0.953, "gloo"),
    Check(SMALL, 1.0, "gloo"),
    Check(DEEP, 1.0, "gloo"),
    Check(DEEP, 1.15, "gloo", cpu=True),
    Check(OWN_BFLOAT16, 0.55, OWN, "the time with float32 on the wire"),
    Check(OWN_INT8, 0.3, OWN, "the time with float32 on the wire"),
    Check(OWN_INT8, 3.0, "gloo"),
    *(Check(split, 1.08, "bound", headers=True) for split in MORE),
    Check(MORE[-1], 1.6, "gloo"),
    *(Check(split, 1.0, OWN, "own services alone's", cpu=True) for split in MORE[1:]),
    *(Check(split, 1.08, "bound", headers=True) for split in DEEP_MORE),
    Check(SLOW, 1.0, "gloo"),
    *(Check(split, 1.08, "bound", headers=True) for split in SLOW_MORE),
    Check(UNTOLD, 1.0, OWN, "the time of own services alone"),
    Check(UNTOLD, 1.08, "bound", headers=True),
    Check(ONE_LINK, 1.12, "bound"),
    Check(UNEQUAL, 1.1, "bound"),
    Check(UNEQUAL_UNTOLD, 1.1, "bound"),
    Check(TWO_NICS, 1.1, "bound", headers=True),
    Check(TWO_NICS, 0.55, ONE_NIC, "the time with one link each"),
    Check(GROUPED, 1.12, "bound", headers=True),
    Check(GROUPED, 1.5, "gloo"),
    Check(LOCAL, 2.0, "gloo"),
    Check(LOCAL_8, 2.0, "gloo"),
    Check(UNSHAPED_OWN, 1.3, "gloo"),
    Check(UNSHAPED_OWN_8, 1.3, "gloo"),
    Check(OWN_SMALL, 4.0, "gloo"),
    Check(BESIDE_TCP, 0.4, "tcp"),
    Check(BESIDE_TCP, 0.4, "alone"),
    Check(RACKS_ATP, 1.12, RACKS_SWITCHML, "SwitchML's time in the same racks"),
    Check(RACKS_ATP, 1.5, "gloo"),
    Check(RACKS_ATP, 1.1, RACKS_SWITCHML, "SwitchML's in the same racks:", cpu=True),
    Check(ATP_ROUNDED, 0.56, ATP_SLOW, "the time with float32 on the wire"),
    Check(ATP_HALVES, 1.4, "gloo"),
    Check(RACKS_HALVES, 1.4, "gloo"),
    *(Check(tail, 0.5, "reliable", p99=True) for tail in TAILS),
    *(Check(tail, 1.0, "reliable") for tail in TAILS),
]
"""What is compared stands together: commands run in this order, and backwards every other round."""


def commands(checks: Sequence[Check]) -> list[Command]:
    """Return the commands that the checks need, each once, in their order."""
    return list(dict.fromkeys(command for check in checks for command in check.needs()))


def quick(checks: Sequence[Check]) -> list[Check]:
    """Return the checks of the commands' quick versions."""
    return [
        replace(
            check,
            command=check.command.quick(),
            against=check.against.quick() if isinstance(check.against, Command) else check.against,
        )
        for check in checks
    ]
