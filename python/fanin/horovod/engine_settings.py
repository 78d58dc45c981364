"""Horovod's variables for its engine, as its documents have them (docs/knobs in its repository)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FUSION: Final = "HOROVOD_FUSION_THRESHOLD"
CYCLE: Final = "HOROVOD_CYCLE_TIME"
STALL: Final = "HOROVOD_STALL_CHECK_TIME_SECONDS"
NO_STALL: Final = "HOROVOD_STALL_CHECK_DISABLE"
SHUTDOWN: Final = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
VARIABLES: Final = (FUSION, CYCLE, STALL, NO_STALL, SHUTDOWN)


@dataclass(frozen=True)
class EngineSettings:
    """How operations are put together, and how long ranks may be waited for."""

    fused_bytes_max: int = 16 * 1024 * 1024
    """HOROVOD_FUSION_THRESHOLD: tensors that are ready together are fused up to so many bytes. It
    is less than Horovod's, as batches overlap here."""
    cycle: float = 0.001
    """HOROVOD_CYCLE_TIME, in seconds: how long is waited for what can be fused."""
    stall_seconds: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS: then it is said for whom others wait. Infinite: never."""
    shutdown_seconds: float = 0.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: then the job ends. 0: never."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> EngineSettings:
        """Return what the environment says. Raises `ValueError` for what is no such number."""
        stall = _number(environment, STALL, cls.stall_seconds)
        if _number(environment, NO_STALL, 0) > 0:
            stall = float("inf")
        fused = _number(environment, FUSION, cls.fused_bytes_max)
        milliseconds = _number(environment, CYCLE, 1000 * cls.cycle)
        shutdown = _number(environment, SHUTDOWN, cls.shutdown_seconds)
        return cls(int(fused), milliseconds / 1000, stall, shutdown)


def _number(environment: Mapping[str, str], name: str, usual: float) -> float:
    text = environment.get(name, "")
    try:
        number = float(text) if text else usual
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:
        raise ValueError(f"{name} is {text!r}: give a number from 0, or unset it")
    return number
