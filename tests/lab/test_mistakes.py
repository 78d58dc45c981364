"""Mistakes at the laboratory's commands: the word that was meant, a place that can be written."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fanin_lab import units
from fanin_lab.profiler import ProfileError
from fanin_lab.profiler.drops import Losses
from fanin_lab.profiler.trials import Trials
from ranks import DEADLINE


def fanin(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where torch cannot be imported: a typing error must not need it."""
    hide = "import sys; sys.modules['torch'] = None; "
    program = f"{hide}from fanin._cli import main; raise SystemExit(main({list(arguments)}))"
    return subprocess.run(
        [sys.executable, "-c", program],
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "allredcue"), "there is no allredcue; do you mean allreduce? (allreduce, "),
        (("bench", "xyzzy"), "there is no xyzzy (allreduce, "),
        (("reproduce", "swtchml"), "there is no swtchml; do you mean switchml? (atp, "),
        (("reproduce", "atp", "--only", "shareing"), "atp has no shareing; do you mean sharing?"),
    ],
)
def test_the_nearest_name_is_told_in_two_lines_and_without_torch(
    arguments: tuple[str, ...], says: str
) -> None:
    done = fanin(*arguments)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1], done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr


def test_where_a_benchmark_writes_is_looked_at_before_it_runs(tmp_path: Path) -> None:
    for option in ("--json", "--plot"):
        done = fanin("bench", "allreduce", option, str(tmp_path / "nowhere" / "result"))
        assert done.returncode == 2
        assert "cannot write" in done.stderr
    assert units.new_file(str(tmp_path / "new")) == tmp_path / "new"
    with pytest.raises(argparse.ArgumentTypeError, match="it is a folder"):
        units.new_file(str(tmp_path))


def test_a_script_of_several_ranks_is_profiled_as_such(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    environment = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()
    assert not environment
    trials = Trials([str(script)], None, target=1.0, jobs=1, out=tmp_path / "out")
    with pytest.raises(ProfileError, match="one of several ranks, so say --nproc-per-node N"):
        trials.run(Losses("all", 0.0), seed=1)
