"""Rates as tc writes bits."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)(bit|bps)", re.IGNORECASE)
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def rate_bps(text: str) -> int:
    """Parse "500mbit", "1gbit", "1gibit": bits per second."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no rate: write it as 500mbit or 1gbit")
    number, prefix, binary, unit = match.groups()
    if unit.lower() == "bps":
        # To tc these are bytes, to most people bits.
        meant = f"{number}{prefix}{binary}bit".lower()
        raise ArgumentTypeError(f"{text!r} may mean bits or bytes a second: write {meant}")
    bits = float(number) * factor(prefix, binary)
    if bits < 1000:
        raise ArgumentTypeError(f"{text!r} is less than 1kbit")
    return int(bits)


def factor(prefix: str, binary: str) -> int:
    """Return what "k", "m", "g" or "t" stands for, before an "i" or not."""
    base: int = 1024 if binary else 1000
    power = _PREFIXES[prefix.lower()]
    scale: int = base**power
    return scale
