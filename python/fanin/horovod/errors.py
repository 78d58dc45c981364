"""Errors that elastic training recovers from; their names are Horovod's."""

from __future__ import annotations

from fanin.errors import LaunchIncomplete as LaunchIncomplete


class HorovodInternalError(RuntimeError):
    """A collective failed on all ranks; `__cause__` is fanin's error where somebody is gone.

    `fanin.horovod.elastic.run` restores the last commit and goes on with the ranks that are left.
    """


class Disagreement(HorovodInternalError):  # noqa: N818 - what happened
    """The ranks asked for something impossible; nobody is gone, and all can go on."""


class Apart(HorovodInternalError):  # noqa: N818 - what happened
    """The ranks cannot meet anew, however often they try: `elastic.run` raises it."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The machines of a job changed: no state is lost, and the ranks meet anew."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the machines of the job changed")
        self.skip_sync = skip_sync
