"""What is taken from the environment where no argument says it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from fanin.errors import SwitchUnreachable

SWITCH_VARIABLE = "FANIN_SWITCH"
SLOTS_VARIABLE = "FANIN_SLOTS"
SLOTS_MAX = 16384
TRACE_VARIABLE = "FANIN_TRACE"
# torchrun's: unlike the rank in a job, it is another one in every process of a run.
RANK_VARIABLE = "RANK"
WIRE_DTYPE_VARIABLE = "FANIN_WIRE_DTYPE"

PROTOCOL_VARIABLE = "FANIN_PROTOCOL"
CONGESTION_CONTROL_VARIABLE = "FANIN_CONGESTION_CONTROL"
AS_VARIABLE = "FANIN_AS"

WireDtype: TypeAlias = Literal["int32", "bfloat16"]
Protocol: TypeAlias = Literal["switchml", "atp"]


def switch_address(explicit: str | None = None) -> str:
    """Return the switch's "host:port".

    Raises `SwitchUnreachable` when neither the argument nor the environment gives one.
    """
    address = explicit or os.environ.get(SWITCH_VARIABLE)
    if not address:
        raise SwitchUnreachable(
            "no switch was named: start the program with `fanin run --nproc-per-node N ...` (which "
            f"embeds one), or start one with `fanin switch` and set {SWITCH_VARIABLE}=host:port on "
            "every rank"
        )
    return address


def pool_slots(explicit: int | None = None) -> int | None:
    """Return the slots a shard that the job asks for; None lets the switch choose them.

    Raises `ValueError` when the argument or FANIN_SLOTS is not a number of slots.
    """
    text = os.environ.get(SLOTS_VARIABLE) if explicit is None else str(explicit)
    if not text:
        return None
    if not (text.isdecimal() and 1 <= int(text) <= SLOTS_MAX):
        name = SLOTS_VARIABLE if explicit is None else "slots"
        raise ValueError(f"{name} is {text!r}: it must be a number from 1 to {SLOTS_MAX}")
    return int(text)


def trace(rank: int) -> tuple[str, int] | None:
    """Return the file of this process's timeline, and the rank that it has there; None without.

    FANIN_TRACE=DIR/NAME.json asks for one a rank: DIR/NAME.0.json and so on. The rank is torchrun's
    (RANK), so that the processes of a run never share a file; without it, `rank`, that of the job.

    Raises `ValueError` when FANIN_TRACE names no file.
    """
    text = os.environ.get(TRACE_VARIABLE)
    if not text:
        return None
    launched = os.environ.get(RANK_VARIABLE, "")
    number = int(launched) if launched.isdecimal() else rank
    path = Path(text).absolute()
    if text.endswith("/") or not path.name or path.is_dir():
        raise ValueError(f"{TRACE_VARIABLE} is {text!r}: it must name a file, such as trace.json")
    return str(path.with_name(f"{path.stem}.{number}{path.suffix}")), number


def wire_dtype(explicit: str | None = None) -> WireDtype:
    """Return how the job's floats travel: as "int32" unless somebody says otherwise.

    Raises `ValueError` when the argument or FANIN_WIRE_DTYPE is no wire dtype.
    """
    text = os.environ.get(WIRE_DTYPE_VARIABLE) or "int32" if explicit is None else explicit
    if text == "int32":
        return "int32"
    if text == "bfloat16":
        return "bfloat16"
    name = WIRE_DTYPE_VARIABLE if explicit is None else "wire_dtype"
    raise ValueError(f'{name} is {text!r}: it must be "int32" or "bfloat16"')


def protocol(explicit: str | None = None) -> Protocol:
    """Return how the job's gradients are summed: by "switchml" unless somebody says otherwise.

    Raises `ValueError` when the argument or FANIN_PROTOCOL is no protocol.
    """
    text = os.environ.get(PROTOCOL_VARIABLE) or "switchml" if explicit is None else explicit
    if text == "switchml":
        return "switchml"
    if text == "atp":
        return "atp"
    name = PROTOCOL_VARIABLE if explicit is None else "protocol"
    raise ValueError(f'{name} is {text!r}: it must be "switchml" or "atp"')


def congestion_control() -> bool:
    """Return whether ATP's window shrinks when packets are lost: yes unless somebody says 0.

    Raises `ValueError` when FANIN_CONGESTION_CONTROL is neither 0 nor 1.
    """
    text = os.environ.get(CONGESTION_CONTROL_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{CONGESTION_CONTROL_VARIABLE} is {text!r}: it must be 0 or 1")
    return text == "1"


def as_backend(explicit: str | None = None) -> Literal["gloo"] | None:
    """Return the backend of torch whose groups fanin makes in its place; None for no backend.

    Raises `ValueError` when the argument or FANIN_AS is a backend that fanin cannot stand in for.
    """
    text = os.environ.get(AS_VARIABLE) or None if explicit is None else explicit
    if text is None:
        return None
    if text == "gloo":
        return "gloo"
    name = AS_VARIABLE if explicit is None else "--as"
    raise ValueError(
        f'{name} is {text!r}: only "gloo" is possible, as fanin does all that Gloo does; a program '
        'that asks for another backend can ask for "fanin" itself'
    )
