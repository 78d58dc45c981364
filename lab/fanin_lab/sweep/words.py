"""Keys of scenarios in the words that pictures use."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES: Mapping[str, tuple[str, str]] = {
    "aggregators": ("aggregators", ""),
    "alpha": ("buffer's sharing factor alpha", ""),
    "batch": ("samples in a batch", ""),
    "byteps": ("BytePS's hosts move", ""),
    "core_delay": ("delay between switches", ""),
    "core_rate": ("rate between switches", ""),
    "delay": ("link delay", ""),
    "ecn": ("marks from a queue of", ""),
    "elements": ("elements in a packet", ""),
    "hosts": ("hosts", ""),
    "in_flight": ("tensors under way", ""),
    "initial_window": ("first window", ""),
    "iterations": ("iterations", ""),
    "jitter": ("jitter of workers' times", ""),
    "large_values": ("packets that overflow", ""),
    "loss": ("packets lost", ""),
    "loss_bound": ("loss bound", ""),
    "mtu": ("longest IP packet", "bytes"),
    "nic": ("queue for the server's cores", ""),
    "port_buffer": ("buffer of a port", ""),
    "queue": ("queue", ""),
    "rate": ("link rate", ""),
    "receive_window": ("receive window", ""),
    "round_trip_us": ("round trip", "us"),
    "rto_min": ("shortest timeout", ""),
    "scale": ("scaled down", "times"),
    "servers": ("servers", ""),
    "shared_buffer": ("shared buffer of a switch", ""),
    "slots": ("slots", ""),
    "tensor": ("tensor size", ""),
    "timeout": ("timeout", ""),
    "uncontrolled": ("window without control", "packets"),
    "ways": ("aggregators that a fragment may take", ""),
    "window": ("window", ""),
    "windows": ("windows fill a host", "times"),
    "workers": ("workers", ""),
}
"""By key: the words, and the unit of its values where they are numbers without one."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+|%)")


def axis(path: str) -> str:
    """Return what an axis of this parameter is called: its path, if its key is unknown."""
    *tables, key = path.split(".")
    if key not in _NAMES:
        return path
    name, unit = _NAMES[key]
    # `job.NAME.key`, or `job.NAME.SYSTEM.key`: there are several tables of that kind.
    owner = f", {tables[0]} {tables[1]}" if len(tables) > 1 else ""
    return name + owner + (f" ({unit})" if unit else "")


def setting(key: str, value: object) -> str:
    """Return a key, or the path of a parameter, with its value: "link delay 20 us"."""
    name, unit = _NAMES.get(key, (axis(key), ""))
    return f"{name} {quantity(value)} {unit}".rstrip()


def settings(changed: Mapping[str, object]) -> str:
    """Return all that is not as usual."""
    return ", ".join(setting(key, value) for key, value in changed.items()) or "usual"


def quantity(value: object) -> str:
    """Return a number, or a number with its unit, as people write it."""
    if isinstance(value, int | float):
        return f"{value:,g}"
    if match := _QUANTITY.fullmatch(str(value)):
        return f"{match[1]} {match[2]}"
    return str(value)
