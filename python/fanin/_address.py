"""Where the switch is: the argument, else the environment, else an error that names the cure."""

from __future__ import annotations

import os

from fanin.errors import SwitchUnreachable

SWITCH_VARIABLE = "FANIN_SWITCH"


def switch_address(explicit: str | None = None) -> str:
    """Return the switch's "host:port".

    Raises `SwitchUnreachable` when neither the argument nor the environment gives one.
    """
    address = explicit or os.environ.get(SWITCH_VARIABLE)
    if not address:
        raise SwitchUnreachable(
            "no switch was named: start the program with `fanin run --nproc-per-node N ...` (which "
            f"embeds one), or start one with `fanin switch` and set {SWITCH_VARIABLE}=host:port on "
            "every rank"
        )
    return address
