"""examples/slurm.sh, with an `srun` that starts its processes on this machine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import free_address
from programs import Program

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
DEADLINE = 240.0

# Takes srun's options that the script uses, and refuses others, as srun does. Each node is a
# machine of its own to fanin.
SRUN = r"""
import argparse, os, signal, subprocess, sys

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--nodes", "--ntasks"):
    parser.add_argument(name, type=int, required=True)
for name in ("--nodelist", "--exclude"):
    parser.add_argument(name, default="")
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()
nodes = [
    node
    for node in os.environ["SLURM_JOB_NODELIST"].split(",")
    if node not in args.exclude.split(",") and node in (args.nodelist or node).split(",")
]
assert len(nodes) == args.nodes == args.ntasks, (nodes, args)
# In one write, as two of these run at once.
os.write(1, (" ".join(["srun:", *nodes, *args.command]) + "\n").encode())
tasks = []
for number, node in enumerate(nodes):
    told = {
        "SLURM_PROCID": str(number),
        "SLURM_NODEID": str(number),
        "SLURM_NTASKS": str(args.ntasks),
        "SLURM_STEP_NUM_TASKS": str(args.ntasks),
        "SLURMD_NODENAME": node,
        "FANIN_MACHINE": node,
    }
    tasks.append(subprocess.Popen(args.command, env=os.environ | told))
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
statuses = [task.wait() for task in tasks]
if "switch" in args.command:
    print("srun: the switch ended with", statuses[0], flush=True)
sys.exit(max(map(abs, statuses)))
"""

# An address of a node in place of all addresses, so that nothing is heard from outside.
FANIN = """
import os, runpy, sys

sys.argv = [each.replace("0.0.0.0", os.environ["SLURMD_NODENAME"]) for each in sys.argv]
runpy.run_module("fanin", run_name="__main__")
"""
TORCHRUN = "import runpy\nrunpy.run_module('torch.distributed.run', run_name='__main__')\n"
SCONTROL = "import sys\nassert sys.argv[1:3] == ['show', 'hostnames']\n"
SCONTROL += "print(*sys.argv[3].split(','), sep='\\n')\n"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on three nodes, which are this machine."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "fanin": FANIN, "torchrun": TORCHRUN}
    for name, text in programs.items():
        file = tmp_path / name
        file.write_text(f"#!{sys.executable}\n{text}")
        file.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(NODES),
        "SLURM_NNODES": str(len(NODES)),
        "SWITCH_PORT": free_address().split(":")[1],
        "RENDEZVOUS_PORT": free_address().split(":")[1],
        # The switch alone: without it nothing is summed.
        "FANIN_PLAN": "switch",
        "OMP_NUM_THREADS": "1",
    }


def run(cluster: dict[str, str], *arguments: str) -> tuple[int, str]:
    program = Program(["bash", str(EXAMPLES / "slurm.sh"), *arguments], cluster)
    try:
        return program.wait(DEADLINE), program.text()
    finally:
        program.end()


def test_a_job_trains_on_all_nodes_but_the_last_which_sums(cluster: dict[str, str]) -> None:
    status, said = run(cluster, str(EXAMPLES / "digits.py"), "--epochs", "3")
    assert status == 0, said
    assert re.search(r"srun: 127\.0\.0\.3 fanin switch --listen", said)
    assert re.search(r"srun: 127\.0\.0\.1 127\.0\.0\.2 torchrun --nnodes 2", said)
    found = re.search(r"accuracy (\S+) on", said)
    assert found, said
    assert float(found[1]) > 0.8
    assert "srun: the switch ended with 0" in said


def test_a_job_that_fails_says_so_and_leaves_no_switch(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys\nsys.exit(3)\n")
    status, said = run(cluster, str(program))
    assert status != 0, said
    assert "srun: the switch ended with" in said


def test_a_job_whose_switch_cannot_start_ends_with_it(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    # It waits for as long as nobody ends it: the script does, and not the program's own end.
    program = tmp_path / "waits.py"
    program.write_text("import time\ntime.sleep(1000)\n")
    status, said = run(cluster | {"FANIN_RATE": "fast"}, str(program))
    assert status == 1, said
    assert '"fast" is no rate' in said
    assert "slurm.sh: the switch on 127.0.0.3 ended with status 2" in said


@pytest.mark.parametrize(
    ("changed", "arguments", "complaint"),
    [
        ({}, [], r"name a program: sbatch slurm.sh train.py"),
        ({}, ["nowhere.py"], r"there is no program nowhere\.py in /"),
        ({"SLURM_JOB_NODELIST": ""}, ["x.py"], r"this is no job of Slurm; start it by: sbatch"),
        ({"SLURM_NNODES": "1"}, ["x.py"], r"the job has one node, and the last one only sums"),
    ],
)
def test_a_job_that_cannot_run_is_refused(
    cluster: dict[str, str], changed: dict[str, str], arguments: list[str], complaint: str
) -> None:
    status, said = run(cluster | changed, *arguments)
    assert status == 2
    assert re.search("^slurm.sh: " + complaint, said, re.MULTILINE), said
