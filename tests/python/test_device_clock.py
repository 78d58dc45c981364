"""A device's moments by the host's clock, with a stand-in for CUDA's events and streams."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fanin.torch.optimizers import device_clock

CPU, ONE, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


class Device:
    """It has a clock of its own, and does what it was given once somebody waits for it."""

    def __init__(self, began: float) -> None:
        self.clock_ms = began
        self.queue: list[Event | float] = []

    def compute(self, seconds: float) -> None:
        """Queue a kernel: the host goes on."""
        self.queue.append(seconds)

    def reach(self, event: Event) -> None:
        while event.at_ms is None:
            given = self.queue.pop(0)
            if isinstance(given, Event):
                given.at_ms = self.clock_ms
            else:
                self.clock_ms += 1000 * given
                host.time += given


class Event:
    """Of one device; torch's without `enable_timing` tell no times."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        assert enable_timing
        self.device: Device | None = None
        self.at_ms: float | None = None

    def record(self, stream: Device) -> None:
        self.device = stream
        stream.queue.append(self)

    def synchronize(self) -> None:
        assert self.device is not None
        self.device.reach(self)

    def elapsed_time(self, later: Event) -> float:
        assert later.device is self.device, "torch refuses events of two devices"
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


class Host:
    time = 1000.0

    def monotonic(self) -> float:
        return self.time


host = Host()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Device]:
    found = {ONE: Device(5.0), OTHER: Device(777.0)}
    host.time = 1000.0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", found.__getitem__)
    monkeypatch.setattr(time, "monotonic", host.monotonic)
    return found


def noted(*devices: torch.device) -> list[tuple[torch.device, Any]]:
    return [(device, device_clock.now(device)) for device in devices]


def test_a_moment_is_when_the_device_gets_there_and_not_when_the_host_asked(
    devices: dict[torch.device, Device],
) -> None:
    moments = noted(CPU)
    for seconds in (2.0, 3.0):
        devices[ONE].compute(seconds)
        moments += noted(ONE)
    devices[ONE].compute(4.0)
    host.time += 0.25  # the backward pass of the host is over, and the device has done nothing
    moments += noted(CPU)
    found = device_clock.seconds(moments)
    # The device begins when the host waits for it, in this stand-in.
    assert found == pytest.approx([1000.0, 1002.25, 1005.25, 1000.25])


def test_each_device_has_a_clock_of_its_own(devices: dict[torch.device, Device]) -> None:
    devices[ONE].compute(2.0)
    devices[OTHER].compute(7.0)
    moments = noted(ONE, OTHER)
    devices[OTHER].compute(1.0)
    moments += noted(OTHER)
    assert device_clock.seconds(moments) == pytest.approx([1002.0, 1009.0, 1010.0])
