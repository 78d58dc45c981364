"""The state of a laboratory, read from the kernel: there is no other record of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fanin_lab import units
from fanin_lab.netlab.kernel import inside, namespace_of, require_root, require_tools, run
from fanin_lab.netlab.lab import (
    BRIDGE,
    INTERFACE,
    NICS_MAX,
    SWITCH,
    interface,
    is_machine,
    members,
    port,
    processes,
)


def describe(name: str = "") -> dict[str, Any]:
    """Read the laboratory's state from the kernel: what `fanin netlab status --json` prints."""
    require_root()
    require_tools("ip", "tc")
    found = members(name)
    bridges = []
    ports: dict[str, dict[str, Any]] = {}
    for member in (member for member in found if not is_machine(member)):
        links = _links(namespace_of(name, member))
        bridges.append(
            {
                "name": member,
                "namespace": namespace_of(name, member),
                "address": links.get(BRIDGE, {}).get("address"),
                "processes": processes(name, member),
            }
        )
        ports |= {end: link for end, link in links.items() if is_machine(end.split(".")[0])}
    machines: list[dict[str, Any]] = []
    for member in filter(is_machine, found):
        links = _links(namespace_of(name, member))
        machines.append(
            {
                "name": member,
                "namespace": namespace_of(name, member),
                **_both_ends(links.get(INTERFACE, {}), ports.get(member, {})),
                "further": [
                    {"interface": end, **_both_ends(links[end], ports.get(port(member, end), {}))}
                    for end in map(interface, range(1, NICS_MAX))
                    if end in links
                ],
                "processes": processes(name, member),
            }
        )
    return {
        "name": name,
        "switch": next((bridge for bridge in bridges if bridge["name"] == SWITCH), None),
        "bridges": bridges,
        "workers": [machine for machine in machines if machine["name"].startswith("w")],
        "spares": [machine for machine in machines if machine["name"].startswith("s")],
        "packets_lost": sum(_lost(namespace_of(name, member)) for member in found),
        "packets_marked": sum(_marked(namespace_of(name, member)) for member in found),
    }


def _both_ends(link: Mapping[str, Any], port: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a machine's link, by its end there and by the switch's."""
    return {
        "address": link.get("address"),
        "connected": bool(link.get("up") and port.get("up")),
        "mtu_bytes": link.get("mtu_bytes"),
        "up_rate_bps": link.get("rate_bps"),
        "down_rate_bps": port.get("rate_bps"),
        "up_loss": port.get("loss"),
        "down_loss": link.get("loss"),
    }


def tcp_retransmissions() -> int:
    """Return how many segments TCP has sent again in the namespace that the caller is in."""
    head, values = [
        line.split()
        for line in Path("/proc/self/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    ]
    return int(values[head.index("RetransSegs")])


def _links(namespace: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each interface; its rate is that of what it sends."""
    links: dict[str, dict[str, Any]] = {}
    for entry in json.loads(run(["ip", "-n", namespace, "-j", "addr"]) or "[]"):
        addresses = [a["local"] for a in entry.get("addr_info", []) if a["family"] == "inet"]
        links[entry["ifname"]] = {
            "address": addresses[0] if addresses else None,
            "mtu_bytes": entry["mtu"],
            "up": "LOWER_UP" in entry["flags"],
            "rate_bps": None,
            "loss": 0.0,
        }
    for entry in json.loads(run(["tc", "-n", namespace, "-j", "qdisc", "show"]) or "[]"):
        if entry["kind"] == "tbf" and entry["dev"] in links:
            links[entry["dev"]]["rate_bps"] = 8 * entry["options"]["rate"]
        if entry["kind"] == "htb" and entry["dev"] in links:
            links[entry["dev"]]["rate_bps"] = _rate_of_classes(namespace, entry["dev"])
    rule = _rule(namespace)
    for link in links.values():
        link["loss"] = rule.get("loss", 0.0)
    return links


def _rate_of_classes(namespace: str, interface: str) -> int | None:
    """Return the rate that the queues of an interface have together (`queues`)."""
    # HTB shows no JSON.
    shown = run(["tc", "-n", namespace, "class", "show", "dev", interface])
    rate = re.search(r"^class htb \S+ root rate (\S+)", shown, re.MULTILINE)
    return None if rate is None else units.rate_bps(rate[1].lower())


def _lost(namespace: str) -> int:
    return int(_rule(namespace).get("packets", 0))


def _marked(namespace: str) -> int:
    counters = [
        part["counter"]["packets"]
        for rule in _rules(namespace)
        if rule["chain"].startswith("marks_")
        for part in rule["expr"]
        if "counter" in part
    ]
    return sum(counters)


def _rules(namespace: str) -> list[dict[str, Any]]:
    if shutil.which("nft") is None:
        return []
    shown = json.loads(run(inside(namespace, ["nft", "-j", "list", "ruleset"])))
    rules = [entry["rule"] for entry in shown["nftables"] if "rule" in entry]
    return [rule for rule in rules if rule["table"] == "fanin"]


def _rule(namespace: str) -> dict[str, float]:
    """Return the loss and its counter, or nothing if the namespace loses nothing."""
    found: dict[str, float] = {}
    for rule in _rules(namespace):
        if rule["chain"] != "loss":
            continue
        for part in rule["expr"]:
            if "numgen" in (left := part.get("match", {}).get("left", {})):
                found["loss"] = _below(part["match"]["right"]) / left["numgen"]["mod"]
            if "counter" in part:
                found["packets"] = found.get("packets", 0) + part["counter"]["packets"]
    return found


def _below(matched: Any) -> int:
    """Return how many numbers nftables compares with: those below one, or those of a range."""
    if isinstance(matched, dict):
        first, last = matched["range"]
        return int(last) - int(first) + 1
    return int(matched)
