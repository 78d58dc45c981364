"""The console script `fanin`: what needs Python or starts it is here, everything else in Rust."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    argv = sys.argv[1:] if arguments is None else arguments
    match argv[:1]:
        case ["run"]:
            from fanin.launch import run

            return run(argv[1:])
        case ["bench"]:
            from fanin import bench

            return bench.main(argv[1:])
        case ["netlab"]:
            from fanin.netlab.command import main as netlab

            return netlab(argv[1:])
        case ["reproduce"]:
            from fanin.reproduce.command import main as reproduce

            return reproduce(argv[1:])
    from fanin import _fanin

    return _fanin.main(argv)
