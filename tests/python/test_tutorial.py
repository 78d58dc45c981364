"""docs/tutorial.md, as it stands: its commands on machines of their own, behind its firewall."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from laboratory import needs_lab
from programs import Program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
MACHINES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
BRIDGE = "bridge"
DEADLINE = 120.0

# The ports that the page has open on each machine.
PORTS = "tcp dport 32768-60999 accept; udp dport 32768-60999 accept;"
OPEN = {
    "a": f"tcp dport 29500 accept; {PORTS}",
    "b": PORTS,
    "c": "tcp dport 4800 accept; udp dport 4800 accept;",
}


@dataclass(frozen=True)
class Command:
    text: str
    places: list[str]
    """Machines, or "the clone"."""


def commands(step: int) -> list[Command]:
    """The commands of a step, each of which says where it is for."""
    page = PAGE.read_text()
    (section,) = re.findall(rf"^## {step}\. .*?(?=^## )", page, re.M | re.S)
    found = []
    fenced = None
    for line in section.splitlines():
        if line.startswith("```"):
            fenced = None if fenced is not None else line.removeprefix("```")
        elif fenced == "":
            told = re.fullmatch(r"(.+?) +# (?:on|in) ([abc](?:, [abc])*|the clone)(?:: .*)?", line)
            assert told, f"it does not say where: {line}"
            found.append(Command(told[1], told[2].split(", ")))
    return found


# In the places of a build, which takes minutes, and of a network that leads to an index.
MAKE = f"""#!{sys.executable}
import sys, zipfile
assert sys.argv[1:] == ["wheel"]
from pathlib import Path
folder = Path("target/wheels")
folder.mkdir(parents=True)
name = "fanin-{VERSION}"
about = name + ".dist-info"
extras = {list(PROJECT["optional-dependencies"])!r}
metadata = ["Metadata-Version: 2.1", "Name: fanin", "Version: {VERSION}"]
metadata += [f"Provides-Extra: {{extra}}" for extra in extras]
with zipfile.ZipFile(folder / f"{{name}}-py3-none-any.whl", "w") as wheel:
    wheel.writestr(f"{{about}}/METADATA", "\\n".join(metadata) + "\\n")
    tags = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    wheel.writestr(f"{{about}}/WHEEL", tags)
    wheel.writestr(f"{{about}}/RECORD", "")
"""
SCP = """#!/bin/sh
set -e
for last; do :; done
while [ $# -gt 1 ]; do cp "$1" "$HOMES/${last%:}/"; shift; done
"""


@dataclass
class Stage:
    """Three machines, and a clone."""

    folder: Path
    environment: dict[str, str]
    shells: dict[str, list[str]] = field(default_factory=dict)
    """What was said in each machine's shell that later commands need."""
    started: list[Program] = field(default_factory=list)

    def start(self, command: Command, place: str) -> Program:
        """Start a command as the shell of its place does."""
        state = self.shells.setdefault(place, [])
        if command.text.startswith(("export ", ". ")):
            state.append(command.text)
        script = "\n".join(["set -e", *state, command.text])
        folder = self.folder / MACHINES.get(place, "clone")
        inside = ["ip", "netns", "exec", namespace(place)] if place in MACHINES else []
        program = Program([*inside, "bash", "-c", script], self.environment, str(folder))
        self.started.append(program)
        return program

    def play(self, *all_at_once: Command) -> list[Program]:
        """Run commands to their end, which all of them reach well."""
        ran = [(c, place, self.start(c, place)) for c in all_at_once for place in c.places]
        for command, place, program in ran:
            assert program.wait(DEADLINE) == 0, f"{command.text} on {place}:\n{program.text()}"
        return [program for _, _, program in ran]


def namespace(place: str) -> str:
    return f"tutorial{os.getpid()}-{place}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    clone, programs = tmp_path / "clone", tmp_path / "programs"
    clone.mkdir()
    (clone / "examples").symlink_to(ROOT / "examples")
    programs.mkdir()
    for name, text in (("make", MAKE), ("scp", SCP)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    # Behind the machines' own environments comes that of the tests: it has torch and fanin.
    here = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        "PATH": ":".join(here),
        "HOMES": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "FANIN_SWITCH": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    played = Stage(tmp_path, environment)
    try:
        ip("netns", "add", namespace(BRIDGE))
        ip("-n", namespace(BRIDGE), "link", "add", "br0", "type", "bridge")
        ip("-n", namespace(BRIDGE), "link", "set", "br0", "up")
        for machine, address in MACHINES.items():
            (tmp_path / address).mkdir()
            there = namespace(machine)
            ip("netns", "add", there)
            peer = ("peer", "name", machine, "netns", namespace(BRIDGE))
            ip("link", "add", "eth0", "netns", there, "type", "veth", *peer)
            ip("-n", namespace(BRIDGE), "link", "set", "dev", machine, "master", "br0", "up")
            ip("-n", there, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", there, "link", "set", device, "up")
            rules = f"""table inet wall {{ chain in {{
                type filter hook input priority 0; policy drop;
                iif lo accept; ct state established,related accept;
                icmp type destination-unreachable accept; {OPEN[machine]}
            }}; }}"""
            inside = ["ip", "netns", "exec", there, "nft", "-f", "-"]
            subprocess.run(inside, input=rules, text=True, check=True)
        yield played
    finally:
        for program in played.started:
            program.end()
        for place in (*MACHINES, BRIDGE):
            subprocess.run(["ip", "netns", "del", namespace(place)], check=False)


def together(found: list[Command]) -> list[Command]:
    return [command for command in found if command.text.startswith("torchrun ")]


def services(training: Program) -> set[str]:
    return set(re.findall(r'joined switch="([^"]+)"', training.text()))


def check_trained(programs: list[Program]) -> None:
    (accuracy,) = re.findall(r"accuracy (\S+) on", "\n".join(p.text() for p in programs))
    assert float(accuracy) > 0.95


@needs_lab
def test_every_command_of_the_tutorial_does_what_it_says(stage: Stage) -> None:
    for command in commands(1):
        ran = stage.play(command)
        if command.text.startswith("pip "):
            assert all("Successfully installed fanin" in program.text() for program in ran)
            assert not any("does not provide the extra" in program.text() for program in ran)
    check_trained(stage.play(*together(commands(3))))

    *told, status = commands(4)
    for command in told:
        if command not in together(told):
            stage.play(command)
    trains = [stage.start(c, place) for c in together(told) for place in c.places]
    for program in trains:
        for _ in range(2):
            program.line(r'joined switch="10\.0\.0\.[12]:\d+".* share=0\.5\b', DEADLINE)
    (shown,) = stage.play(status)
    assert re.search(r"^ *digits#\w+ +2 +running", shown.text(), re.M), shown.text()
    assert len(re.findall(r"rank [01]\b", shown.text())) >= 2, shown.text()
    for program in trains:
        program.end()

    for command in commands(5):
        if command.text.startswith("fanin switch "):
            switch = stage.start(command, *command.places)
            switch.line("listens on 0.0.0.0:4800", DEADLINE)
        elif command not in together(commands(5)):
            stage.play(command)
    trained = stage.play(*together(commands(5)))
    check_trained(trained)
    for program in trained:
        assert len(services(program)) == 3, program.text()
    assert "10.0.0.3:4800" in services(trained[0])


def test_the_extras_that_the_tutorial_installs_bring_what_its_program_imports() -> None:
    (install,) = {c.text for c in commands(1) if c.text.startswith("pip ")}
    told = re.search(r"\[([\w,]+)\]", install)
    assert told
    extras = PROJECT["optional-dependencies"]
    requirements = [each for extra in told[1].split(",") for each in extras[extra]]
    brought = {re.split(r"[<>=]", each)[0] for each in requirements}
    tree = ast.parse((ROOT / "examples" / "digits.py").read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    packages = {"sklearn": "scikit-learn"}
    needed = {packages.get(name, name) for name in imported - sys.stdlib_module_names}
    assert needed - {"fanin"} <= brought
