"""What a rank says of its place (`fanin._services.Place`), for tests of plans."""

from typing import Any

from fanin._services import Place

GIGABIT = 1_000_000_000


def place(machine: int, **said: Any) -> Place:
    usual: dict[str, Any] = {
        "machine": f"m{machine}",
        "name": f"m{machine}",
        "address": f"10.0.0.{machine + 1}",
        "rate_bps": None,
        "switches": [],
        "switch_rates": [],
        "plan": "auto",
        "local": None,
        "interface": "eth0",
    }
    return Place(**usual | said)
