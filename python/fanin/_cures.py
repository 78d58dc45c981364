"""What errors suggest: the word that was meant, and what installs what is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

# The laboratory's wheel, as `make wheel` leaves it.
_LAB: Final = "target/wheels/fanin_lab-*.whl"
# Packages that are not called as their modules are, or that have to be of a version.
_PACKAGES: Final = {"sklearn": "scikit-learn", "torch": '"torch>=2.14"'}


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; do you mean ...?" with the word that is nearest, or nothing if none is near."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f"; do you mean {found[0]}?" if found else ""


def to_install(*modules: str) -> str:
    """Return the command that installs what has these modules, or what else does.

    No index has fanin: a name that is looked up there could be anybody's.
    """
    others = [module for module in modules if module.partition(".")[0] != "fanin"]
    if len(others) < len(modules):
        return f"pip install {_LAB} (`make wheel` in a clone of fanin builds it)"
    return f"pip install {' '.join(_PACKAGES.get(module, module) for module in others)}"
