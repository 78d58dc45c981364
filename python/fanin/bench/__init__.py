"""`fanin bench`: fanin beside Gloo, in one run, on shaped links or on loopback."""

from __future__ import annotations

import sys

from fanin.errors import FaninError

USAGE = """\
usage: fanin bench allreduce [options]

Measures fanin beside Gloo. See: fanin bench allreduce --help
"""


class BenchError(FaninError):
    """The benchmark cannot go on: something is missing, a rank failed, or a sum is wrong."""


def main(argv: list[str]) -> int:
    """Run `fanin bench ARGV` and return its exit status."""
    if argv[:1] == ["allreduce"]:
        from fanin.bench.command import main as allreduce

        return allreduce(argv[1:])
    asked = argv[:1] in (["--help"], ["-h"])
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
