"""`fanin run`: torchrun, with a switch in the launcher where a protocol needs one.

The parser is torchrun's own, so every flag means what it means there.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from fanin import _elastic, _fanin
from fanin._cures import nearest
from fanin._hosts import Host, hosts, of_file, taken
from fanin._hosts import run as run_on
from fanin._settings import (
    AS_VARIABLE,
    Settings,
    add_flags,
    as_backend,
    exported,
    variable,
)
from fanin.errors import FaninError

USAGE = "fanin run [flags of torchrun, and those of fanin] program.py [its arguments]"

DESCRIPTION = """\
Starts the ranks of a training program, as torchrun does. The program says
init_process_group("fanin"), or "gloo" and is run with --as gloo. All flags of torchrun are
accepted. Ranks of one machine sum in shared memory, those of several by services of their own; a
switch is started for what needs one (--protocol atp or goat, --plan switch)."""

EXAMPLES = """\
examples:
  one machine, four ranks that sum in shared memory:
    fanin run --nproc-per-node 4 train.py --epochs 3
  one machine, a switch inside the launcher:
    fanin run --plan switch --nproc-per-node 4 train.py
  two machines and a switch on a third (there: fanin switch --listen 0.0.0.0:4800):
    fanin run --switch 10.0.0.9:4800 --nnodes 2 --nproc-per-node 8 \\
        --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 train.py
  a program that has "gloo" written in it, unchanged:
    fanin run --as gloo --nproc-per-node 4 train.py
  as horovodrun is called, on this machine and over ssh on several; c is a machine that only sums:
    fanin run -np 4 python train.py
    fanin run -np 4 -H a:2,b:2,c:0 python train.py
  ranks that die end nobody else, and new ones join:
    fanin run -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py
"""

HOW = ("-m", "--module", "--no-python", "--no_python")
"""torchrun's flags that say how a program is started."""
NAMING = (
    "sh",
    "-c",
    "export HOROVOD_RANK=$RANK HOROVOD_SIZE=$WORLD_SIZE "
    "HOROVOD_LOCAL_RANK=$LOCAL_RANK HOROVOD_LOCAL_SIZE=$LOCAL_WORLD_SIZE "
    'HOROVOD_CROSS_RANK=$GROUP_RANK HOROVOD_CROSS_SIZE=$GROUP_WORLD_SIZE; exec "$0" "$@"',
)
"""Starts a command with the variables that horovodrun sets, of those that torchrun has set."""


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our group of arguments."""
    from torch.distributed.run import get_args_parser

    made: argparse.ArgumentParser = get_args_parser()
    _add_ours(made)
    made.prog = "fanin run"
    made.usage = USAGE  # that of all flags would hide what is wrong with one
    made.description = DESCRIPTION
    made.epilog = EXAMPLES
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    return made


def _add_ours(made: argparse.ArgumentParser) -> None:
    ours = made.add_argument_group(
        "fanin",
        "Settings of the ranks (docs/settings.md). A switch that the launcher starts serves this "
        "machine only; with --protocol atp or goat its server is there, too.",
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
        help="ranks on this machine, or on those of -H, as horovodrun has it: what follows is a "
        'command, with its "python", or a script',
    )
    ours.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:SLOTS,...",
        help="with -np: on which machines, as horovodrun has it; on others over ssh, which "
        "must log in without a password, and find the same program and Python at the same paths; "
        "with 0 slots a machine has a `fanin switch` and no ranks",
    )
    ours.add_argument(
        "--hostfile",
        metavar="FILE",
        help='in place of -H: a line for each machine, "HOST slots=SLOTS", as horovodrun and '
        "mpirun have it",
    )
    _add_elastic(made)


def _add_elastic(made: argparse.ArgumentParser) -> None:
    elastic = made.add_argument_group(
        "elastic",
        "With any of these and -np, a rank that dies ends nobody else, and ranks may come. The "
        "program is one of fanin.horovod.elastic (docs/horovod.md). Flags are horovodrun's.",
    )
    for flag, meaning in (
        ("--min-np", "the fewest ranks that train (default: that of -np)"),
        ("--max-np", "the most ranks (default: that of -np)"),
        ("--reset-limit", "how often ranks may meet anew (default: without a limit)"),
    ):
        elastic.add_argument(flag, type=int, metavar="N", help=meaning)
    elastic.add_argument(
        "--elastic-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=600.0,
        help="how long there may be fewer than --min-np ranks, and how long a rank may take to "
        "meet the others after a failure (default: 600)",
    )
    elastic.add_argument(
        "--host-discovery-script",
        metavar="SCRIPT",
        help="a program that names the machines that there are now, a line each: HOST:SLOTS, or "
        "HOST; it runs every second",
    )
    elastic.add_argument(
        "--slots-per-host",
        type=int,
        metavar="N",
        default=1,
        help="the slots of a HOST that the script names without (default: 1)",
    )


def _unknown(argv: Sequence[str]) -> str | None:
    """Return what is wrong with the first flag that there is not; None where torchrun may look.

    Torch takes seconds to import, so nothing here imports it.
    """
    known = _of_torchrun()
    if known is None:
        return None
    ours = argparse.ArgumentParser()
    _add_ours(ours)
    known |= {flag: action.nargs != 0 for flag, action in ours._option_string_actions.items()}
    words = iter(argv)
    for word in words:
        flag, has_value, _ = word.partition("=")
        if not flag.startswith("-") or word == "--":
            return None  # the program, whose flags are its own
        # A long flag may be shortened, and a short one have its value behind it.
        long = [name for name in known if flag.startswith("--") and name.startswith(flag)]
        short = [name for name in known if not name.startswith("--") and flag.startswith(name)]
        meant = flag if flag in known else next(iter(long or short), None)
        if meant is None:
            return f"there is no {flag}{nearest(flag, known)} (fanin run --help lists all)"
        if known[meant] and not has_value and (flag in known or long):
            next(words, None)
    return None


def _of_torchrun() -> dict[str, bool] | None:
    """Return torchrun's flags, and whether each takes a value; None without its source."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        source = (Path(torch.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = {}
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".add_argument"):
            continue
        actions = [each.value for each in call.keywords if each.arg == "action"]
        takes = not any(ast.unparse(each) in ("check_env", "'store_true'") for each in actions)
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        found.update({str(name): takes for name in names if str(name).startswith("-")})
    return found


def _missing(args: argparse.Namespace) -> str | None:
    """Return what is not there of what is to be run."""
    program: str = args.training_script
    if args.module:
        # Python looks here first, too.
        here = [os.getcwd(), *sys.path]
        is_there = PathFinder.find_spec(program.partition(".")[0], here) is not None
        return None if is_there else f"there is no module {program}"
    if not args.no_python:
        return None if Path(program).exists() else f"there is no {program}"
    if shutil.which(program) is None:
        return f"there is no command {program}"
    first = next(iter(args.training_script_args), "")
    is_script = Path(program).name.startswith("python") and first.endswith(".py")
    return f"there is no {first}" if is_script and not Path(first).exists() else None


def run(argv: list[str]) -> int:
    """Run the ranks to their end. Returns the exit status."""
    try:
        as_backend()  # before the parser, which imports torch
    except ValueError as error:
        print(f"fanin run: {error}", file=sys.stderr)
        return 2
    if (wrong := _unknown(argv)) is not None:
        print(f"fanin run: {wrong}", file=sys.stderr)
        return 2
    parsed = parser()
    args = parsed.parse_args(argv)
    try:
        args.hosts = _hosts_flag(args)
        elastic = _elastic_limits(args)
        machines = _as_horovodrun(args, elastic)
        settings = Settings.of_flags(args)
        spares = _spares(args, machines, settings, elastic)
        stands_in = as_backend(args.stands_in)
    except ValueError as error:
        parsed.error(str(error))
    if stands_in and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        parsed.error(
            f"--as {stands_in} works through torch's automatic loading of backends, which "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches off: unset it"
        )
    named = settings.switch
    of_several = bool(machines) or _nodes_max(parsed, args.nnodes) > 1
    # Else ranks of one machine sum in its memory, and machines by services of their own.
    needs_switch = settings.protocol != "switchml" or settings.plan == "switch"
    if of_several and not named and not spares and needs_switch:
        # Else the ranks say it; there will be none.
        _fanin.warn_of_unknown_variables()
        parsed.error(
            "with more than one node the ranks need a switch that all of them can reach: start one "
            "with `fanin switch --listen 0.0.0.0:4800`, and pass --switch ADDR:PORT on every node"
        )
    starts_switch = needs_switch and not named and not of_several
    if args.heartbeat_timeout is not None and not starts_switch:
        parsed.error(
            "--heartbeat-timeout is for the switch of this launcher, and it has none here: start "
            "one with it (fanin switch --heartbeat-timeout SECONDS), and pass --switch; or, on one "
            "machine, pass --plan switch"
        )
    if not machines and (absent := _missing(args)) is not None:
        parsed.error(absent)
    os.environ.update(exported(args))  # the ranks inherit it
    if stands_in:
        os.environ[AS_VARIABLE] = stands_in
    if elastic is not None:
        launched = partial(_launch_elastic, args, elastic, of_several)
    elif machines:
        arguments = _without_hosts(argv, args)
        return run_on(machines, arguments, _ranks_end_s(args), spares, settings.protocol)
    else:
        launched = partial(_launch, args)
    if not starts_switch:
        return launched()

    try:
        switch = _fanin.Switch(
            protocol=settings.protocol,
            heartbeat_timeout=args.heartbeat_timeout,
            secret_file=settings.secret_file,
        )
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
        # Nobody vouches for a switch of the launcher's own.
        os.environ.pop(variable("tls_ca"), None)
        return launched()
    finally:
        switch.stop()


def _hosts_flag(args: argparse.Namespace) -> str | None:
    """Return what -H says, or what --hostfile says in its place; raises `ValueError`."""
    if args.hostfile is None:
        return cast("str | None", args.hosts)
    if args.hosts is not None:
        raise ValueError("--hostfile says what -H says: leave one of them out")
    try:
        return of_file(Path(args.hostfile).read_text(encoding="utf-8"), args.hostfile)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--hostfile {args.hostfile} cannot be read: {error}") from error


def _elastic_limits(args: argparse.Namespace) -> _elastic.Limits | None:
    """Return how many ranks an elastic job has; None for any other job.

    Raises `ValueError` for what cannot be.
    """
    flags = {
        "--min-np": args.min_np,
        "--max-np": args.max_np,
        "--host-discovery-script": args.host_discovery_script,
    }
    asked = [flag for flag, value in flags.items() if value is not None]
    if not asked:
        if args.reset_limit is not None:
            raise ValueError("--reset-limit is for elastic jobs: give --min-np or --max-np, too")
        return None
    if args.ranks is None:
        raise ValueError(f"{asked[0]} is for -np: say how many ranks")
    if args.host_discovery_script is not None and args.hosts is not None:
        raise ValueError("--host-discovery-script says what -H says: leave one of them out")
    least = args.ranks if args.min_np is None else args.min_np
    most = args.ranks if args.max_np is None else args.max_np
    if not 0 < least <= args.ranks <= most:
        raise ValueError(
            f"--min-np is {least}, -np {args.ranks} and --max-np {most}: they must be in this "
            "order, and 1 at least"
        )
    if args.reset_limit is not None and args.reset_limit < 0:
        raise ValueError(f"--reset-limit is {args.reset_limit}: 0 at least")
    if args.slots_per_host < 1:
        raise ValueError(f"--slots-per-host is {args.slots_per_host}: 1 at least")
    return _elastic.Limits(least, most, args.elastic_timeout, args.reset_limit)


def _as_horovodrun(args: argparse.Namespace, elastic: _elastic.Limits | None) -> list[Host]:
    """Make of -np what torchrun knows, or return the machines of -H if some is another one.

    Raises `ValueError` for what cannot be.
    """
    if args.ranks is None:
        if args.hosts is not None:
            raise ValueError("-H is for -np: say how many ranks")
        return []
    args.no_python |= not args.module and not args.training_script.endswith(".py")
    if args.host_discovery_script is not None:
        return [Host(args.host_discovery_script, args.ranks)]  # it may name any machine
    most = args.ranks if elastic is None else elastic.ranks_max
    named = hosts(args.hosts) if args.hosts is not None else [Host("localhost", most)]
    slots = sum(host.slots for host in named)
    if not 0 < args.ranks <= slots:
        raise ValueError(f"-np is {args.ranks}, and must be from 1 to the {max(slots, 1)} slots")
    args.nproc_per_node = str(args.ranks)
    if all(host.is_here for host in named):
        return []
    if args.machine is not None:
        raise ValueError("--machine is the name of one machine, and -H has several: leave it out")
    return named if elastic is not None else taken(named, args.ranks)


def _spares(
    args: argparse.Namespace,
    machines: Sequence[Host],
    settings: Settings,
    elastic: _elastic.Limits | None,
) -> list[Host]:
    """Return the machines of -H that only sum: those without slots.

    Raises `ValueError` where they could not.
    """
    found = [host for host in hosts(args.hosts or "localhost") if host.slots == 0]
    if not found:
        return []
    name = found[0].name
    if elastic is not None:
        raise ValueError(f"{name}:0 in -H is to sum only, which elastic jobs do not start")
    if settings.switch:
        raise ValueError(f"{name}:0 in -H is a switch, and --switch names others: leave one out")
    if len(machines) < 2:
        raise ValueError(
            f"{name}:0 in -H is to sum for several machines, and all ranks are on one, where they "
            "sum in memory: leave it out"
        )
    if settings.protocol != "switchml" and len(found) > 1:
        raise ValueError(f"--protocol {settings.protocol} has one root, and -H names {len(found)}")
    return found


def _without_hosts(argv: list[str], args: argparse.Namespace) -> list[str]:
    """Return what each machine's `fanin run` is told: the same flags, but for which machines."""
    ours = len(argv) - len(args.training_script_args) - 1
    kept, flags = [], iter(argv[:ours])
    for flag in flags:
        if flag in ("-np", "-H", "--hostfile"):
            next(flags)
        elif not flag.startswith(("-np=", "-H", "--hostfile=")) and flag not in HOW:
            kept.append(flag)
    return [*kept, "--no-python", *NAMING, *_command(args)]


def _command(args: argparse.Namespace) -> list[str]:
    """Return the words that start a rank."""
    python = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    return [*python, args.training_script, *args.training_script_args]


def _ranks_end_s(args: argparse.Namespace) -> float:
    """Return how long torchrun waits for ranks that it has sent a signal before it kills them."""
    if args.shutdown_timeout is not None:
        return float(args.shutdown_timeout)
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


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


def _launch_elastic(args: argparse.Namespace, limits: _elastic.Limits, of_several: bool) -> int:
    named: Callable[[], Sequence[Host]]
    if args.host_discovery_script is not None:
        named = _elastic.Discovery(args.host_discovery_script, args.slots_per_host).named
    elif args.hosts is not None:
        named = partial(list, hosts(args.hosts))
    else:
        named = partial(list, [Host("localhost", limits.ranks_max)])
    return _elastic.run(_command(args), named, limits, _ranks_end_s(args), of_several)


def _launch(args: argparse.Namespace) -> int:
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    if args.ranks is not None:
        args.training_script, *args.training_script_args = [*NAMING, *_command(args)]
        args.no_python, args.module = True, False
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
