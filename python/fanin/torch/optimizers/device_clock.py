"""When a gradient is there, in seconds of the host's clock, also where a device makes it.

The host runs ahead of a device: a hook runs when the work that makes its gradient is queued. So the
device notes the moment when it gets there, which is read later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

# A time of the host's clock, or what a device notes.
Moment = Any


def now(device: torch.device) -> Moment:
    """Return the moment when a device has done what its current stream was given so far."""
    if device.type == "cpu":
        return time.monotonic()
    noted = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    noted.record(torch.cuda.current_stream(device))
    return noted


def seconds(moments: Sequence[tuple[torch.device, Moment]]) -> list[float]:
    """Return moments by the host's clock. Waits until the devices have got there."""
    starts: dict[torch.device, tuple[Moment, float]] = {}
    found = []
    for device, moment in moments:
        if device.type == "cpu":
            found.append(moment)
            continue
        moment.synchronize()
        if device not in starts:
            reached = now(device)
            reached.synchronize()
            starts[device] = reached, time.monotonic()
        reached, host = starts[device]
        found.append(host - moment.elapsed_time(reached) / 1000)
    return found
