"""The files of examples/ by which others start programs, read by those programs' own checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


def check(*command: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    return subprocess.run(
        [str(BIN / program), *arguments], check=False, capture_output=True, text=True
    )


def test_the_kubernetes_objects_pass_the_strict_schema() -> None:
    done = check("kubernetes-validate", "--strict", str(EXAMPLES / "kubernetes.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    for name in ("deployment/fanin-switch", "service/fanin-switch", "service/train", "job/train"):
        assert f"passed for resource {name}" in said


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("completionMode: Indexed", "completionMode: 7"), ("restartPolicy:", "restartPolicies:")],
)
def test_the_schema_refuses_what_kubernetes_would(tmp_path: Path, text: str, wrong: str) -> None:
    objects = (EXAMPLES / "kubernetes.yaml").read_text()
    assert text in objects
    (tmp_path / "wrong.yaml").write_text(objects.replace(text, wrong))
    assert check("kubernetes-validate", "--strict", str(tmp_path / "wrong.yaml")).returncode != 0


def test_the_shell_finds_nothing_in_the_batch_script() -> None:
    done = check("shellcheck", str(EXAMPLES / "slurm.sh"))
    assert done.returncode == 0, done.stdout
