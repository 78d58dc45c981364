"""The queues that DLCP asks of a switch's port (§3.2.2, §4.2), of what any Linux router has.

Eight queues by the class selector of a packet's DSCP, in strict priority. A queue drops packets
that are not ECN-capable once as many bytes wait in it as its threshold says; front layers have the
lowest. The others wait as long as there is memory.

A data-centre switch does it with RED's marking threshold. RED is in few small kernels, and HTB in
most. So each queue is two here, as Appendix B's model splits them: packets that are ECN-capable
wait in one, and the rest in the other, at most up to the threshold. HTB serves mostly the first
one. In a single queue, too, the rest would get about as much of the link as these leave.

HTB has no memory that queues share: each may hold as much as the port has.
"""

from __future__ import annotations

FIFO = "fifo"
DLCP = "dlcp"
KINDS = (FIFO, DLCP)

PRIORITIES = 8
"""The first is for signals (§4.2): CS7. The others are for gradients: CS6 to CS0."""
PARTS = 8
"""A port's memory by the lowest threshold, T of §4.2."""
WEIGHT = 8
"""So many frames that are ECN-capable go for one that is not."""
STEP = 0.5
"""By how much of T each threshold is above the one before: d of §4.2."""

# HTB takes from a queue that keeps within its own rate before it looks at priorities. This part of
# the link keeps control connections alive, which are in the last queue. The kernel counts the time
# that a frame takes at that rate in 32 bits.
_OWN_PART = 1000
_FRAME_S_MAX = 100
_DSCP_BITS, _ECN_BITS = 0xE0, 0x03


def threshold_bytes(priority: int, memory_bytes: int) -> int:
    """Return as how much waits of a queue's unimportant packets before it drops more."""
    above = max(priority - 1, 0) * STEP
    return int(memory_bytes / PARTS * (1 + above))


def dlcp(
    interface: str, rate_bps: int, burst_bytes: int, memory_bytes: int, frame_bytes: int
) -> list[str]:
    """Return the lines for `tc -batch` by which an interface sends at a rate from such queues."""
    device = f"dev {interface}"
    own_bps = max(rate_bps // _OWN_PART, 8 * frame_bytes // _FRAME_S_MAX)
    may = f"ceil {rate_bps}bit cburst {burst_bytes} quantum"
    lines = [
        # ARP goes with the signals.
        f"qdisc add {device} root handle 1: htb default {_minor(0, capable=True)}",
        f"class add {device} parent 1: classid 1:1 htb "
        f"rate {rate_bps}bit burst {burst_bytes} {may} {frame_bytes}",
    ]
    for priority in range(PRIORITIES):
        selector = PRIORITIES - 1 - priority << 5
        for capable in (False, True):
            minor = _minor(priority, capable=capable)
            limit = memory_bytes if capable else threshold_bytes(priority, memory_bytes)
            quantum = frame_bytes * (WEIGHT if capable else 1)
            own = f"rate {own_bps}bit burst {frame_bytes} {may} {quantum}"
            mask = _DSCP_BITS if capable else _DSCP_BITS | _ECN_BITS
            lines += [
                f"class add {device} parent 1:1 classid 1:{minor} htb prio {priority} {own}",
                f"qdisc add {device} parent 1:{minor} handle {minor}: bfifo limit {limit}",
                # The filters for packets that are not ECN-capable come first: the rest is.
                f"filter add {device} parent 1: protocol ip prio {1 + capable} u32 "
                f"match ip dsfield {selector:#x} {mask:#x} flowid 1:{minor}",
            ]
    return lines


def _minor(priority: int, *, capable: bool) -> str:
    """Return the class of a queue, as tc writes it: in hexadecimal."""
    return f"{1 if capable else 2}{priority}"
