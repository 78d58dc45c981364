"""Which room of `fanin.torch` may import which (ARCHITECTURE.md), read from its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fanin.torch

TORCH = Path(fanin.torch.__file__).parent
NAME = fanin.torch.__name__

# Room, and the rooms that it imports. Each stands below those that import it, so none runs up.
ALLOWED: dict[str, set[str]] = {
    "patches": set(),
    "rendezvous": set(),
    "compression": set(),
    "works": {"patches"},
    "device": {"works"},
    "backend": {"patches", "rendezvous", "works", "device"},
    "hooks": {"works", "backend"},
    "optimizers": {"patches", "rendezvous", "backend"},
}
# What stands beside the rooms, and may import them all: the names that programs import, and Gloo's
# place.
FACE = {"__init__.py", "stand_in.py"}


def module_of(file: Path) -> str:
    parts = file.relative_to(TORCH).with_suffix("").parts
    return ".".join([NAME, *(part for part in parts if part != "__init__")])


MODULES = {module_of(file): file for file in sorted(TORCH.rglob("*.py"))}


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: an import that does not say from where"
            assert node.module is not None
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else node.module


def room_of(module: str) -> str:
    """The room of a module of `fanin.torch`; none of the face."""
    name = module.removeprefix(NAME).removeprefix(".").split(".")[0]
    return name if name in ALLOWED else ""


def arrows() -> Iterator[tuple[str, str]]:
    """Yield what each module in a room imports of `fanin`."""
    for module, file in MODULES.items():
        if room_of(module):
            for name in imported(file):
                if name.split(".")[0] == "fanin":
                    yield module, name


def test_the_table_names_every_room() -> None:
    assert {path.parent.name for path in TORCH.glob("*/*.py")} == set(ALLOWED)
    assert {path.name for path in TORCH.glob("*.py")} == FACE


def test_rooms_import_only_what_they_may() -> None:
    found: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for module, name in arrows():
        if name.startswith(NAME):
            assert room_of(name), f"{module} must not import the face, {name}"
            found[room_of(module)].add(room_of(name))
        else:
            assert not name.startswith("fanin.horovod"), f"{module} must not import {name}"
    assert {room: names - {room} for room, names in found.items()} == ALLOWED


def test_no_room_imports_one_that_stands_above_it() -> None:
    rooms = list(ALLOWED)
    for room, names in ALLOWED.items():
        assert all(rooms.index(name) < rooms.index(room) for name in names), room


def test_no_file_imports_one_that_imports_it() -> None:
    graph: dict[str, set[str]] = {}
    for module, name in arrows():
        graph.setdefault(module, set()).add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"in a circle: {error.args[1]}") from None
