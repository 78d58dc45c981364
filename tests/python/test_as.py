"""FANIN_AS=gloo, `fanin run --as gloo`: what asks for Gloo is summed by the switch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin._settings import WireDtype
from fanin.torch.backend.options import Options
from ranks import DEADLINE, Me, sums_on_switch
from torch.nn.parallel import DistributedDataParallel

SAID = 'fanin: the program asks for "gloo"'

# A program that knows nothing of fanin, but for the last line, which counts what the switch did.
PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
assert dist.get_backend() == "gloo"
group = dist.new_group(backend="gloo")
assert dist.get_backend(group) == "gloo"
for each in (None, group):
    tensor = torch.full((1000,), 1.0 + dist.get_rank())
    dist.all_reduce(tensor, group=each)
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
kinds = [type(g._get_backend(torch.device("cpu"))).__name__ for g in (dist.group.WORLD, group)]
print(" ".join(["groups", *kinds, ""]), end="", flush=True)  # one write: ranks share the pipe
dist.destroy_process_group()
"""


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FANIN_")}
    return clean | variables


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment(**variables),
        timeout=2 * DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def installed(group: str) -> bool:
    try:
        return group in {e.group for e in metadata.distribution("fanin").entry_points}
    except metadata.PackageNotFoundError:
        return False


eager = pytest.mark.skipif(not installed("torch.backends"), reason="fanin is not installed")
lazy = pytest.mark.skipif(
    not installed("torch.distributed.backends"), reason="fanin is not installed"
)


@eager
def test_an_unchanged_program_is_summed_by_the_switch_and_told_so_once(program: str) -> None:
    done = run("fanin", "run", "--as", "gloo", "--nproc-per-node", "2", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 2 * ["groups", "FaninBackend", "FaninBackend"]
    assert done.stderr.count(SAID) == 1


@eager
def test_the_environment_does_it_under_any_launcher(program: str, switch: str) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", program)
    done = run(*torchrun, FANIN_AS="gloo", FANIN_SWITCH=switch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 2 * ["groups", "FaninBackend", "FaninBackend"]
    assert done.stderr.count(SAID) == 1
    assert f"with the switch at {switch} (FANIN_AS=gloo)" in done.stderr


@eager
def test_without_a_switch_the_line_names_none(program: str) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", program)
    done = run(*torchrun, FANIN_AS="gloo")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1
    said = f"{SAID}, and fanin sums its gradients in its ranks' processes (FANIN_AS=gloo)"
    assert said in done.stderr.splitlines()


GLOO = """
import torch
import torch.distributed as dist

assert "GLOO" not in dist.Backend._plugins
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert type(dist.group.WORLD._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
"""


@eager
def test_without_it_gloo_is_gloo() -> None:
    command = [sys.executable, "-c", GLOO]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert "fanin" not in done.stderr


ELSEWHERE = """
import torch.distributed.distributed_c10d as c10d
del c10d._FR_SELF_RECORDING_BACKENDS
from fanin.torch import stand_in
stand_in.install()
print(c10d.Backend._plugins["GLOO"].creator_fn is stand_in._create)
"""


def test_a_torch_that_knows_no_backends_which_record_themselves_will_do() -> None:
    said = environment(FANIN_AS="gloo", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=said, check=False, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@eager
def test_only_gloo_is_possible(program: str) -> None:
    by_flag = run("fanin", "run", "--as", "nccl", program)
    assert by_flag.returncode == 2
    assert "--as is 'nccl': only \"gloo\" is possible" in by_flag.stderr
    by_environment = run("fanin", "run", program, FANIN_AS="nccl")
    assert by_environment.returncode == 2
    assert "FANIN_AS is 'nccl': only \"gloo\" is possible" in by_environment.stderr
    # A program that is not run is better than one whose sums go another way than was asked.
    elsewhere = run("torch.distributed.run", program, FANIN_AS="nccl")
    assert elsewhere.returncode != 0
    assert "FANIN_AS is 'nccl': only \"gloo\" is possible" in elsewhere.stderr
    assert "groups" not in elsewhere.stdout


@lazy
def test_without_autoload_torch_finds_fanin_and_as_gloo_is_refused(
    tmp_path: Path, program: str
) -> None:
    asks = PROGRAM.replace('"gloo"', '"fanin"')
    (tmp_path / "asks.py").write_text(asks)
    command = ("fanin", "run", "--nproc-per-node", "2")
    done = run(*command, str(tmp_path / "asks.py"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 2 * ["groups", "FaninBackend", "FaninBackend"]
    refused = run(*command, "--as", "gloo", program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert refused.returncode == 2
    assert "unset it" in refused.stderr


def stand_in() -> None:
    """What `import torch` does under FANIN_AS=gloo: these processes have imported it before."""
    import fanin.torch

    os.environ["FANIN_AS"] = "gloo"
    fanin.torch._register()


def ask(me: Me, backend: str | None) -> tuple[str, int]:
    stand_in()
    dist.init_process_group(backend)
    tensor = torch.full((100,), float(me.rank))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100,), 1.0))
    return dist.get_backend(), sums_on_switch()


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:fake"])
def test_every_way_to_ask_for_gloo(launch: Launch, backend: str | None) -> None:
    said = (backend or "undefined").lower()  # as torch says it of Gloo
    assert launch(ask, 2, backend).results() == 2 * [(said, 1)]


def parallel(_me: Me) -> int:
    stand_in()
    dist.init_process_group("gloo")
    # Torch's C++ half looks into a group of this name, for its log.
    model = DistributedDataParallel(torch.nn.Linear(4, 4), find_unused_parameters=True)
    model(torch.ones(1, 4)).sum().backward()
    return sums_on_switch()


def test_ddp_takes_the_group_for_gloo(launch: Launch) -> None:
    # The gradients, and which parameters were used.
    assert launch(parallel, 2).results() == [2, 2]


def subgroups(me: Me) -> dict[str, Any]:
    stand_in()
    dist.init_process_group("gloo")
    halves = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    split: Any = dist.split_group(split_ranks=[[3, 1], [2, 0]])
    half: Any = halves[me.rank // 2]
    world: Any = dist.group.WORLD
    sums, totals = [], []
    for group in (world, half, split):
        assert dist.get_backend(group) == "gloo"
        assert group._get_backend_name() == "custom"
        tensor = torch.full((100,), 10.0**me.rank)
        dist.all_reduce(tensor, group=group)
        totals.append(tensor[0].item())
        sums.append(sums_on_switch(group))
    return {"totals": totals, "sums": sums}


def test_each_subgroup_is_a_job_of_its_own(launch: Launch) -> None:
    results = launch(subgroups, 4).results()
    assert [r["totals"] for r in results] == [
        [1111, 11, 101],
        [1111, 11, 1010],
        [1111, 1100, 101],
        [1111, 1100, 1010],
    ]
    # Each group has one all-reduce: were two groups one job, a client would have counted more.
    assert [r["sums"] for r in results] == 4 * [[1, 1, 1]]


def mixed(me: Me) -> list[str]:
    stand_in()
    me.init()
    groups: list[Any] = [dist.group.WORLD, dist.new_group(backend="gloo")]
    return [type(group._get_backend(torch.device("cpu"))).__name__ for group in groups]


def test_a_gloo_group_beside_a_fanin_group(launch: Launch) -> None:
    assert launch(mixed, 2).results() == 2 * [["FaninBackend", "FaninBackend"]]


def with_options(_me: Me, wire_dtype: WireDtype | None) -> float:
    stand_in()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options() if wire_dtype is None else Options(wire_dtype=wire_dtype)
    dist.init_process_group("gloo", pg_options=options)
    tensor = torch.full((10_000,), 1 + 2**-12)  # a small one travels as it is
    dist.all_reduce(tensor)
    assert sums_on_switch() == 1
    return tensor[0].item()


def test_options_of_gloo_are_ignored_as_gloo_ignores_ours_and_ours_are_followed(
    launch: Launch,
) -> None:
    assert launch(with_options, 2, None).results() == 2 * [2 + 2**-11]
    assert launch(with_options, 2, "bfloat16").results() == 2 * [2.0]


def no_switch(me: Me) -> tuple[float, int]:
    stand_in()
    dist.init_process_group("gloo")
    tensor = torch.full((3,), float(me.rank))
    dist.all_reduce(tensor)
    return tensor[0].item(), sums_on_switch()


def test_without_a_switch_the_ranks_sum_themselves(launch: Launch) -> None:
    assert launch(no_switch, 2, at="").results() == [(1.0, 1)] * 2


# TorchComms is in no registry for the CPU: this says what torch 2.15 asks of it, and has "gloo".
TORCHCOMMS = {
    "__init__.py": """
def is_backend_built(name):
    return name == "gloo"

def new_comm(backend, *args, **keywords):
    raise RuntimeError(f"TorchComms makes {backend}")
""",
    "_comms.py": """
class _BackendWrapper:
    pass

def _is_backend_registered(name):
    return False
""",
    "hooks.py": "class FlightRecorderHook:\n    pass\n",
}

WITH_TORCHCOMMS = """
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

assert c10d._use_torchcomms_enabled()
dist.init_process_group(BACKEND)
rank = dist.get_rank()
pair = dist.new_group([0, 1])
split = dist.split_group(split_ranks=[[1, 0]])
for group in (None, pair, split):
    tensor = torch.full((1000,), 1.0 + rank)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
parts = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
dist.gather(torch.full((2,), float(rank)), parts)
assert rank != 0 or [part[0].item() for part in parts] == [0.0, 1.0]
kinds = [type(g._get_backend(torch.device("cpu"))) for g in (dist.group.WORLD, pair, split)]
print(" ".join(["groups", *(kind.__name__ for kind in kinds), ""]), end="", flush=True)
dist.barrier()
dist.destroy_process_group(split)
dist.destroy_process_group()
"""


@pytest.fixture
def torchcomms(tmp_path: Path) -> dict[str, str]:
    """Variables with which torch finds TorchComms and is told to use it."""
    package = tmp_path / "with" / "torchcomms"
    package.mkdir(parents=True)
    for name, text in TORCHCOMMS.items():
        (package / name).write_text(text)
    path = os.pathsep.join([str(package.parent), *os.environ.get("PYTHONPATH", "").split(":")])
    return {"PYTHONPATH": path, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}


@eager
@pytest.mark.parametrize("backend", ["gloo", "fanin"])
def test_torchcomms_leaves_the_name_to_fanin(
    tmp_path: Path, torchcomms: dict[str, str], backend: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_TORCHCOMMS.replace("BACKEND", repr(backend)))
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", str(program))
    done = run(*torchrun, **torchcomms, **({"FANIN_AS": "gloo"} if backend == "gloo" else {}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 2 * ["groups", *3 * ["FaninBackend"]]
    assert done.stderr.count(SAID) == (backend == "gloo")


@eager
def test_without_it_torchcomms_has_gloo(tmp_path: Path, torchcomms: dict[str, str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_TORCHCOMMS.replace("BACKEND", "'gloo'"))
    done = run("torch.distributed.run", str(program), **torchcomms)
    assert done.returncode != 0
    assert "TorchComms makes gloo" in done.stderr
