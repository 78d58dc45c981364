"""`fanin profile`: how much loss of gradients a training script forgives (DLCP §2.3).

A script is trained again and again, each time with packets of gradients lost in another way:
`drops` says which, `trial` runs the script once, `tolerance` compares, `command` is the command.
The script says what it learned by `fanin.profile.report`, which training programs keep.
"""

from __future__ import annotations

import sys

from fanin.errors import FaninError

USAGE = """\
usage: fanin profile loss-tolerance [options] SCRIPT ...

Trains a script with gradients lost, and finds how much it forgives.
See: fanin profile loss-tolerance --help
"""


class ProfileError(FaninError):
    """The profile cannot be made: the script failed, or says too little."""


def main(argv: list[str]) -> int:
    """Run `fanin profile ARGV` and return its exit status."""
    if argv[:1] == ["loss-tolerance"]:
        from fanin_lab.profiler.command import main as command

        return command(argv[1:])
    asked = argv[:1] in (["--help"], ["-h"])
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
