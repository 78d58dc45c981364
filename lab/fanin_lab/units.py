"""Quantities on the laboratory's command lines, and as they are shown.

`_fanin` parses rates and sizes, as it does for all of fanin.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path

from fanin import _fanin


def whole_number(text: str) -> int:
    """Parse a number that is not negative."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def positive_number(text: str) -> int:
    """Parse a number above zero."""
    number = whole_number(text)
    if number == 0:
        raise ArgumentTypeError("0: at least 1")
    return number


def size_bytes(text: str) -> int:
    """Parse "25MB" (10^6), "100MiB" (2^20), "4096": bytes."""
    size = _parsed(_fanin.size_bytes, f"{text}B" if text.isdecimal() else text)
    if size < 1:
        raise ArgumentTypeError(f"{text!r} is empty")
    return size


def rate_bps(text: str) -> int:
    """Parse "500mbit", "1gbit", "1gibit": bits per second."""
    return _parsed(_fanin.rate_bps, text)


def _parsed(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def loss_fraction(text: str) -> float:
    """Parse "0.1%", or "0.001": the fraction of packets that is lost, in 0 to 0.5."""
    try:
        fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no loss; write 1% or 0.01") from None
    if not 0 <= fraction <= 0.5:
        raise ArgumentTypeError(
            f"{text!r} would lose {100 * fraction:g} % of packets; write 1% or 0.01, at most 50%"
        )
    return fraction


def new_file(text: str) -> Path:
    """Parse a path that can be written; looks now, and not once there is something to write."""
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"no writable folder {folder}"
        raise ArgumentTypeError(f"cannot write {text}: {why}")
    return path


def shown_rate(bps: int) -> str:
    """Return the rate as tc writes it."""
    return _short(bps, ("bit", "kbit", "mbit", "gbit", "tbit"))


def shown_links(
    bps: int | None,
    loss: float | None,
    mtu: int,
    racks: int = 1,
    spares: int = 0,
    spare_bps: int | None = None,
    rates: Mapping[str, int] | None = None,
    queue: int | None = None,
    background: int | None = None,
    burst: int | None = None,
    udp_offload: bool = True,
    bulk: bool = False,
    untold: bool = False,
    nics: int = 1,
    ecn: int | None = None,
    queues: str = "fifo",
    loss_burst: int | None = None,
) -> str:
    """Return the links of a laboratory in words; ``rates`` are of machines that have another."""
    others = [f"{machine} {shown_rate(rate)}" for machine, rate in (rates or {}).items()]
    if spare_bps is not None:
        others.insert(0, f"spare machines {shown_rate(spare_bps)}")
    text = f"{'unshaped' if bps is None else shown_rate(bps)} links"
    text += " of untold rate" if untold else ""
    text += f" ({', '.join(others)})" if others else ""
    text += f", {nics} to each worker" if nics > 1 else ""
    text += f", MTU {mtu}"
    text += "" if queue is None else f", queues of {shown_size(queue)}"
    text += "" if queues == "fifo" else f", queues as {queues.upper()} asks for them"
    text += "" if burst is None else f", bursts of {shown_size(burst)}"
    text += "" if ecn is None else f", marks from {shown_size(ecn)}"
    text += "" if udp_offload else ", no offload for UDP"
    text += "" if loss is None else f", loss {100 * loss:g} %"
    text += "" if loss_burst is None else f", {loss_burst} packets in a row"
    text += "" if background is None else f", {shown_rate(background)} of others' traffic to w0"
    text += ", TCP from w0 to w1 and back" if bulk else ""
    text += f", {racks} racks" if racks > 1 else ""
    return text + (f", {spares} spare machine{'s' if spares > 1 else ''}" if spares else "")


def shown_size(size: int) -> str:
    """Return the size in the largest decimal unit that it reaches."""
    return _short(size, (" B", " kB", " MB", " GB"))


def shown_time(seconds: float) -> str:
    """Return the time with the unit in which people think of it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.1f} ms"


def _short(value: float, units: tuple[str, ...]) -> str:
    unit = 0
    while value >= 1000 and unit + 1 < len(units):
        value /= 1000
        unit += 1
    return f"{value:.4g}{units[unit]}"
