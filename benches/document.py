"""The document: what was asked, what was measured, and how to measure it again."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fanin_lab.units import shown_rate, shown_size, shown_time
from kernels import Kernel
from rows import HEADERS, Check, Command, commands, fanin_samples, median_s

BEGIN = "<!-- what stands from here to the next mark is written by `make bench` -->"
END = "<!-- written by `make bench` to here -->"


@dataclass
class Measured:
    """All that a run of the program found."""

    where: Mapping[str, Any]
    """Commit, machine, versions, time: as in the JSON of `fanin bench allreduce`."""
    checks: Sequence[Check]
    fast: Sequence[Command] = ()
    """Commands on links above 1 Gbit/s, of which nothing is asked."""
    rounds: list[Mapping[Command, Mapping[str, Any]]] = field(default_factory=list)
    broken: dict[Command, str] = field(default_factory=dict)
    """Why a command has no result: "skipped: ..", "failed: ..", as the program says it."""
    late: Sequence[str] = ()
    """What `benches/goat.py` said."""
    late_command: str = ""
    late_jobs: Sequence[str] = ()
    """What it said of three jobs."""
    late_jobs_command: str = ""
    late_broken: str | None = None
    kernels: Sequence[Kernel] = ()
    kernels_command: str = ""
    kernels_broken: str | None = None
    picture: Path | None = None
    picture_command: str = ""
    picture_broken: str | None = None
    quick: bool = False
    only: str | None = None
    """What the names of all its rows have, where there are others."""

    def commands(self) -> list[Command]:
        """Return all that is run, each once, in the order in which it is run."""
        return [*commands(self.checks), *self.fast]

    def broken_of(self, check: Check) -> str | None:
        """Return why the check cannot be made."""
        return next((self.broken[c] for c in check.needs() if c in self.broken), None)

    def figures(self, check: Check) -> list[float]:
        """Return the check's figure of each round."""
        return [check.figure(found) for found in self.rounds]

    def verdict(self, check: Check) -> str:
        """Return "met", "missed", or why there is none."""
        if (reason := self.broken_of(check)) is not None:
            return reason
        if not all(check.bits_agree(found) for found in self.rounds):
            return "missed: other bits"
        return "met" if check.met(statistics.median(self.figures(check))) else "missed"


def rewritten(
    text: str | None, generated: str, begin: str = BEGIN, end: str = END, title: str = "Performance"
) -> str:
    """Return the document with a new generated part; all else in it is kept.

    Raises `ValueError` where it has no marks that say what is generated.
    """
    skeleton = f"# {title}\n\n{begin}\n{end}\n"
    before, found_begin, rest = (skeleton if text is None else text).partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the marks are missing: {begin} and {end}")
    return f"{before}{begin}\n\n{generated}\n{end}{after}"


def generated(measured: Measured) -> str:
    """Return the generated part."""
    parts = [
        _head(measured),
        "## Asked and measured\n",
        table(
            [
                "workers, links, tensor",
                "asked",
                "measured; fanin's time",
                "",
                "`fanin bench allreduce ..`",
            ],
            [_check_row(measured, check) for check in measured.checks],
        ),
        "## Time and CPU time\n",
        _TIMES,
        table(
            [
                *("workers, links, tensor", "bound", "fanin", "Gloo", "Open MPI"),
                *("CPU: fanin's ranks", "what only sums", "Gloo's ranks", "Open MPI's ranks"),
                *("its memory", "sent again"),
            ],
            [_time_row(measured, command) for command in measured.commands()],
        ),
        _beside_tcp(measured),
        _bounded(measured),
        _late(measured),
        _fast(measured),
        _picture(measured),
        "## Kernels\n",
        _kernels(measured),
    ]
    return "\n".join(parts)


def where_line(command: str, where: Mapping[str, Any]) -> str:
    """Return what ran, of which commit, when, and on what machine."""
    machine, versions = where["machine"], where["versions"]
    commit, _, dirty = (where["commit"] or "unknown").partition("-")
    load = ", ".join(f"{average:.2f}" for average in machine["load_average"])
    kernel = machine["kernel"].partition("-")[0]  # what follows names somebody's build of it
    changed = " with uncommitted changes" if dirty else ""
    return f"""\
`{command}` at commit `{commit[:12]}`{changed}, {where["began"]}.
{machine["cpu"]}, {machine["cores"]} cores, {kernel}, load average before {load};
fanin {versions["fanin"]}, torch {versions["torch"]}, Python {versions["python"]}.
"""


def _head(measured: Measured) -> str:
    told = ""
    if measured.quick:
        told = "**Quick: tiny sizes, to see that it runs. Nothing here is about speed.**\n\n"
    elif measured.only is not None:
        told = f"**Only the rows with `{measured.only}`.**\n\n"
    return f"""\
{told}{where_line("make bench", measured.where)}
Rounds: {len(measured.rounds)}, each of all commands, forwards and backwards by turns, so that what
is compared ran within minutes. A command's time in a round is the median of its repeats, each from
a common start to the last rank's last sum; fanin and Gloo take turns within a command. What is
shown is the median over the rounds (minimum to maximum). Every sum is checked: against the exact
one, and bit by bit between the ranks. The bound is what the links take at least for the payload
where the plan says that it is summed; with one switch that has a link for each worker, payload /
rate. With headers it is {HEADERS:.3f} times that.
"""


_TIMES = """\
CPU seconds for a gigabyte of a rank's tensor, all ranks together (with their own services), and all
processes that only sum; what the kernel does for shaped links on its own account is in none. Memory
is the most that one of those processes held. Sent again: fanin's packets, in all rounds. Open MPI's
ranks ask for packets again and again while they wait, so they use the CPU time that others leave.
"""


def _check_row(measured: Measured, check: Check) -> list[str]:
    command = f"`{shlex.join(check.command.arguments())}`"
    verdict = measured.verdict(check)
    shown = "-"
    if measured.broken_of(check) is None:
        time_s = statistics.median(median_s(run[check.command], "fanin") for run in measured.rounds)
        shown = f"{spread(measured.figures(check), '{:.2f}'.format)}; {shown_time(time_s)}"
        verdict = f"**{verdict}**"
    return [check.command.what, check.asked(), shown, verdict, command]


def _time_row(measured: Measured, command: Command) -> list[str]:
    if command in measured.broken:
        return [command.what, *["-"] * 10]
    runs = [found[command] for found in measured.rounds]
    bound = runs[0]["bound_s"]
    backends = runs[0]["backends"]

    def times(backend: str) -> str:
        if backend not in backends:
            return "-"
        return spread([median_s(run, backend) for run in runs], shown_time)

    def cpu(backend: str, who: str) -> str:
        if backend not in backends:
            return "-"
        return f"{statistics.median(run['backends'][backend][who] for run in runs):.1f}"

    held = [run["switch_peak_bytes"] for run in runs if run["switch_peak_bytes"] is not None]
    resent = sum(s["retransmissions"] for run in runs for s in fanin_samples(run))
    return [
        command.what,
        "-" if bound is None else shown_time(bound),
        times("fanin"),
        times("gloo"),
        times("openmpi"),
        cpu("fanin", "ranks_cpu_s_per_gb"),
        cpu("fanin", "switch_cpu_s_per_gb"),
        cpu("gloo", "ranks_cpu_s_per_gb"),
        cpu("openmpi", "ranks_cpu_s_per_gb"),
        shown_size(max(held)) if held else "-",
        str(resent),
    ]


_BESIDE_TCP = """\
TCP sends all that it can from one machine to another and back. Its rate is that of the slower
direction, without headers. Each is measured alone, too.
"""


def _beside_tcp(measured: Measured) -> str:
    """Return how TCP and fanin share a link, where that was measured."""
    runs = [
        (command.what, [found[command] for found in measured.rounds])
        for command in measured.commands()
        if "--background tcp" in command.links and command not in measured.broken
    ]
    if not runs:
        return ""

    def rate(bps: Sequence[float]) -> str:
        return shown_rate(round(statistics.median(bps)))

    return "\n".join(
        [
            "## Beside TCP\n",
            _BESIDE_TCP,
            table(
                [
                    *("workers, links, tensor", "TCP alone", "TCP beside fanin"),
                    *("TCP beside Gloo", "fanin alone", "fanin beside TCP"),
                ],
                [
                    [
                        what,
                        rate([run["bulk_alone_bps"] for run in of_what]),
                        *(
                            rate([run["backends"][backend]["bulk_bps"] for run in of_what])
                            for backend in ("fanin", "gloo")
                        ),
                        *(
                            spread([median_s(run, backend) for run in of_what], shown_time)
                            for backend in ("alone", "fanin")
                        ),
                    ]
                    for what, of_what in runs
                ],
            ),
        ]
    )


_BOUNDED = """\
Sums that may lose something, by DLCP, beside those of a job that may not, and Gloo's. The 99th
percentile is that of a round's repeats. Lost: of the contributions.
"""


def _bounded(measured: Measured) -> str:
    """Return what a loss bound brings, where that was measured."""
    rows = []
    for command in measured.commands():
        if "--loss-bound" not in command.options or command in measured.broken:
            continue
        runs = [found[command]["backends"] for found in measured.rounds]
        lost = statistics.median(run["bounded"]["lost_share"] for run in runs)
        row = [command.what]
        for backend in ("bounded", "fanin", "gloo"):
            if backend not in runs[0]:
                row += ["-", "-"]
                continue
            for figure in ("median_s", "p99_s"):
                row.append(spread([run[backend][figure] for run in runs], shown_time))
        rows.append([*row, f"{lost:.2%}"])
    if not rows:
        return ""
    head = ["workers, links, tensor"]
    for who in ("with a bound", "without", "Gloo"):
        head += [f"{who}: median", "99 %"]
    return "\n".join(["## With a loss bound\n", _BOUNDED, table([*head, "lost"], rows)])


_LATE = """\
Each of four ranks in two racks is late by up to 50 ms in each step, by as much with each system.
The links have 500 Mbit/s, and each of three switches has 64 aggregators. A step sums 4 MB.
"""
_LATE_JOBS = """\
Three such jobs at once, a rank of each on every machine. They share the links and the aggregators,
and the server has a link of its own.
"""


def _late(measured: Measured) -> str:
    """Return what GOAT brings where ranks are late."""
    said = [f"`{measured.late_command}`: {measured.late_broken}.\n"]
    if measured.late_broken is None:
        said = [f"`{measured.late_command}`:\n", *(f"- {line}" for line in measured.late), ""]
        said += [_LATE_JOBS, f"`{measured.late_jobs_command}`:\n"]
        said += [*(f"- {line}" for line in measured.late_jobs), ""]
    return "\n".join(["## Late ranks\n", _LATE, *said])


def _fast(measured: Measured) -> str:
    """Return how far each comes on links above 1 Gbit/s, and how many cores that needs."""
    commands = [command for command in measured.fast if command not in measured.broken]
    if not commands:
        return ""
    rows = []
    for command in commands:
        runs = [found[command] for found in measured.rounds]
        row = [command.what]
        for backend in ("fanin", "gloo"):
            busy = statistics.median(run["backends"][backend]["cores_a_machine"] for run in runs)
            reached = statistics.median(
                run["bound_s"] * HEADERS / median_s(run, backend) for run in runs
            )
            row += [f"{reached:.0%}", f"{busy:.2f}", f"{busy / reached:.2f}"]
        rows.append(row)
    cores = measured.where["machine"]["cores"]
    text = f"""\
Nothing is asked here. Reached: the share of the links' rate that is used, headers counted. Cores a
machine: the CPU seconds of a machine's ranks and services by the seconds that pass; at line rate it
would be that by the share that is reached. All machines here are the {cores} cores of one, which
also do the kernel's work for all links. They, and not the links, are the bottleneck wherever the
cores of all machines at line rate are more than that.
"""
    head = ["workers, links, tensor"]
    for who in ("fanin", "Gloo"):
        head += [f"{who}: reached", "cores a machine", "at line rate"]
    return "\n".join(["## Above 1 Gbit/s\n", text, table(head, rows)])


def _picture(measured: Measured) -> str:
    command = f"`{measured.picture_command}`"
    if measured.picture is None:
        return f"Time over size ({command}): {measured.picture_broken}.\n"
    return f"![Time over size, fanin beside Gloo]({measured.picture.name})\n\n{command}\n"


def _kernels(measured: Measured) -> str:
    command = f"`{measured.kernels_command}`"
    if measured.kernels_broken is not None:
        return f"{command}: {measured.kernels_broken}.\n"
    memcpy = max(kernel.gb_per_s for kernel in measured.kernels if kernel.is_memcpy)
    shares: dict[tuple[str, str], dict[str, int]] = {}
    for kernel in measured.kernels:
        if not kernel.is_memcpy:
            isa, name, block = kernel.name.split("/")
            shares.setdefault((name, block), {})[isa] = kernel.memcpy_percent
    sets = list(dict.fromkeys(isa for of_kernel in shares.values() for isa in of_kernel))
    text = f"""\
{command}: shares of `memcpy`'s {memcpy:.0f} GB/s in the same run, in per cent, on one core. The aim
is 70 for float32. `path` is what a worker does to send: exponent, then quantisation; `_train`
writes into the buffer of a train of packets, as the data path does. `sum` is a switch's sum of 8
ranks' packets that travel as they are. Bytes are those of the gradient as float32, whatever it is.
"""
    return (
        text
        + "\n"
        + table(
            ["kernel", "elements a block", *sets],
            [
                [f"`{name}`", block, *(str(of_kernel.get(isa, "-")) for isa in sets)]
                for (name, block), of_kernel in shares.items()
            ],
        )
    )


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the median, and the least and the largest where there are several."""
    median = shown(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({shown(min(values))} to {shown(max(values))})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
