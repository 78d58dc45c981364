"""Where this machine is reached: by the inner Gloo group, and by those whom its service serves."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store, TCPStore

from fanin import _planes
from fanin._planes import GLOO_VARIABLE, named_address
from fanin._services import bracketed, is_loopback


def gloo_address(switches: str) -> str | None:
    """Return the address for Gloo to listen on; None where its own choice will do.

    `switches` are what sums, with commas between; none if the group is on one machine.

    Gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address of the machine's own
    name. Where /etc/hosts gives that name a loopback address, as Debian's and Ubuntu's installers
    have it, no other machine could connect. The interface that leads to the switch is one that the
    ranks share, so it takes the place of a loopback address, and of no other.
    """
    if not switches or os.environ.get(GLOO_VARIABLE) or not is_loopback(named_address()):
        return None
    routes = map(_source_address, switches.split(","))
    return next((route for route in routes if not is_loopback(route)), None)


def own_address(store: Store) -> str:
    """Return this machine's address as other machines reach it, as far as can be known here.

    The interface that leads to the group's store is asked (`_planes.own_address`).
    """
    while (behind := getattr(store, "underlying_store", None)) is not None:
        store = behind  # that of a part, or of an elastic launcher
    if isinstance(store, TCPStore):
        return _planes.own_address(f"{bracketed(store.host)}:{store.port}")
    return _planes.own_address()


def _source_address(switch: str) -> str:
    """Return this machine's address as the switch sees it. Sends nothing."""
    parts = urlsplit(f"//{switch}")
    family, kind, protocol, _, address = socket.getaddrinfo(
        parts.hostname, parts.port or 4800, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
