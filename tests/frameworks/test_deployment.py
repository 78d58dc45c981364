"""The files of examples/ by which others start programs, read by those programs' own checkers."""

from __future__ import annotations

import re
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


def test_the_image_is_built_from_what_is_in_the_checkout() -> None:
    done = check("hadolint", str(EXAMPLES / "Dockerfile"))
    assert done.returncode == 0, done.stdout
    text = (EXAMPLES / "Dockerfile").read_text()
    # No registry is named: these are the public one's.
    assert re.findall("^FROM ([^/ ]+)(?: AS build)?$", text, re.M) == [
        "rust:1.90-slim-bookworm",
        "python:3.12-slim-bookworm",
    ]
    root = EXAMPLES.parent
    kept = [line[1:] for line in (EXAMPLES / "Dockerfile.dockerignore").read_text().splitlines()]
    copied = [
        each
        for sources in re.findall("^COPY ([^-].*) [^ ]+$", text, re.M)
        for each in sources.split()
    ]
    assert len(copied) == 9
    for each in copied:
        assert list(root.glob(each)), each
        assert each in kept, each


def test_the_image_has_the_program_that_the_kubernetes_job_starts() -> None:
    started = re.findall(r"- (\w+\.py)$", (EXAMPLES / "kubernetes.yaml").read_text(), re.M)
    assert [(EXAMPLES / each).is_file() for each in started] == [True]


def test_hadolint_refuses_what_docker_would(tmp_path: Path) -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text(text.replace("WORKDIR", "WORKDIRECTORY", 1))
    assert check("hadolint", str(tmp_path / "Dockerfile")).returncode != 0
