"""How the ranks of a machine sum, as `fanin topo` recommends it (BytePS §4.2.3).

The recommendation is for all GPUs of a machine, and each machine has its own. It is taken if each
GPU has a rank, and if all domains of all machines then have equally many holders: a part of the
gradients is a holder's of each. Otherwise all ranks of a machine reduce-scatter, which needs
equally many of them; and otherwise each machine's first rank alone holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from fanin._simulation import environment

# How long `fanin topo` may take, in seconds: a driver that hangs keeps nobody.
PATIENCE = 60.0


@dataclass(frozen=True)
class Way:
    """A rank's: ranks of a machine with one domain's name sum among themselves."""

    domain: str = ""
    holders: list[int] | None = None
    """Places in the domain; all if None."""


def own_gpu(local: str) -> str | None:
    """Return the PCI address of the GPU that this rank has sums of, as sysfs writes it."""
    if "nccl" not in local or not torch.cuda.is_available():
        return None
    world = distributed.group.WORLD
    bound = None if world is None else world.bound_device_id
    device: Any = torch.cuda.get_device_properties(bound)
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


def recommended(gpus: Sequence[str | None], machines: int, spares: int) -> list[Way] | None:
    """Return the way of each rank of this machine, whose GPUs are given.

    None if there is none for just these GPUs. If nobody can say, there is a warning as well.
    """
    asked = ["topo", "--json", "--machines", str(machines), "--spare", str(spares)]
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "fanin", *asked],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"no way of summing inside this machine is recommended, as `fanin {' '.join(asked)}` "
            f"fails: {said.strip()}; all ranks of a machine reduce-scatter, unless "
            "MachineState(domain=..., holders=...) says another way",
            stacklevel=2,
        )
        return None
    return of_report(json.loads(answer.stdout), gpus)


def of_report(report: dict[str, Any], gpus: Sequence[str | None]) -> list[Way] | None:
    """Return the way of the rank of each GPU, by what `fanin topo --json` has printed."""
    known = {part["name"] for part in report["parts"] if part["kind"] == "GPU"}
    if not known or set(gpus) != known or len(gpus) != len(known):
        return None
    strategy = report["strategies"][report["chosen"]]
    if strategy["kind"] == "roots":
        holders = [gpus.index(root) for root in strategy["roots"]]
        return [Way(holders=holders) for _ in gpus]
    # CPU-assisted: GPUs behind one topmost switch are a domain. A GPU behind none is alone.
    links = [link["ends"] for link in report["links"] if link["wire"] == "pcie"]
    above = {low: high for high, low in links}

    def topmost(part: str) -> str:
        return topmost(above[part]) if above[part] in above else part

    return [Way(domain=topmost(str(gpu))) for gpu in gpus]


def domains(machines: Sequence[Sequence[int]], taken: Sequence[Way]) -> list[list[int]]:
    """Return the ranks of each domain, given each machine's, and each rank's way."""
    found: dict[tuple[int, str], list[int]] = {}
    of_rank = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
    for rank, way in enumerate(taken):
        found.setdefault((of_rank[rank], way.domain), []).append(rank)
    return list(found.values())


def that_fit(machines: Sequence[Sequence[int]], wanted: Sequence[list[Way] | None]) -> list[Way]:
    """Return the way of each rank: the one that its machine wants, if all machines' fit."""
    ways: dict[int, Way] = {}
    for ranks, of_machine in zip(machines, wanted, strict=True):
        ways |= zip(ranks, of_machine or [Way()] * len(ranks), strict=True)
    size = len(ways)
    for taken in ([ways[rank] for rank in range(size)], [Way()] * size):
        found = domains(machines, taken)
        if len({len(taken[ranks[0]].holders or ranks) for ranks in found}) == 1:
            return taken
    return [Way(holders=[0])] * size
