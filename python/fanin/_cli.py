"""The console script `fanin`: what needs Python or starts it is here, everything else in Rust."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

# The commands in Python: where each is, and the extra of the package that it needs. The laboratory
# (fanin_lab) is a distribution of its own.
_COMMANDS = {
    "run": ("fanin.launch", "run", "torch"),
    "bench": ("fanin_lab.bench", "main", "lab"),
    "netlab": ("fanin_lab.netlab.command", "main", "lab"),
    "profile": ("fanin_lab.profiler", "main", "lab"),
    "reproduce": ("fanin_lab.papers.command", "main", "lab"),
    "sim": ("fanin_lab.sweep.command", "main", "lab"),
}
# `fanin sim` runs many times with one of these; without, and for its help, it is Rust's.
_MANY = ("--sweep", "--seeds", "--jobs", "--out", "--ray")
# The packages that an extra brings. Any other package that is missing is a fault.
_TORCH = ("torch", "numpy")
_BROUGHT = {
    "torch": _TORCH,
    "lab": (*_TORCH, "fanin_lab", "matplotlib", "rich"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    argv = sys.argv[1:] if arguments is None else arguments
    name = argv[0] if argv else ""
    if name in _COMMANDS and (name != "sim" or _asks_for_many(argv)):
        module, function, extra = _COMMANDS[name]
        try:
            run = cast(Callable[[list[str]], int], getattr(import_module(module), function))
            return run(argv[1:])
        except ModuleNotFoundError as missing:
            if not f"{missing.name}.".startswith(tuple(f"{each}." for each in _BROUGHT[extra])):
                raise
            from fanin._cures import to_install

            print(
                f"fanin {name}: {missing.name} is not installed; install it with: "
                f"{to_install(str(missing.name))}",
                file=sys.stderr,
            )
            return 1
    if name == "doctor":
        from fanin import _kept_rates
        from fanin._settings import for_doctor

        if "--measure" in argv and not {"-h", "--help"} & set(argv):
            # The doctor measures one machine's way, which is no link's rate.
            _kept_rates.forget()
        argv = ["doctor", *for_doctor(argv[1:])]
    from fanin import _fanin

    return _fanin.main(argv)


def _asks_for_many(argv: list[str]) -> bool:
    if {"-h", "--help"} & set(argv):
        return False
    return any(argument.partition("=")[0] in _MANY for argument in argv)
