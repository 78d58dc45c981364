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

    def arguments(self) -> list[str]:
        """Return what follows `fanin bench allreduce`."""
        size = f"{self.size_bytes // 1000}KB"
        if self.size_bytes % 1_000_000 == 0:
            size = f"{self.size_bytes // 1_000_000}MB"
        return [
            *("--workers", str(self.workers), *self.links.split(), "--size", size),
            *(*self.options.split(), "--repeat", str(self.repeat)),
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


@dataclass(frozen=True)
class Check:
    """What is asked of a command, held against another time of the same round.

    Against Gloo, which takes turns with fanin within the command, ``limit`` is how many times as
    fast fanin is at least; else how many times as long it takes at most.
    """

    command: Command
    limit: float
    against: Command | Literal["bound", "gloo"]
    than: str = ""
    """The other command's time, in words."""
    same_bits: bool = False
    """Whether the sums must be those of the other command, bit by bit."""
    headers: bool = False
    """Whether what is asked allows for the headers of its packets, beyond the bound."""

    def asked(self) -> str:
        """Return what is asked in words."""
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
        ours = median_s(found[self.command], "fanin")
        if self.against == "gloo":
            return median_s(found[self.command], "gloo") / ours
        if self.against == "bound":
            return ours / float(found[self.command]["bound_s"]) / self._over_bound()
        return ours / median_s(found[self.against], "fanin")

    def _over_bound(self) -> float:
        return HEADERS if self.headers else 1.0

    def met(self, figure: float) -> bool:
        """Whether that is what was asked."""
        return figure >= self.limit if self.against == "gloo" else figure <= self.limit

    def bits_agree(self, found: Round) -> bool:
        """Whether the sums of that round were the other command's, where that is asked."""
        if not self.same_bits:
            return True
        one, other = ([s["digest"] for s in fanin_samples(found[c])] for c in self.needs())
        return one == other


def median_s(run: Mapping[str, Any], backend: str) -> float:
    """Return a backend's median time in a run's JSON."""
    return float(run["backends"][backend]["median_s"])


def fanin_samples(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return fanin's samples in a run's JSON."""
    samples: list[Mapping[str, Any]] = run["backends"]["fanin"]["samples"]
    return samples


MB = 1_000_000
_ALONE = "--baseline none"

GIGABIT = Command("8, 1 Gbit/s, 25 MB", 8, 25 * MB, "--rate 1gbit")
BUCKETS = Command(
    "8, 1 Gbit/s, 25 tensors of 1 MB in flight", 8, 25 * MB, "--rate 1gbit", "--buckets 25"
)
BFLOAT16 = Command(
    "8, 1 Gbit/s, 25 MB, bfloat16 on the wire",
    *(8, 25 * MB, "--rate 1gbit", "--wire-dtype bfloat16"),
)
HALF = Command("8, 500 Mbit/s, 25 MB", 8, 25 * MB, "--rate 500mbit")
HALF_LONG = Command(
    "8, 500 Mbit/s, 100 MB", 8, 100 * MB, "--rate 500mbit", f"{_ALONE} --warmup 1", repeat=3
)
JUMBO = Command("8, 1 Gbit/s, MTU 9000, 25 MB", 8, 25 * MB, "--rate 1gbit --mtu 9000")
# An MTU is what makes it a laboratory, of links as fast as the machine.
UNSHAPED = Command("4, unshaped, 25 MB", 4, 25 * MB, "--mtu 1500", repeat=15)
LOOPBACK = Command("4, loopback, 25 MB", 4, 25 * MB, repeat=15)
UNSHAPED_SMALL = Command("4, unshaped, 4 kB", 4, 4_000, "--mtu 1500", repeat=15)
LOOPBACK_SMALL = Command("4, loopback, 4 kB", 4, 4_000, repeat=15)
# A loss of 0 is one: offload is off in all three, so that a packet is a packet.
LOSSLESS = Command("4, 1 Gbit/s, loss 0, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 0", _ALONE)
LOSS = Command("4, 1 Gbit/s, loss 0.1 %, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 0.1%", _ALONE)
LOSS_HIGH = Command("4, 1 Gbit/s, loss 1 %, 25 MB", 4, 25 * MB, "--rate 1gbit --loss 1%", _ALONE)

# Machines behind one link each, which sum themselves, alone or with k more that only sum.
_OWN = "--plan own --warmup 1"


def _split(k: int) -> Command:
    options = f"--warmup 1 --spares {k}" if k else _OWN
    more = f", {k} more" if k else ""
    what = f"8, 1 Gbit/s, own services{more}, 25 MB"
    return Command(what, 8, 25 * MB, "--rate 1gbit", options, 3, optimal(8, k))


OWN, *MORE = map(_split, (0, 1, 2, 4, 8))
OWN_BFLOAT16 = replace(
    OWN,
    what="8, 1 Gbit/s, own services, 25 MB, bfloat16 on the wire",
    options=f"{_OWN} --wire-dtype bfloat16",
)
OWN_INT8 = replace(
    OWN,
    what="8, 1 Gbit/s, own services, 25 MB, int8 on the wire",
    options=f"{_OWN} --wire-dtype int8",
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
    Command(f"{n}, unshaped, own services, 25 MB", n, 25 * MB, "--mtu 1500", _OWN, 15)
    for n in (4, 8)
)
OWN_SMALL = Command("4, 1 Gbit/s, own services, 4 kB", 4, 4_000, "--rate 1gbit", _OWN, 15)

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
    Check(LOSS, 1.15, LOSSLESS, "the time without loss", same_bits=True),
    Check(LOSS_HIGH, 2.0, LOSSLESS, "the time without loss", same_bits=True),
    Check(OWN, 1.09, "bound"),
    Check(OWN, 1.0, "gloo"),
    Check(OWN_BFLOAT16, 0.55, OWN, "the time with float32 on the wire"),
    Check(OWN_INT8, 0.3, OWN, "the time with float32 on the wire"),
    Check(OWN_INT8, 3.0, "gloo"),
    *(Check(split, 1.08, "bound", headers=True) for split in MORE),
    Check(MORE[-1], 1.6, "gloo"),
    Check(ONE_LINK, 1.12, "bound"),
    Check(UNEQUAL, 1.1, "bound"),
    Check(GROUPED, 1.12, "bound", headers=True),
    Check(GROUPED, 1.5, "gloo"),
    Check(LOCAL, 2.0, "gloo"),
    Check(LOCAL_8, 2.0, "gloo"),
    Check(UNSHAPED_OWN, 1.15, "gloo"),
    Check(UNSHAPED_OWN_8, 1.15, "gloo"),
    Check(OWN_SMALL, 4.0, "gloo"),
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
