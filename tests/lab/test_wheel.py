"""What `pip install` gives, fanin and its laboratory, without a compiler and without torch."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy
import pytest
from conftest import SwitchProcess
from ranks import DEADLINE

ROOT = Path(__file__).parents[2]
# If `make build` left everything but the wheel itself, it takes seconds; else it compiles.
BUILDING = 1800.0

RANK = """
import sys, numpy, fanin
with fanin.connect(sys.argv[1], job="wheel", rank=int(sys.argv[2]), world_size=2) as group:
    print(group.all_reduce(numpy.full(1000, 1.5, numpy.float32)).tolist() == [3.0] * 1000)
"""


def build(*command: str) -> None:
    # Compiling takes longer than any test may; it ends at its own deadline.
    faulthandler.cancel_dump_traceback_later()
    done = subprocess.run(
        command, cwd=ROOT, timeout=BUILDING, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of fanin and of fanin-lab. The first as `make build` links it, not as zig does."""
    out = tmp_path_factory.mktemp("wheels")
    build(str(Path(sys.executable).parent / "maturin"), "build", "--release", "--out", str(out))
    laboratory = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), "./lab"]
    build(sys.executable, "-m", "pip", "wheel", *laboratory)
    return {wheel.name.split("-")[0]: wheel for wheel in out.glob("*.whl")}


def packages(wheel: Path) -> set[str]:
    """The packages at its top, and those right below them."""
    with zipfile.ZipFile(wheel) as archive:
        folders = [name.split("/")[:-1] for name in archive.namelist()]
    return {"/".join(path[:2]) for path in folders if path and "." not in path[0]}


def test_the_laboratory_has_the_version_of_what_it_is_a_laboratory_of() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    laboratory = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]
    assert laboratory["version"] == workspace
    assert f"fanin=={workspace}" in laboratory["dependencies"]


def test_the_wheel_is_for_every_python_and_leaves_the_laboratory_out(
    wheels: dict[str, Path],
) -> None:
    assert "-cp311-abi3-" in wheels["fanin"].name
    assert "fanin/torch" in packages(wheels["fanin"])
    with zipfile.ZipFile(wheels["fanin"]) as archive:
        assert "fanin/jax/mpi.c" in archive.namelist()
    assert {package.partition("/")[0] for package in packages(wheels["fanin"])} == {"fanin"}
    laboratory = ("bench", "netlab", "papers", "profiler", "sweep")
    rooms = {f"fanin_lab/{room}" for room in laboratory}
    assert packages(wheels["fanin_lab"]) == {"fanin_lab", *rooms}


def test_the_package_names_the_laboratory_only_where_it_hands_commands_over() -> None:
    named = [
        file.name
        for file in sorted((ROOT / "python").rglob("*.py"))
        if "fanin_lab" in file.read_text()
    ]
    assert named == ["_cli.py", "_cures.py"]


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has fanin and, without a download, our NumPy."""
    home = tmp_path_factory.mktemp("venv")
    build(sys.executable, "-m", "venv", str(home))
    binaries = home / "bin"
    install = ["-m", "pip", "install", "--no-index", "--no-deps", str(wheels["fanin"])]
    subprocess.run(
        [str(binaries / "python"), *install],
        env={"PATH": str(binaries)},
        timeout=DEADLINE,
        check=True,
    )
    (packages,) = home.glob("lib/python*/site-packages")
    numpys = Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (numpys / name).exists():
            (packages / name).symlink_to(numpys / name)
    return binaries


def run(installed: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(installed / command[0]), *command[1:]],
        env={"PATH": str(installed)},
        cwd=installed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def listening(installed: Path) -> Iterator[str]:
    popen = partial(subprocess.Popen, env={"PATH": str(installed)}, cwd=installed)
    with SwitchProcess(popen=popen, program=[str(installed / "fanin")]) as switch:
        yield switch.address


def test_what_pip_installed_sums(installed: Path, listening: str) -> None:
    ranks = [run(installed, "python", "-c", RANK, listening, str(rank)) for rank in range(2)]
    for rank in ranks:
        out, complaint = rank.communicate(timeout=DEADLINE)
        assert out == "True\n", complaint


def test_what_pip_installed_says_what_else_to_install(installed: Path) -> None:
    version = run(installed, "fanin", "version")
    assert "fanin 0.1.0" in version.communicate(timeout=DEADLINE)[0]
    lab, torch = "target/wheels/fanin_lab-*.whl", '"torch>=2.14"'
    for command, what in (("bench", lab), ("netlab", lab), ("run", torch)):
        process = run(installed, "fanin", command, "x")
        complaint = process.communicate(timeout=DEADLINE)[1]
        assert process.returncode == 1
        (line,) = complaint.splitlines()
        assert f"pip install {what}" in line
