"""What a torch group on fanin can be told beyond what torch itself says."""

from __future__ import annotations

from typing import Unpack

from torch._C import _distributed_c10d as c10d

from fanin._settings import Said, Settings

_PREFIX = "fanin "


class Options(c10d.Backend.Options):
    """The `pg_options` of a group on the backend "fanin"; the same on all its ranks.

        options = fanin.torch.Options(switch="10.0.0.9:4800", wire_dtype="bfloat16")
        torch.distributed.init_process_group("fanin", pg_options=options)

    Takes the settings of `fanin.connect`, and what is not given from the environment (FANIN_SWITCH,
    FANIN_JOB, ...): docs/settings.md lists them. `switch` is the rank's own; a rank without one
    takes that of rank 0. `job` becomes a part of the name that the group has on the switch; without
    it the program's name does. Of other groups they say nothing: `new_group` takes `pg_options` of
    its own, and so does `split_group`, which without them is as the group that it splits. Groups of
    other backends ignore it: torch gives them the options, and they do not look.

    Raises `ValueError` for what is no such setting.
    """

    def __init__(self, *, switch: str | None = None, **settings: Unpack[Said]) -> None:
        self.settings = Settings.of(switch, **settings)
        super().__init__(_name_of(self.settings))


def settings_of(options: c10d.Backend.Options) -> Settings | None:
    """Return what `Options` said, of which this may be a copy; None if they are others."""
    if not options.backend.startswith(_PREFIX):
        return None
    return Settings.decode(options.backend.removeprefix(_PREFIX))


def _name_of(settings: Settings) -> str:
    # `split_group` hands on a C++ copy, which has of a Python object's own fields the name alone.
    return _PREFIX + settings.encode()
