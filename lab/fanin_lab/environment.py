"""The environment of the processes that the laboratory starts."""

from __future__ import annotations

import os
from pathlib import Path

from fanin import _simulation


def environment() -> dict[str, str]:
    """Return an environment in which Python finds this laboratory and its fanin, wherever both are.

    `fanin._simulation.environment` does so for fanin alone.
    """
    found = _simulation.environment()
    here = str(Path(__file__).parents[1])
    return {**found, "PYTHONPATH": os.pathsep.join([here, found["PYTHONPATH"]])}
