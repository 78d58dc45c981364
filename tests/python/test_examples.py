"""The examples run as their first lines say, only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from laboratory import needs_lab

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "FANIN_SWITCH"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        timeout=240,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_learns() -> None:
    launcher = ["-m", "fanin", "run", "--nproc-per-node", "2"]
    printed = output_of(*launcher, str(EXAMPLES / "digits.py"), "--epochs", "3")
    found = re.search(r"accuracy (\S+) on", printed)
    assert found
    assert float(found[1]) > 0.8


def test_resnet_learns() -> None:
    launcher = ["-m", "fanin", "run", "--nproc-per-node", "2", str(EXAMPLES / "resnet.py")]
    printed = output_of(*launcher, "--images", "600", "--epochs", "2", "--blocks", "1")
    found = re.search(r"accuracy (\S+) on 120 images", printed)
    assert found
    assert float(found[1]) > 0.3, "of ten classes"


def test_a_sharded_gpt_learns_as_a_whole_one() -> None:
    launcher = ["-m", "fanin", "run", "--nproc-per-node", "2", str(EXAMPLES / "gpt.py")]
    losses = []
    for flags in ([], ["--fsdp"]):
        printed = output_of(*launcher, "--steps", "10", *flags)
        found = re.search(r"step    10  loss (\S+)", printed)
        assert found
        losses.append(float(found[1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_digits_learns_with_horovods_interface() -> None:
    launcher = ["-m", "fanin", "run", "-np", "2", "--min-np", "1"]
    printed = output_of(*launcher, str(EXAMPLES / "digits_horovod.py"), "--epochs", "3")
    found = re.search(r"accuracy (\S+) on", printed)
    assert found
    assert float(found[1]) > 0.8


def test_compare_finds_that_the_curves_of_gpt_agree() -> None:
    printed = output_of(str(EXAMPLES / "compare.py"), "--ranks", "2", "--steps", "5")
    assert "the curves agree" in printed


def test_asynchronous_trains_both_ways_and_draws_them(tmp_path: Path) -> None:
    plot = tmp_path / "asynchronous.png"
    launcher = ["-m", "fanin", "run", "--nproc-per-node", "3", str(EXAMPLES / "asynchronous.py")]
    printed = output_of(*launcher, "--changes", "20", "--seconds", "0.01", "--plot", str(plot))
    names = re.findall(r"^(\w+): 20 changes in [\d.]+ s, accuracy 0\.\d+$", printed, re.MULTILINE)
    assert names == ["synchronous", "asynchronous"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@needs_lab
def test_lossy_trains_with_and_without_a_bound_and_draws_both(tmp_path: Path) -> None:
    plot = tmp_path / "lossy.png"
    links = ["--ranks", "2", "--steps", "12", "--loss", "0.05", "--bound", "0.1"]
    more = ["--gloo", "--seeds", "2", "--target", "0", "--plot", str(plot)]
    printed = output_of(str(EXAMPLES / "lossy.py"), *links, *more)
    of_both = r"[\d.]+ \([\d.]+ to [\d.]+\)"
    told = rf"^(.+): accuracy {of_both}, {of_both} s to 0; (\S+) % of the gradients lost"
    lost = {name: float(lost) for name, lost in re.findall(told, printed, re.MULTILINE)}
    assert lost.keys() == {"nothing lost", "at most 10 % lost", "Gloo"}, printed
    assert lost["nothing lost"] == lost["Gloo"] == 0
    assert 0 < lost["at most 10 % lost"] <= 10
    assert plot.read_bytes().startswith(b"\x89PNG")
