"""The examples run as their first lines say, only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_compare_finds_that_the_curves_of_gpt_agree() -> None:
    printed = output_of(str(EXAMPLES / "compare.py"), "--ranks", "2", "--steps", "5")
    assert "the curves agree" in printed
