"""Links that go wrong while they are measured: each is named, and the ranks join without its rate.

The fault is mended once the ranks have measured, as it would keep them from summing, too.
"""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import _rates
from fanin.torch.backend.options import Options
from fanin_lab import netlab
from fanin_lab.netlab import INTERFACE, Netlab
from fanin_lab.netlab.kernel import namespace_of
from laboratory import NAME, needs_lab
from ranks import Me, wait_until
from torch._C._distributed_c10d import FileStore

NETWORK = "10.77.0.0/24"

# Faults of the second machine's link: the fault, its cure, and the words of rank 0.
FAULTS = {
    "small MTU on the way": (
        f"-n {namespace_of(NAME, 'sw')} link set w1 mtu 1200",
        f"-n {namespace_of(NAME, 'sw')} link set w1 mtu 1500",
        "packets of 1428 bytes to 10.77.0.2:PORT are lost, and shorter ones are not (give all "
        "links on the way the same MTU)",
    ),
    "link goes down": (
        f"link set {INTERFACE} down",
        f"link set {INTERFACE} up",
        "10.77.0.2:PORT fell silent over UDP while it was measured (does a link go up and down? "
        "ip -s link)",
    ),
    "no route": (
        f"route del {NETWORK}",
        f"route add {NETWORK} dev {INTERFACE}",
        "no answer from 10.77.0.2:PORT over UDP within 300 ms",
    ),
}


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def received_bytes() -> int:
    """What this machine's link received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    counts = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counts.partition(":")[2].split()[0])


def joined(me: Me, namespaces: list[str], meeting: str, fault: str) -> tuple[Any, list[str]]:
    """The plan, and what rank 0 says of links that could not be measured."""
    netlab.enter(namespaces[me.rank])
    begins, ends, _ = FAULTS[fault]
    opened, filled, judged = _rates._opened, _rates._filled, _rates._Network.judged
    said = io.StringIO()

    def breaks(*where: Any) -> Any:
        # Nobody fills a link before this rank has said where its gauges are.
        ports = opened(*where)
        ip(begins)
        return ports

    def breaks_meanwhile(*phase: Any) -> Any:
        if phase[2] > 0:  # the machine is tried again
            return filled(*phase)
        with ThreadPoolExecutor(1) as threads:
            filling = threads.submit(filled, *phase)
            first = received_bytes()
            wait_until(lambda: received_bytes() > first + 100_000, "packets of a neighbour")
            ip(begins)
            return filling.result()

    def mended(*flows: Any) -> Any:
        ip(ends)
        return judged(*flows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", INTERFACE)
        patch.setattr(sys, "stderr", said)
        # So long that a fault is in its midst, also on a busy machine; gauges outlive two phases.
        patch.setattr(_rates, "PHASE", 2.0)
        patch.setattr(_rates, "LIFE", 10.0)
        if me.rank == 1:
            if fault == "link goes down":
                patch.setattr(_rates, "_filled", breaks_meanwhile)
            else:
                patch.setattr(_rates, "_opened", breaks)
            patch.setattr(_rates._Network, "judged", mended)
        store = FileStore(meeting, me.world_size)
        me.init("fanin", store=store, rank=me.rank, world_size=me.world_size, pg_options=Options())
    tensor = torch.full((100_000,), me.rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    assert (tensor == 6).all()
    return fanin.torch.plan(), [line for line in said.getvalue().splitlines() if "could" in line]


@needs_lab
@pytest.mark.parametrize("fault", FAULTS)
def test_a_link_that_goes_wrong_is_named_and_the_ranks_join(
    launch: Launch, tmp_path: Path, fault: str
) -> None:
    # A train passes a bridge whatever its packets' length: without trains.
    with Netlab(3, rate_bps=100_000_000, loss=0.0, name=NAME) as lab:
        spaces = [lab.namespace(f"w{i}") for i in range(3)]
        found = launch(joined, 3, spaces, str(tmp_path / "store"), fault, at="").results()
    assert [said for _, said in found[1:]] == [[], []]
    plan, said = found[0]
    assert [re.sub(r":\d+ ", ":PORT ", line) for line in said] == [
        f"fanin: rank 0: the link of rank 1's machine ({socket.gethostname()}, {INTERFACE}) could "
        f"not be measured: {FAULTS[fault][2]}. Say what they carry: FANIN_RATE=1gbit to ranks, "
        "--rate 1gbit to `fanin switch`, or let UDP through between the machines"
    ]
    assert plan["links"].startswith("rank 0's machine, rank 2's machine were measured, 0.")
    assert "; rank 1's machine tells no rate: taken for 0." in plan["links"]
    assert [each["share"] for each in plan["services"]] == pytest.approx([1 / 3] * 3)
