"""`fanin netlab`: a network of shaped, lossy links on one machine, to try things and to measure.

Each worker is a network namespace (`w0`, `w1`, ..) with one link to the namespace `sw`, in which a
bridge joins the links and carries the switch's address. Spare machines (`s0`, `s1`, ..) have such a
link, too. With several racks there are ``sw0``, ``sw1``, .., each with a link to the namespace
`server`. All that is known about a laboratory is
read from the namespaces themselves, so that one left half-built by a crash can still be seen and
removed. Only namespaces whose names begin with ``fanin-`` are touched.
"""

from fanin_lab.netlab.kernel import NetlabError
from fanin_lab.netlab.lab import (
    INTERFACE,
    MTU_DEFAULT,
    NICS_MAX,
    RACKS_MAX,
    SERVER,
    SERVER_ADDRESS,
    SPARES_MAX,
    SWITCH,
    SWITCH_ADDRESS,
    WORKERS_MAX,
    Netlab,
    address,
    down,
    enter,
    interface,
    members,
    names,
    processes,
)
from fanin_lab.netlab.state import describe, tcp_retransmissions

__all__ = [
    "INTERFACE",
    "MTU_DEFAULT",
    "NICS_MAX",
    "RACKS_MAX",
    "SERVER",
    "SERVER_ADDRESS",
    "SPARES_MAX",
    "SWITCH",
    "SWITCH_ADDRESS",
    "WORKERS_MAX",
    "Netlab",
    "NetlabError",
    "address",
    "describe",
    "down",
    "enter",
    "interface",
    "members",
    "names",
    "processes",
    "tcp_retransmissions",
]
