"""The words between a benchmark and its ranks; without torch, which only the ranks need."""

from __future__ import annotations

from dataclasses import dataclass

from fanin._settings import Settings

BOUNDED = "bounded"
"""fanin with a loss bound, beside fanin without one."""

ALONE = "alone"
"""fanin without the TCP flow, beside fanin with it."""

OPENMPI = "openmpi"
"""Open MPI, whose ranks are processes of their own."""

OVER_TCP = ("gloo", OPENMPI)
"""The peers that may take turns with fanin; the kernel counts what they send again."""

TCP = "tcp"
"""Background traffic that is a bulk transfer."""


@dataclass(frozen=True)
class Place:
    """A rank's place, and the ranks that it runs with."""

    rank: int
    world_size: int
    namespace: str | None
    """None: this machine's own network, over loopback."""
    interface: str
    rendezvous: str
    """A file through which the ranks find each other: it needs no network, and loses nothing."""
    switch: str | None
    """None: there are the ranks' own services alone."""
    rate_bps: int | None
    """The rate of this machine's link: a virtual one does not say it. None: unshaped, or untold."""
    timeout_s: float
    backends: tuple[str, ...]
    settings: Settings
    """How fanin sums."""


@dataclass(frozen=True)
class Sum:
    """A sum of a training's step."""

    elements: int
    ready_s: float
    """When it is asked for, from the step's beginning."""


@dataclass(frozen=True)
class Round:
    """The next round of all ranks."""

    backend: str
    dtype: str
    elements: int
    """The elements of each tensor."""
    buckets: int
    """Tensors in flight at once."""
    calls: int
    """How often, one after the other, on other tensors each time."""
    collective: str = "all_reduce"
    """By torch's name. The root is rank 0."""
    step: tuple[Sum, ...] = ()
    """In place of equal tensors: those of a training's step."""


@dataclass(frozen=True)
class Timing:
    """A round, as a rank saw it. Times are the machine's monotonic clock, in seconds."""

    began: float
    ended: float
    cpu_s: float
    retransmissions: int
    contributions: int = 0
    """The contributions that belong in the sums of a job with a loss bound."""
    lost: int = 0
    """The contributions that are not in them."""


@dataclass(frozen=True)
class Verdict:
    """A check of a rank's sums."""

    digest: str
    error_max: float
    """Largest absolute difference from the exact sum."""


@dataclass(frozen=True)
class Failed:
    """A rank's last words."""

    text: str
