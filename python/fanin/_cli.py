"""The console script `fanin`: `run` here, because it is torchrun; everything else in Rust."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    argv = sys.argv[1:] if arguments is None else arguments
    if argv and argv[0] == "run":
        from fanin.launch import run

        return run(argv[1:])
    from fanin import _fanin

    return _fanin.main(argv)
