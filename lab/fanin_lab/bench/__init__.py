"""`fanin bench`: fanin beside Gloo or Open MPI, in one run, on shaped links or on loopback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from fanin._cures import nearest
from fanin.errors import FaninError

USAGE = """\
usage: fanin bench COLLECTIVE [options]

Measures fanin beside Gloo or Open MPI.
COLLECTIVE is allreduce, reduce, broadcast, reducescatter or allgather.
See: fanin bench allreduce --help

       fanin bench compression [options]

Shows what sending gradients in fewer bytes makes of them, and what it saves.
See: fanin bench compression --help
"""

COLLECTIVES: Final[Mapping[str, str]] = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
}
"""The names of the commands, and of torch's functions."""

DTYPES: Final[Mapping[str, tuple[int, float]]] = {
    "float32": (4, 2.0**-23),
    "float16": (2, 2.0**-10),
    "bfloat16": (2, 2.0**-7),
    "int32": (4, 0.0),
}
"""The dtypes to measure, by torch's name: bytes, and how far the next number is from 1."""


class BenchError(FaninError):
    """The benchmark cannot go on: something is missing, a rank failed, or a sum is wrong."""


def main(argv: list[str]) -> int:
    """Run `fanin bench ARGV` and return its exit status."""
    if argv and argv[0] in COLLECTIVES:
        from fanin_lab.bench.command import main as command

        return command(argv[0], argv[1:])
    if argv[:1] == ["compression"]:
        from fanin_lab.bench.compression.command import main as compression

        return compression(argv[1:])
    if argv and not argv[0].startswith("-"):
        names = [*COLLECTIVES, "compression"]
        print(
            f"fanin bench: there is no {argv[0]}{nearest(argv[0], names)} ({', '.join(names)})",
            file=sys.stderr,
        )
        return 2
    asked = argv[:1] in (["--help"], ["-h"])
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
