"""The rows of docs/performance.md: what is run, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fanin._units import rate_bps, shown_time

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
        """Return payload / rate; the links have one."""
        words = self.links.split()
        return 8 * self.size_bytes / rate_bps(words[words.index("--rate") + 1])

    def quick(self) -> Command:
        """Return it so small that it takes no time, and says nothing about speed."""
        options = f"{self.options} --warmup 0".strip()
        size = min(self.size_bytes, QUICK_BYTES)
        return replace(self, workers=QUICK_WORKERS, size_bytes=size, options=options, repeat=1)


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

    def asked(self) -> str:
        """Return what is asked in words."""
        if self.against == "gloo":
            return f"at least {self.limit:g} times as fast as Gloo"
        if self.against == "bound":
            limit_s = self.limit * self.command.bound_s()
            return f"at most {self.limit:g} times the bound: {shown_time(limit_s)}"
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
            return ours / float(found[self.command]["bound_s"])
        return ours / median_s(found[self.against], "fanin")

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

CHECKS = [
    Check(GIGABIT, 1.08, "bound"),
    Check(GIGABIT, 1.65, "gloo"),
    Check(BUCKETS, 1.12, GIGABIT, "the time of one tensor of 25 MB"),
    Check(BFLOAT16, 0.56, GIGABIT, "the time with int32 on the wire"),
    Check(HALF, 1.07, "bound"),
    Check(HALF_LONG, 1.07, "bound"),
    Check(JUMBO, 1.04, "bound"),
    Check(UNSHAPED, 1.4, "gloo"),
    Check(LOOPBACK, 1.4, "gloo"),
    Check(UNSHAPED_SMALL, 2.0, "gloo"),
    Check(LOOPBACK_SMALL, 2.0, "gloo"),
    Check(LOSS, 1.15, LOSSLESS, "the time without loss", same_bits=True),
    Check(LOSS_HIGH, 2.0, LOSSLESS, "the time without loss", same_bits=True),
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
