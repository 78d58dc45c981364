"""`fanin reproduce`: the figures of a paper, again, in the simulator."""

from __future__ import annotations

from fanin.errors import FaninError


class ReproduceError(FaninError):
    """A figure cannot be made: something is missing, or a simulation failed."""
