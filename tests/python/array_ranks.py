"""Ranks that join by `fanin.connect` at an address, for tests of arrays."""

from __future__ import annotations

from typing import Any

import fanin
import numpy as np
from ranks import Me

ALONE = ""  # for `launch`: no switch is named


def joined(me: Me, way: str, meet: str, **said: Any) -> fanin.Group:
    """Join the ranks at `meet`; each is a machine by itself but where they share memory."""
    if way != "memory":
        said["machine"] = f"m{me.rank}"
    if way == "atp":
        said["protocol"] = "atp"
    return fanin.connect(
        rank=me.rank, world_size=me.world_size, rendezvous=meet, timeout=30, **said
    )


def alike(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.asarray(expected).dtype, (got.dtype, np.asarray(expected).dtype)
    assert got.shape == np.asarray(expected).shape
