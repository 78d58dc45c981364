"""The inside of the paper's two machines, and what `fanin topo` says of them (§4.2)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fanin_lab.environment import environment as lab_environment
from fanin_lab.papers import ReproduceError
from fanin_lab.papers.lab import Lab
from fanin_lab.sweep.scenario import toml

GPUS = 8
"""Of a machine (§7.2)."""
PCIE_GBPS, PEER_GBPS = 105.0, 80.0
"""Measured: GPU to GPU within a PCIe switch, and across (§4.2.1). What links have in the model."""
NIC_GBPS = [100.0, 90.0]
"""Of the NIC, and what RDMA reaches (§7.1)."""
SOCKET_GBPS = 300.0
"""§4.2.1: "more than"."""
PRINTED_GBPS = 13.1 * 8
"""The same 105 Gbit/s as it stands in the example of §4.2.1."""
MEMORY_GBPS = 8000.0
"""So much that it is never the limit, as the example has it."""
NVLINK_GBPS = 200.0
NVLINKS = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}
"""Six for each GPU, 1.2 Tbit/s together (§4.2.2), between the pairs of NVIDIA's DGX-1."""


@dataclass(frozen=True)
class Strategy:
    """What `fanin topo` says of one."""

    time_s: float
    played_s: float
    """NaN where it was not played."""
    slowest: str
    brute_force: float
    bytes: Mapping[tuple[str, str], float]
    """By direction of a link; of the gradients."""


@dataclass(frozen=True)
class Told:
    """What it says of a machine."""

    strategies: Mapping[str, Strategy]
    """By kind, and roots by "root=", their numbers, or "all"."""
    chosen: str
    size: int
    """Of the gradients, in bytes."""
    network: float
    """What the NIC carries in each direction; of the gradients."""

    def rate_gbps(self, strategy: str) -> float:
        """Return how fast the network is where it takes as long as the slowest of all links."""
        found = self.strategies[strategy]
        return 8e-9 * self.network * self.size / found.time_s


def _rate(gbps: float) -> str:
    return f"{gbps:g}Gbit"


def _machine(
    switches: int, gpus: int, pcie: float, memory: float | None
) -> dict[str, list[dict[str, Any]]]:
    of_memory = {} if memory is None else {"memory": _rate(memory)}
    return {
        "cpu": [{"name": f"cpu{cpu}", **of_memory} for cpu in range(2)],
        "socket": [{"between": ["cpu0", "cpu1"], "rate": _rate(SOCKET_GBPS)}],
        "switch": [
            {"name": f"pcie{at}", "under": f"cpu{2 * at // switches}", "rate": _rate(pcie)}
            for at in range(switches)
        ],
        "gpu": [
            {"name": f"gpu{at}", "under": f"pcie{at // gpus}", "rate": _rate(pcie)}
            for at in range(switches * gpus)
        ],
    }


def _nic(under: str, pcie: float, nic: float) -> dict[str, Any]:
    table = {"name": "nic", "under": under, "rate": _rate(pcie), "network": _rate(nic)}
    return {"nic": [table]}


def pcie_only(
    switches: int,
    gpus: int,
    *,
    pcie: float = PCIE_GBPS,
    nic: float = NIC_GBPS[0],
    memory: float | None = None,
) -> dict[str, Any]:
    """Return Figures 6(a) and 7."""
    machine = _machine(switches, gpus, pcie, memory)
    return {"peer_rate": _rate(PEER_GBPS), **machine, **_nic("cpu0", pcie, nic)}


def nvlink(nic: float) -> dict[str, Any]:
    """Return Figure 8(a)."""
    machine = _machine(4, 2, PCIE_GBPS, None)
    links = [
        {"between": [f"gpu{a}", f"gpu{b}"], "rate": _rate(count * NVLINK_GBPS)}
        for (a, b), count in NVLINKS.items()
    ]
    others = _nic("pcie0", PCIE_GBPS, nic)
    return {"peer_rate": _rate(PEER_GBPS), **machine, **others, "nvlink": links}


def told(
    lab: Lab,
    name: str,
    machine: Mapping[str, Any],
    machines: int,
    *,
    spares: int = 0,
    play_gb: float | None = None,
) -> Told:
    """Ask `fanin topo` about machines like this one; with ``play_gb``, play so much, too."""
    folder = lab.out / "machines"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(toml(machine))
    command = [sys.executable, "-m", "fanin", "topo", str(path), "--machines", str(machines)]
    command += ["--spare", str(spares), "--json"]
    if play_gb is not None:
        command += ["--size", f"{play_gb}GB", "--play"]
    ended = subprocess.run(command, capture_output=True, text=True, env=lab_environment())
    if ended.returncode:
        raise ReproduceError(f"{name}: {ended.stderr.strip()}")
    report = json.loads(ended.stdout)
    (folder / f"{name}.json").write_text(ended.stdout)
    named = [_named(strategy) for strategy in report["strategies"]]
    strategies = {
        its: Strategy(
            strategy["time_s"],
            math.nan if strategy["played_s"] is None else strategy["played_s"],
            strategy["slowest"],
            strategy["brute_force"],
            _bytes(report, strategy),
        )
        for its, strategy in zip(named, report["strategies"], strict=True)
    }
    size = report["size_bytes"]
    return Told(strategies, named[report["chosen"]], size, report["network_bytes"] / size)


def _named(strategy: Mapping[str, Any]) -> str:
    if strategy["kind"] == "cpu-assisted":
        return "best x" if strategy["brute_force"] else "assisted"
    if strategy["kind"] != "roots":
        return str(strategy["kind"])
    if len(strategy["roots"]) == GPUS:
        return "root=all"
    return "root=" + ",".join(root.removeprefix("gpu") for root in strategy["roots"])


def _bytes(report: Mapping[str, Any], strategy: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    found = {}
    for link, load in zip(report["links"], strategy["loads"], strict=True):
        (one, other), (forth, back) = link["ends"], load["bytes"]
        found[one, other] = forth / report["size_bytes"]
        found[other, one] = back / report["size_bytes"]
    return found
