"""`fanin run`: torchrun, with a switch inside where one is needed, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from fanin import launch
from ranks import DEADLINE, wait_until

LOOP = """
import os
import torch
import torch.distributed as dist
import fanin.torch

dist.init_process_group("fanin")
dist.barrier()
os.write(1, f"ready {os.getpid()}\\n".encode())
tensor = torch.ones(1000)
while True:
    dist.all_reduce(tensor)
    tensor.fill_(1)
"""

SUM = """
import torch
import torch.distributed as dist
import fanin.torch

dist.init_process_group("fanin")
tensor = torch.tensor([1 + dist.get_rank()], dtype=torch.int32)
dist.all_reduce(tensor)
assert tensor.item() == 3, tensor
dist.destroy_process_group()
"""


def fanin(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fanin", *arguments]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "FANIN_SWITCH"}


@pytest.mark.parametrize("protocol", ["switchml", "atp", "goat"])
def test_a_program_runs_with_a_switch_in_the_launcher(tmp_path: Path, protocol: str) -> None:
    spoken = f"assert os.environ['FANIN_PROTOCOL'] == {protocol!r}"
    (tmp_path / "sum.py").write_text(f"import os\n{spoken}\n{SUM}")
    options = ("--protocol", protocol, "--nproc-per-node", "2")
    command = fanin("run", *options, str(tmp_path / "sum.py"))
    done = subprocess.run(command, env=clean_environment(), timeout=DEADLINE, check=False)
    assert done.returncode == 0


SHARES = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("fanin")
assert "FANIN_SWITCH" not in os.environ
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert backend._channel._client.switch == "", "no service sums"
tensor = torch.ones(1000)
dist.all_reduce(tensor)
assert (tensor == 2).all()
dist.destroy_process_group()
"""


def test_ranks_of_one_machine_sum_in_its_memory_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "shares.py").write_text(SHARES)
    for command in (fanin("run"), [sys.executable, "-m", "torch.distributed.run"]):
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", str(tmp_path / "shares.py")],
            env=clean_environment(),
            timeout=DEADLINE,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "switch" not in done.stderr


def refused(*arguments: str, torch: bool = True) -> str:
    """What `fanin run` says that starts nothing; without torch, it must not need it."""
    hide = "" if torch else "import sys; sys.modules['torch.distributed'] = None\n"
    program = f"{hide}from fanin._cli import main; raise SystemExit(main({['run', *arguments]}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(),
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) <= 2, done.stderr
    return lines[-1]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--protocl", "--protocol"),
        ("--nproc-per-nod", None),
        ("--", None),
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--wire-dtyp=bfloat16x", None),
        ("--max_restart5", "--max_restarts"),
        ("--xyzzy", ""),
    ],
)
def test_a_typing_error_costs_no_import_of_torch_and_the_nearest_flag_is_named(
    typed: str, meant: str | None
) -> None:
    # None: a flag may be shortened.
    arguments = ("--nnodes", "1", typed, "2", "train.py", "--protocl", "x")
    if meant is None:
        assert launch._unknown(arguments) is None
        return
    said = refused(*arguments, torch=False)
    nearest = f"; do you mean {meant}?" if meant else ""
    assert said == f"fanin run: there is no {typed}{nearest} (fanin run --help lists all)"


def test_all_flags_of_torchrun_are_known_with_what_follows_them() -> None:
    from torch.distributed.run import get_args_parser

    known = launch._of_torchrun()
    assert known is not None
    flags = get_args_parser()._option_string_actions
    for name, action in flags.items():
        if name not in ("-h", "--help"):
            assert known[name] == (action.nargs != 0), name


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("nowhere.py",), "there is no nowhere.py"),
        (("-m", "nowhere.train"), "there is no module nowhere.train"),
        (("--no-python", "nowhere"), "there is no command nowhere"),
        (("-np", "2", "python", "nowhere.py"), "there is no nowhere.py"),
        (("--protocol", "atp", "nowhere.py"), "there is no nowhere.py"),
    ],
)
def test_a_program_that_is_not_there_is_refused_before_anything_starts(
    arguments: tuple[str, ...], absent: str
) -> None:
    assert refused(*arguments) == f"fanin run: error: {absent}"


def test_a_failing_program_gives_a_failing_status(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    done = subprocess.run(
        fanin("run", "--nproc-per-node", "1", str(tmp_path / "fail.py")),
        env=clean_environment(),
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Root Cause" in done.stderr
    assert "fail.py FAILED" in done.stderr
    assert re.search(r"exitcode\s*: 3\b", done.stderr)


HOROVOD = """
import sys
import torch
import fanin.horovod as hvd

hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
assert (hvd.size(), hvd.local_size(), hvd.cross_size(), total) == (2, 2, 1, 2.0)
assert sys.argv[1:] == ["--epochs", "3"]
"""


@pytest.mark.parametrize("python", [[sys.executable], []])
def test_a_program_is_started_as_by_horovodrun(tmp_path: Path, python: list[str]) -> None:
    (tmp_path / "train.py").write_text(HOROVOD)
    program = [*python, str(tmp_path / "train.py"), "--epochs", "3"]
    command = fanin("run", "-np", "2", "-H", "localhost:2", *program)
    done = subprocess.run(command, env=clean_environment(), timeout=DEADLINE, check=False)
    assert done.returncode == 0


def test_a_module_is_started_as_by_horovodrun(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(HOROVOD)
    command = fanin("run", "-np", "2", "-m", "package.train", "--epochs", "3")
    done = subprocess.run(
        command, env=clean_environment(), cwd=tmp_path, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0


STATUS = """
import os, subprocess, sys, torch
import torch.distributed as dist

dist.init_process_group("fanin")
dist.barrier()
if dist.get_rank() == 0:
    switch = os.environ["FANIN_SWITCH"]
    subprocess.run([sys.executable, "-m", "fanin", "status", "--switch", switch], check=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_run_says_where_its_switch_is(tmp_path: Path) -> None:
    (tmp_path / "status.py").write_text(STATUS)
    done = subprocess.run(
        fanin("run", "--plan", "switch", "--nproc-per-node", "2", str(tmp_path / "status.py")),
        env=clean_environment(),
        timeout=DEADLINE,
        check=True,
        capture_output=True,
        text=True,
    )
    line = re.search(r"the switch is at (\S+) \(fanin status --switch (\S+)\)$", done.stderr, re.M)
    assert line, done.stderr
    assert line[1] == line[2]
    assert f"switch {line[1]}" in done.stdout


@pytest.mark.parametrize("to_group", [False, True], ids=["launcher", "process group"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(
    tmp_path: Path, sent: signal.Signals, to_group: bool
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    launcher = subprocess.Popen(
        fanin("run", "--nproc-per-node", "2", str(tmp_path / "loop.py")),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        assert launcher.stdout is not None
        # Blocks until both ranks have spoken, or all have died.
        ready = [line for line in (launcher.stdout.readline() for _ in range(2)) if line]
        assert len(ready) == 2
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert {int(line.split()[1]) for line in ready} <= {child.pid for child in family}
        if to_group:
            os.killpg(launcher.pid, sent)
        else:
            os.kill(launcher.pid, sent)
        launcher.wait(20)
        assert launcher.returncode == 128 + sent
        wait_until(lambda: not any(map(alive, family)), "all children have ended", 5)
    finally:
        for process in [launcher, *filter(alive, family)]:
            process.kill()
        launcher.wait(DEADLINE)
        launcher.stdout.close()  # type: ignore[union-attr]


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_several_nodes_without_a_switch_are_an_error() -> None:
    done = subprocess.run(
        fanin("run", "--nnodes", "1:2", "--protocol", "atp", "train.py"),
        env=clean_environment(),
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    # Behind the usage, which names every flag anyway.
    _, _, error = done.stderr.partition("\nfanin run: error: ")
    assert error.startswith("with more than one node the ranks need a switch")
    assert "pass --switch ADDR:PORT on every node" in error


def test_help_names_run_and_its_examples() -> None:
    examples = "fanin run --switch 10.0.0.9:4800 --nnodes 2", "fanin run --as gloo"
    for arguments, expected in (
        (["--help"], ("  run  ", "fanin run --nproc-per-node 4 train.py")),
        (
            ["run", "--help"],
            (
                "the switches that sum, besides the ranks' own services (default: $FANIN_SWITCH)",
                *examples,
            ),
        ),
    ):
        done = subprocess.run(
            fanin(*arguments), timeout=DEADLINE, check=True, capture_output=True, text=True
        )
        words = " ".join(done.stdout.split())
        for text in expected:
            assert " ".join(text.split()) in words


def test_importing_fanin_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, fanin, fanin.errors; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE, check=True)


def installed() -> bool:
    try:
        return "torch.backends" in {e.group for e in metadata.distribution("fanin").entry_points}
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not installed(), reason="fanin is on the path, but not installed")
def test_importing_torch_is_enough() -> None:
    program = (
        "import sys, torch; assert torch.distributed.Backend.FANIN == 'fanin'; "
        "assert 'fanin._fanin' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE, check=True)


def test_importing_fanin_torch_first_works() -> None:
    program = "import fanin.torch, torch; assert torch.distributed.Backend.FANIN == 'fanin'"
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE, check=True)
