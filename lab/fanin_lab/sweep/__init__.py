"""`fanin sim --sweep`: a scenario with many values and seeds; `fanin reproduce` runs by it, too."""

from __future__ import annotations

from fanin.errors import FaninError


class SweepError(FaninError):
    """A sweep cannot be played: a parameter is none, or where it shall run nobody answers."""
