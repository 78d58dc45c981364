"""`fanin run`: torchrun, with a switch in the launcher unless one is named.

The parser is torchrun's own, so every flag means what it means there.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from fanin import _fanin
from fanin._settings import (
    AS_VARIABLE,
    Settings,
    add_flags,
    as_backend,
    exported,
    variable,
)
from fanin.errors import FaninError

DESCRIPTION = """\
Starts the ranks of a training program, as torchrun does, with a switch that sums their gradients.
The program says init_process_group("fanin"), or "gloo" and is run with --as gloo. All flags of
torchrun are accepted."""

EXAMPLES = """\
examples:
  one machine, four ranks, a switch inside the launcher:
    fanin run --nproc-per-node 4 train.py --epochs 3
  two machines and a switch on a third (there: fanin switch --listen 0.0.0.0:4800):
    fanin run --switch 10.0.0.9:4800 --nnodes 2 --nproc-per-node 8 \\
        --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 train.py
  a program that has "gloo" written in it, unchanged:
    fanin run --as gloo --nproc-per-node 4 train.py
  as horovodrun is called, on this machine:
    fanin run -np 4 python train.py
"""


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our group of arguments."""
    from torch.distributed.run import get_args_parser

    made: argparse.ArgumentParser = get_args_parser()
    made.prog = "fanin run"
    made.description = DESCRIPTION
    made.epilog = EXAMPLES
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = made.add_argument_group(
        "fanin",
        "Settings of the ranks (docs/settings.md). Without --switch the launcher starts a switch, "
        "which serves this machine only; with --protocol atp or goat its server, too.",
    )
    add_flags(ours)
    ours.add_argument(
        "--heartbeat-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=None,
        help="seconds that a rank's machine may not answer before the rank is taken for dead "
        "(default: 5), for the switch of this launcher; a process that ends is noticed at once",
    )
    ours.add_argument(
        "--as",
        dest="stands_in",
        metavar="BACKEND",
        default=None,
        help=f'"gloo": a program that asks for gloo gets fanin (default: ${AS_VARIABLE}, else it '
        "gets what it asks for)",
    )
    ours.add_argument(
        "-np",
        dest="ranks",
        type=int,
        metavar="N",
        help="ranks on this machine, as horovodrun has it: what follows is a command, with its "
        '"python", or a script',
    )
    ours.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:SLOTS,...",
        help="with -np: where, as horovodrun has it; this machine alone, by any of its names",
    )
    return made


def run(argv: list[str]) -> int:
    """Run the ranks to their end. Returns the exit status."""
    try:
        as_backend()  # before the parser, which imports torch
    except ValueError as error:
        print(f"fanin run: {error}", file=sys.stderr)
        return 2
    parsed = parser()
    args = parsed.parse_args(argv)
    try:
        _as_horovodrun(args)
        settings = Settings.of_flags(args)
        stands_in = as_backend(args.stands_in)
    except ValueError as error:
        parsed.error(str(error))
    os.environ.update(exported(args))  # the ranks inherit it
    if stands_in:
        os.environ[AS_VARIABLE] = stands_in
    if stands_in and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        parsed.error(
            f"--as {stands_in} works through torch's automatic loading of backends, which "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches off: unset it"
        )
    named = settings.switch
    if not named and _nodes_max(parsed, args.nnodes) > 1:
        # Else the ranks say it; there will be none.
        _fanin.warn_of_unknown_variables()
        parsed.error(
            "with more than one node the ranks need a switch that all of them can reach: start one "
            "with `fanin switch --listen 0.0.0.0:4800`, and pass --switch ADDR:PORT on every node"
        )
    if named and args.heartbeat_timeout is not None:
        parsed.error(
            "--heartbeat-timeout is the switch's, and a switch is named: start that one with it "
            "(fanin switch --heartbeat-timeout SECONDS)"
        )
    if named:
        return _launch(args)

    try:
        switch = _fanin.Switch(protocol=settings.protocol, heartbeat_timeout=args.heartbeat_timeout)
    except (OSError, FaninError) as error:
        print(f"fanin run: {error}", file=sys.stderr)
        return 1
    try:
        print(
            f"fanin run: the switch is at {switch.address} "
            f"(fanin status --switch {switch.address})",
            file=sys.stderr,
        )
        os.environ[variable("switch")] = switch.address
        return _launch(args)
    finally:
        switch.stop()


def _as_horovodrun(args: argparse.Namespace) -> None:
    """Make of -np and -H what torchrun knows; raises `ValueError` for what cannot be."""
    if args.ranks is None:
        if args.hosts is not None:
            raise ValueError("-H is for -np: say how many ranks")
        return
    slots = _slots(args.hosts) if args.hosts is not None else args.ranks
    if not 0 < args.ranks <= slots:
        raise ValueError(f"-np is {args.ranks}, and must be from 1 to the {max(slots, 1)} slots")
    args.nproc_per_node = str(args.ranks)
    args.no_python |= not args.module and not args.training_script.endswith(".py")


def _slots(hosts: str) -> int:
    """Return how many slots this machine has by horovodrun's list of hosts."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    slots = 0
    for host in hosts.split(","):
        name, _, count = host.rpartition(":") if ":" in host else (host, "", "1")
        if not count.isdecimal():
            raise ValueError(f"-H has {host!r}: HOST:SLOTS, with commas between")
        if name not in here:
            raise ValueError(
                f"-H has {name!r}, which is not this machine: start the ranks of each machine "
                "there, with `fanin run --nnodes ... --rdzv-endpoint ...`"
            )
        slots += int(count)
    return slots


def _seconds(text: str) -> float:
    # As `fanin switch` takes them.
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _nodes_max(parsed: argparse.ArgumentParser, nnodes: str) -> int:
    """Parse torchrun's `--nnodes`, which is "N" or "MIN:MAX"."""
    try:
        return int(nnodes.rpartition(":")[2])
    except ValueError:
        parsed.error(f"--nnodes is {nnodes!r}: a number, or MIN:MAX")


def _launch(args: argparse.Namespace) -> int:
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    try:
        record(torchrun.run)(args)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)  # which rank failed first, how, and where its traceback is
        return 1
    except SignalException as stopped:
        # torchrun has ended the ranks; the status is the shell's convention.
        print(f"fanin run: stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 130  # before torchrun had started anything
    return 0
