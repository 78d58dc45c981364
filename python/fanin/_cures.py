"""Cures that errors suggest: the word that was meant, and the command that installs a package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

# The laboratory's wheel, as `make wheel` leaves it.
_LAB: Final = "target/wheels/fanin_lab-*.whl"
# Modules whose package has another name, or that need more packages (fanin's extra `torch`).
_PACKAGES: Final = {"sklearn": "scikit-learn", "torch": '"torch>=2.14" numpy'}


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; do you mean ...?" with the word that is nearest, or nothing if none is near."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f"; do you mean {found[0]}?" if found else ""


def to_install(*modules: str) -> str:
    """Return the command that installs these modules.

    No index has fanin or fanin-lab: a name that is looked up there could be anybody's.
    """
    packages = [module.partition(".")[0] for module in modules]
    if "fanin_lab" in packages:
        return f"pip install {_LAB} (`make wheel` in a clone of fanin builds it)"
    return f"pip install {' '.join(_PACKAGES.get(package, package) for package in packages)}"
