"""What a torch group on fanin can be told beyond what torch itself says."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d

from fanin._environment import Protocol, WireDtype
from fanin._environment import protocol as resolved_protocol
from fanin._environment import wire_dtype as resolved_wire_dtype

_PREFIX = "fanin, floats as "
_INFIX = ", summed by "


class Options(c10d.Backend.Options):
    """The `pg_options` of a group on the backend "fanin"; the same on all its ranks.

        options = fanin.torch.Options(wire_dtype="bfloat16")
        torch.distributed.init_process_group("fanin", pg_options=options)

    `wire_dtype` says how the elements of float tensors travel: "int32", or "bfloat16" in half the
    bytes, rounded to eight significant bits (`fanin.connect` states the error). Without it
    FANIN_WIRE_DTYPE is taken, else "int32". `protocol` says how they are summed: "switchml", or
    "atp" on the way to a server; without it FANIN_PROTOCOL is taken, else "switchml". Of other
    groups it says nothing: `new_group` takes `pg_options` of its own, and so does `split_group`,
    which without them is as the group that it splits. Groups of other backends ignore it: torch
    gives them the options, and they do not look.

    Raises `ValueError` for another wire dtype or protocol.
    """

    def __init__(
        self, *, wire_dtype: WireDtype | None = None, protocol: Protocol | None = None
    ) -> None:
        self.wire_dtype: WireDtype = resolved_wire_dtype(wire_dtype)
        self.protocol: Protocol = resolved_protocol(protocol)
        # `split_group` hands on a C++ copy, which has of a Python object's own fields this one.
        super().__init__(f"{_PREFIX}{self.wire_dtype}{_INFIX}{self.protocol}")


def said_by(options: c10d.Backend.Options) -> tuple[WireDtype, Protocol] | None:
    """Return what `Options` said, of which this may be a copy; None if they are others."""
    if not options.backend.startswith(_PREFIX):
        return None
    wire_dtype, _, protocol = options.backend.removeprefix(_PREFIX).partition(_INFIX)
    return resolved_wire_dtype(wire_dtype), resolved_protocol(protocol)
