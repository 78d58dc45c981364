"""What the experiments share: the paper's rack as the simulator has it (SwitchML §6).

Eight workers on one switch, links of 10 and 100 Gbit/s, packets of 256 elements, 128 slots at 10
and 512 at 100 Gbit/s (Appendix C), timeouts of 1 ms. What packets cost hosts is left out: the
paper's best variant is within 2 % of the links' rate. The round trip is the one that makes these
pools fill the links; it is not in the paper.
"""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.lab import Report, throughput

SLOTS = {10: 128, 100: 512}
"""By Gbit/s."""
DELAY = {10: "40us", 100: "16us"}
"""Of a link: there and back are two."""
ELEMENTS = 256
PAYLOAD_BYTES = 4 * ELEMENTS
HEADER_BYTES = 106
"""Of a packet on the link: its own header 40, IP and UDP 28, Ethernet 38."""
WIRE_BYTES = PAYLOAD_BYTES + HEADER_BYTES
HOSTS_OF_ATP = {"host_packet_cost": "17.5ns", "host_byte_cost": "0.076ns"}
"""What a packet costs the hosts of another paper (ATP §5.5, Figure 19), which run on cores, too."""
TIMEOUT = "1ms"


def rack(hosts: int, gbps: int, **more: Any) -> dict[str, Any]:
    """Return the network: hosts h0, h1, .. on one switch, s0."""
    rate, delay = f"{gbps}Gbit", DELAY[gbps]
    return {"topology": "rack", "hosts": hosts, "rate": rate, "delay": delay, **more}


def job(system: str, workers: int, gbps: int, **more: Any) -> dict[str, Any]:
    """Return a job; SwitchML's has the paper's packets, slots and timeouts."""
    packets: dict[str, dict[str, Any]] = {
        "switchml": {
            "elements": ELEMENTS,
            "slots": SLOTS[gbps],
            "timeout": TIMEOUT,
            "timeouts_only": True,
        },
        "ring": {},
    }
    # Of parameter servers each has a part of the slots.
    keys = packets.get(system, {"elements": ELEMENTS, "window": SLOTS[gbps] // workers})
    return {"system": system, "workers": workers, **keys, **more}


def goodput_gbps(report: Report) -> float:
    """Return the elements, in Gbit/s, that a worker has summed."""
    return throughput(report["jobs"][0], report["jobs"][0]["aggregation_gbps"])


def ms(time_ms: float) -> str:
    """Write a time for a scenario."""
    return f"{time_ms:.6f}ms"
