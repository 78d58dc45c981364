"""In which order partitions of gradients are sent, so that the next forward pass waits least.

All ranks submit in one order, and no moment of one rank may change it. So the order is made ahead:
what a queue would do that always sends next what is needed first, played in virtual time, by when
each gradient is there and how long a byte takes (BytePS §6.1; ByteScheduler, SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fanin import _fanin

LEARNED_EVERY = 64
"""Passes after which the order is made anew, at most; the first times are closer together."""


@dataclass(frozen=True)
class Partition:
    """What is sent in one piece."""

    ready: float
    """Seconds from the first one that is there until it is."""
    needed: int
    """Its place in the order in which the next forward pass reads the parameters."""
    size_bytes: int


def order(partitions: Sequence[Partition], seconds_a_byte: float) -> list[int]:
    """Return the indices of partitions in the order in which they are sent.

    As `fanin_plan::send_order` has it, which the simulator plays, too.
    """
    return _fanin.send_order(
        [(each.ready, each.needed, each.size_bytes) for each in partitions], seconds_a_byte
    )


@dataclass(frozen=True)
class Sent:
    """When a partition could go and when its sum was there, in seconds of the host's clock.

    It could go when it was submitted, or when a device had made it, if that was later.
    """

    submitted: float
    done: float
    size_bytes: int


def is_learned(number: int) -> bool:
    """Whether the order is made anew by a pass, of which the first is number 1: not by that one."""
    return number > 0 and (number & (number - 1) == 0 or number % LEARNED_EVERY == 0)


def seconds_a_byte(sent: Sequence[Sent]) -> float:
    """Return how long a byte takes, of what was sent one behind the other.

    In the mean over those that found another on its way, if any did: what found none may have
    waited for a rank that was late.
    """
    alone, queued = (0.0, 0), (0.0, 0)
    before = float("-inf")
    for each in sent:
        took = max(each.done - max(each.submitted, before), 0.0)
        seconds, size_bytes = queued if each.submitted < before else alone
        total = seconds + took, size_bytes + each.size_bytes
        if each.submitted < before:
            queued = total
        else:
            alone = total
        before = max(before, each.done)
    seconds, size_bytes = queued if queued[1] else alone
    return seconds / max(size_bytes, 1)
