"""Where the inner Gloo group listens. That it works between machines, test_links.py shows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from fanin.torch.rendezvous import interface
from fanin.torch.rendezvous.interface import gloo_address

LOOPBACK_SWITCH = "127.0.0.1:4800"


def name_stands_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Lets the machine's own name have these addresses, as /etc/hosts would."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, port: Any, **keywords: Any) -> Any:
        if host != socket.gethostname():
            return resolve(host, port, **keywords)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [answer for address in addresses for answer in resolve(address, port, **keywords)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def route_leads_from(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(interface, "_source_address", lambda _switch: address)


@pytest.mark.parametrize("addresses", [["127.0.1.1"], [], ["192.0.2.7"], ["::1"]])
def test_a_name_without_a_usable_address_leaves_the_route_to_the_switch(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    name_stands_for(monkeypatch, *addresses)
    route_leads_from(monkeypatch, "198.51.100.4")
    assert gloo_address("198.51.100.9:4800") == "198.51.100.4"


def test_what_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name_stands_for(monkeypatch, "127.0.1.1")
    route_leads_from(monkeypatch, "198.51.100.4")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert gloo_address("198.51.100.9:4800") is None


OWN = """
from torch._C._distributed_c10d import HashStore
from fanin.torch.rendezvous.interface import own_address
print(own_address(HashStore()))
"""


def own(interface: str, *within: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*within, sys.executable, "-c", OWN],
        env=os.environ | {"GLOO_SOCKET_IFNAME": interface},
        capture_output=True,
        text=True,
    )


def test_services_listen_at_the_interface_that_is_named() -> None:
    assert own("lo").stdout == "127.0.0.1\n"


def test_of_several_interfaces_the_first_that_is_there_has_the_address() -> None:
    assert own("none0, lo").stdout == "127.0.0.1\n"
    absent = own("none0,none1").stderr
    assert "GLOO_SOCKET_IFNAME is 'none0': there is no such interface here" in absent


def test_an_interface_that_cannot_be_listened_at_says_why() -> None:
    absent = own("none0").stderr
    assert "GLOO_SOCKET_IFNAME is 'none0': there is no such interface here" in absent
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    # In a new network namespace lo is down.
    down = own("lo", "unshare", "--net").stderr
    assert "GLOO_SOCKET_IFNAME is 'lo': the interface is down (ip link set dev NAME up)" in down


def test_a_name_with_an_address_of_its_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name_stands_for(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(interface, "is_loopback", lambda address: address != "127.0.0.1")
    route_leads_from(monkeypatch, "198.51.100.4")
    assert gloo_address("198.51.100.9:4800") is None


@pytest.mark.parametrize("switch", [LOOPBACK_SWITCH, "[::1]:4800", "localhost"])
def test_a_switch_on_this_machine_says_nothing_of_the_network(
    monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    name_stands_for(monkeypatch, "127.0.1.1")
    assert gloo_address(switch) is None
