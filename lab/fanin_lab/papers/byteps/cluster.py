"""What Table 1 and Figures 13, 15 and 16 share: machines on one switch, and who sums for them.

A machine is one host, with a link as fast as the slowest of all that its gradients pass on their
way out and back (`fanin topo`; they pass them in a pipeline, §6.1). RDMA is connections whose
packets cost hosts nothing, and that nothing drops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin_lab.papers.lab import Report, Scenario

NIC_GBPS = 90.0
"""Of a NIC: what RDMA moves through 100 (§7.1)."""
MTU = 4500
"""Takes RDMA's 4,096 bytes."""
PACKET_BYTES = 4096
"""Of numbers in a packet, as RDMA has."""
PAYLOAD = PACKET_BYTES / (PACKET_BYTES + 106)
"""Of what is on a link: numbers, and the headers of fanin, UDP, IP and Ethernet."""
PAYLOAD_TCP = (MTU - 40) / (MTU + 38)
"""The same of a connection: less IP, TCP and Ethernet."""
PARTITION_BYTES = 4e6
"""§4.1."""
WINDOW = "256kB"
"""On the way of a connection, from the first on: what a link carries in a round trip."""
WINDOW_PACKETS = 64
"""As much of BytePS's packets, to the service with the largest share."""
TRANSPORT = {"initial_window": WINDOW, "receive_window": WINDOW}
DELAY_US = 5.0
"""Of a link."""


@dataclass(frozen=True)
class Cluster:
    """Machines that train, and more that only sum."""

    trains: int
    spares: int
    gbps: float = NIC_GBPS
    """Of a machine that trains; one that only sums has its NIC alone."""

    def network(self, scale: float = 1.0) -> dict[str, Any]:
        """Return it; a round trip is divided by ``scale`` as all else is."""
        return {
            "topology": "rack",
            "hosts": self.trains + self.spares,
            "rate": f"{self.gbps:.4f}Gbit",
            "delay": f"{1e3 * DELAY_US / scale:.3f}ns",
            "queue": "64MB",
            "mtu": MTU,
        }

    @property
    def links(self) -> list[dict[str, Any]]:
        """What is unlike the rest."""
        if self.gbps == NIC_GBPS:
            return []
        hosts = range(self.trains, self.trains + self.spares)
        return [{"link": [f"h{host}", "s0"], "rate": f"{NIC_GBPS:g}Gbit"} for host in hosts]

    def byteps(self, own: float, spare: float, window: int = WINDOW_PACKETS) -> dict[str, Any]:
        """Return BytePS: a machine that trains has this share, and one that does not that."""
        shares = [own] * self.trains + [spare] * self.spares
        at = [host for host, share in enumerate(shares) if share]
        return {
            "system": "byteps",
            "services": [f"h{host}" for host in at],
            # As many digits as make them a whole again.
            "shares": [round(shares[host], 12) for host in at],
            "window": window,
        }

    def servers(self, partition_bytes: float | None = None) -> dict[str, Any]:
        """Return parameter servers, on the machines that only sum; all that is ready goes at once.

        A variable goes as it is to the next server, or in pieces, each to the next one.
        """
        hosts = range(self.trains, self.trains + self.spares)
        return {
            "system": "tcp-ps",
            "servers": [f"h{host}" for host in hosts],
            "transport": TRANSPORT,
            **({"partition": f"{partition_bytes:.0f}B"} if partition_bytes else {}),
        }

    def play(
        self, title: str, job: Mapping[str, Any], *, scale: float = 1.0, warm_up_s: float = 0.0
    ) -> Scenario:
        """Return a scenario in which the machines that train do this."""
        return {
            "title": title,
            "until": "1000s",
            "interval": "1s",
            "warm_up": f"{1e6 * warm_up_s:.3f}us",
            "payload": "sample",
            "network": self.network(scale),
            **({"link": self.links} if self.links else {}),
            "job": [{"workers": [f"h{host}" for host in range(self.trains)], **job}],
        }


RING: dict[str, Any] = {"system": "ring"}


def finished_s(report: Report) -> float:
    """Return when the job had done all."""
    return float(report["jobs"][0]["finished_s"])


def listed(numbers: Sequence[int]) -> str:
    """Return them as text."""
    return ", ".join(map(str, numbers))
