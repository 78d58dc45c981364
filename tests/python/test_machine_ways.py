"""`MachineState` does what `fanin topo` recommends. Gloo is in NCCL's place, files in sysfs's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import MachineState
from fanin.torch.hooks import ways
from fanin.torch.hooks.ways import Way
from ranks import Me

EXAMPLES = Path(__file__).parents[2] / "examples" / "topo"

SWITCHES = """
[[cpu]]
name = "cpu"
[[switch]]
name = "x"
count = 2
under = "cpu"
rate = "100Gbit"
"""

GPUS_OF_SWITCHES = """
[[gpu]]
name = "a"
count = 2
under = "x0"
rate = "100Gbit"
[[gpu]]
name = "b"
count = 2
under = "x1"
rate = "100Gbit"
[[nic]]
name = "nic"
under = "cpu"
rate = "100Gbit"
network = "100Gbit"
"""

LINKED_GPUS = """
[[gpu]]
name = "a"
under = "x0"
rate = "100Gbit"
[[gpu]]
name = "b"
under = "x1"
rate = "100Gbit"
[[nvlink]]
between = ["a", "b"]
rate = "400Gbit"
"""

NIC_BESIDE_A = """
[[nic]]
name = "nic"
under = "x0"
rate = "100Gbit"
network = "100Gbit"
"""

NIC_BESIDE_NONE = """
[[nic]]
name = "nic"
under = "cpu"
rate = "200Gbit"
network = "200Gbit"
"""

BOXES = {
    "pcie": SWITCHES + GPUS_OF_SWITCHES,
    "nvlink": SWITCHES + LINKED_GPUS + NIC_BESIDE_A,
    "all alike": SWITCHES + LINKED_GPUS + NIC_BESIDE_NONE,
}

CASES: dict[str, tuple[str, list[str], list[str], list[tuple[list[int], list[int]]]]] = {
    # Machine and GPU of each rank, what the machines are, and each rank's domain and its holders.
    "CPU-assisted": (
        "aaaa",
        ["a0", "b0", "a1", "b1"],
        ["pcie"],
        [([0, 2], [0, 2]), ([1, 3], [1, 3])] * 2,
    ),
    "a root": (
        "aabb",
        ["a", "b", "b", "a"],
        ["nvlink", "nvlink"],
        [([0, 1], [1])] * 2 + [([2, 3], [2])] * 2,
    ),
    "all are roots": (
        "aabb",
        ["a", "b", "b", "a"],
        ["all alike", "all alike"],
        [([0, 1], [0, 1])] * 2 + [([2, 3], [2, 3])] * 2,
    ),
    "machines that differ": (
        "aabb",
        ["a", "b", "a", "b"],
        ["nvlink", "all alike"],
        [([0, 1], [0, 1])] * 2 + [([2, 3], [2, 3])] * 2,
    ),
    "a machine with fewer ranks than GPUs": (
        "aab",
        ["a", "b", "a"],
        ["nvlink", "nvlink"],
        [([0, 1], [1])] * 2 + [([2], [2])],
    ),
    "machines that nothing else fits": (
        "aab",
        ["a", "b", "a"],
        ["all alike", "all alike"],
        [([0, 1], [0])] * 2 + [([2], [2])],
    ),
    "machines of unequal size": (
        "aaaabb",
        ["a0", "a1", "b0", "b1", "a", "b"],
        ["pcie", "all alike"],
        [([0, 1], [0, 1])] * 2 + [([2, 3], [2, 3])] * 2 + [([4, 5], [4, 5])] * 2,
    ),
}


def chosen(me: Me, machines: str, gpus: list[str], boxes: dict[str, str], said: Any) -> Any:
    """This rank's domain and holders, an average, and the warnings."""
    os.environ["FANIN_MACHINE"] = machines[me.rank]
    run = subprocess.run

    def of_file(command: list[str], **keywords: Any) -> Any:
        return run([*command, boxes[machines[me.rank]]], **keywords)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(ways, "own_gpu", lambda _: gpus[me.rank])
        patch.setattr(subprocess, "run", of_file)
        me.init("gloo")
        state = MachineState("gloo", switch=me.switch, **said)
    flat = torch.arange(1001.0) * (me.rank + 1)
    state.average(flat).wait()
    dist.barrier()
    return (state.ranks, state.holders), flat, [str(each.message) for each in warned]


def files(folder: Path, machines: str, boxes: list[str]) -> dict[str, str]:
    found = {}
    for machine, box in zip(dict.fromkeys(machines), boxes, strict=True):
        path = folder / f"{machine}.toml"
        path.write_text(BOXES[box])
        found[machine] = str(path)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_machine_sums_as_its_topology_recommends(
    launch: Launch, tmp_path: Path, case: str
) -> None:
    machines, gpus, boxes, expected = CASES[case]
    size = len(machines)
    results = launch(chosen, size, machines, gpus, files(tmp_path, machines, boxes), {}).results()
    average = torch.arange(1001.0) * (size + 1) / 2
    for (way, flat, _), right in zip(results, expected, strict=True):
        assert way == right
        assert torch.allclose(flat, average)


def test_what_the_program_says_is_done_and_nobody_is_asked(launch: Launch, tmp_path: Path) -> None:
    boxes = {"a": str(tmp_path / "nowhere")}
    for said in ({"domain": ""}, {"holders": [0, 1]}):
        for way, _, warned in launch(chosen, 2, "aa", ["a", "b"], boxes, said).results():
            assert way == ([0, 1], [0, 1])
            assert not warned


def test_a_machine_of_which_nobody_can_say_how_it_is_made_reduce_scatters_and_warns(
    launch: Launch, tmp_path: Path
) -> None:
    boxes = {"a": str(tmp_path / "nowhere.toml")}
    results = launch(chosen, 2, "aa", ["a", "b"], boxes, {}).results()
    assert [way for way, _, _ in results] == [([0, 1], [0, 1])] * 2
    (warning,) = [warned for _, _, each in results for warned in each]
    for words in ("fanin topo", "cannot read the machine", "nowhere.toml", "MachineState(domain="):
        assert words in warning


def report(name: str) -> Any:
    command = [sys.executable, "-m", "fanin", "topo", str(EXAMPLES / f"{name}.toml"), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_the_papers_machines_are_summed_as_in_the_paper() -> None:
    assisted = ways.of_report(report("pcie-only"), [f"{x}{n}" for x in "ab" for n in range(4)])
    assert assisted == [Way("pcie0")] * 4 + [Way("pcie1")] * 4
    gpus = [f"gpu{n}" for n in (2, 3, 4, 5, 6, 7, 0, 1)]
    # Figure 8(b): the GPU beside the NIC is no root.
    assert ways.of_report(report("nvlink"), gpus) == [Way(holders=[0])] * 8


def test_gpus_of_which_not_each_has_one_rank_are_not_summed_by_a_plan_for_all() -> None:
    gpus = [f"gpu{n}" for n in range(8)]
    nvlink = report("nvlink")
    for others in (gpus[:7], [*gpus, "gpu0"], [*gpus[:7], "gpu6"], [*gpus[:7], "gpu9"], []):
        assert ways.of_report(nvlink, others) is None


def test_a_gpu_is_named_as_in_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    assert ways.own_gpu("nccl") == "0001:3b:00.0"
    assert ways.own_gpu("gloo") is None, "whose tensors are the host's"
