"""Where the inner Gloo group listens."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from urllib.parse import urlsplit

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_address(switch: str) -> str | None:
    """Return the address for Gloo to listen on; None where its own choice will do.

    Gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address of the machine's own
    name. Where /etc/hosts gives that name a loopback address, as Debian's and Ubuntu's installers
    have it, no other machine could connect. The interface that leads to the switch is one that the
    ranks share, so it takes the place of a loopback address, and of no other.
    """
    if os.environ.get(GLOO_VARIABLE) or not _is_loopback(_own_address()):
        return None
    route = _source_address(switch)
    return None if _is_loopback(route) else route


def _own_address() -> str:
    """Return what Gloo chooses: the first address of the machine's name that is one of its own."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _source_address(switch: str) -> str:
    """Return this machine's address as the switch sees it. Sends nothing."""
    parts = urlsplit(f"//{switch}")
    family, kind, protocol, _, address = socket.getaddrinfo(
        parts.hostname, parts.port or 4800, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
