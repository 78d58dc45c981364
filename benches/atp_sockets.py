"""Repeats two experiments of the ATP paper on real sockets, small, and sets ATP beside SwitchML.

    make bench-atp
    python benches/atp_sockets.py --quick

Loss (Figure 10), two jobs with too few aggregators (Figure 13), and all-reduces beside Gloo. Writes
docs/reproduction-sockets.md, whose text outside the marks is kept, and the JSON. Needs root: every
worker is a network namespace. Takes less than five minutes.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import document
import part
import sharing
from fanin._settings import variable
from fanin_lab.bench import command
from fanin_lab.bench.measure import measure as all_reduces
from fanin_lab.bench.progress import Advance, progress
from fanin_lab.units import rate_bps, shown_rate, shown_time
from performance import say
from rows import MB, Command, fanin_samples, median_s

ROUNDS = 3
BEGIN = "<!-- what stands from here to the next mark is written by `make bench-atp` -->"
END = "<!-- written by `make bench-atp` to here -->"

LOSSES = ("0", "0.01%", "0.1%", "1%")
LOSS_LINKS = "--rate 250mbit"
LOSS_WORKERS = 4
LOSS_BYTES = 10 * MB
SHARING = sharing.Load(rate_bps=rate_bps("250mbit"), elements=500_000, calls=12)
WAYS = {
    "shared": SHARING,
    "static parts": replace(SHARING, parts=True),
    "four servers": replace(SHARING, servers=sharing.SPREAD),
}
"""How the aggregators are shared by the jobs, and whose servers have the rest."""


Environment: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class System:
    """Who sums, in the experiment about loss."""

    name: str
    protocol: str
    environment: Environment = ()
    links: str = ""

    def command(self, loss: str, quick: bool) -> Command:
        """Return the command for a loss on each link in each direction."""
        links = f"{LOSS_LINKS} --loss {loss} {self.links}".strip()
        options = f"--protocol {self.protocol} --baseline none --warmup 1"
        what = f"{self.name}, loss {loss}"
        one = Command(what, LOSS_WORKERS, LOSS_BYTES, links, options, repeat=3)
        return small(one) if quick else one


SYSTEMS = (
    # The paper's comparison: an adversary's losses tell of no congestion (§5.2.3).
    System("ATP, congestion control off", "atp", ((variable("congestion_control"), "0"),)),
    System("ATP", "atp"),
    System("ATP, switches mark", "atp", links="--ecn 30KB"),
    System("SwitchML", "switchml"),
)

BESIDE = (
    Command("8, 1 Gbit/s, 25 MB", 8, 25 * MB, "--rate 1gbit"),
    Command("4, unshaped, 25 MB", 4, 25 * MB, "--mtu 1500", repeat=9),
    Command("4 in two racks, 1 Gbit/s, 25 MB", 4, 25 * MB, "--rate 1gbit --racks 2"),
    Command("8 in two racks, 1 Gbit/s, 25 MB", 8, 25 * MB, "--rate 1gbit --racks 2"),
)
PROTOCOLS = ("atp", "switchml")


@dataclass
class Found:
    """Everything that was measured; a run is ``runs[0]`` of a command's JSON."""

    where: Mapping[str, Any]
    quick: bool
    loss: dict[str, dict[str, list[Any]]]
    """Runs by system and loss."""
    beside: dict[str, dict[str, list[Any]]]
    """Runs by command and protocol."""
    windows: int
    """Aggregators that both jobs' windows need."""
    sharing: dict[str, dict[int, list[list[sharing.Round]]]]
    """By way and share: A alone, B alone, both, as often as there were rounds."""


def main() -> int:
    """Measure, write, and say where."""

    def measured(where: Mapping[str, Any], quick: bool) -> tuple[str, Mapping[str, Any]]:
        found = measure(where, quick)
        return generated(found), asdict(found)

    what = "Repeat ATP's experiments on real sockets"
    return part.main(what, (BEGIN, END), "reproduction-sockets.json", measured)


def measure(where: Mapping[str, Any], quick: bool) -> Found:
    """Run everything, what is compared by turns.

    Raises `BenchError`, `sharing.SharingError`, and `fanin_lab.netlab.NetlabError`.
    """
    rounds, losses, beside = (1, LOSSES[::3], BESIDE[-1:]) if quick else (ROUNDS, LOSSES, BESIDE)
    load = replace(SHARING, elements=20_000, calls=2) if quick else SHARING
    found = Found(
        where,
        quick,
        loss={system.name: {loss: [] for loss in losses} for system in SYSTEMS},
        beside={row.what: {protocol: [] for protocol in PROTOCOLS} for row in beside},
        windows=sharing.windows(load),
        sharing={way: {share: [] for share in sharing.SHARES} for way in WAYS},
    )
    steps = rounds * (len(losses) * len(SYSTEMS) + len(sharing.SHARES) * len(WAYS))
    with progress(steps + len(beside) * len(PROTOCOLS)) as bar:
        for number in range(rounds):
            # Backwards every other round: a machine that grows slower favours nobody.
            step = -1 if number % 2 else 1
            _loss(found, bar, step)
            for share in sharing.SHARES[::step]:
                aggregators = found.windows * share // 100
                for way, usual in list(WAYS.items())[::step]:
                    say(bar, f"two jobs, {share} % of the aggregators, {way}")
                    one = replace(usual, elements=load.elements, calls=load.calls)
                    found.sharing[way][share].append(sharing.measure(one, aggregators))
        for row in beside:
            for protocol in PROTOCOLS:
                options = f"--protocol {protocol}"
                which = replace(row, what=f"{row.what}, {protocol}", options=options)
                which = small(which) if quick else which
                say(bar, which.what)
                found.beside[row.what][protocol].append(bench(which))
    return found


def _loss(found: Found, bar: Advance, step: int) -> None:
    for loss in list(found.loss[SYSTEMS[0].name])[::step]:
        for system in SYSTEMS[::step]:
            one = system.command(loss, found.quick)
            say(bar, one.what)
            found.loss[system.name][loss].append(bench(one, system.environment))


def bench(one: Command, environment: Environment = (), quick: bool = False) -> dict[str, Any]:
    """Do what `fanin bench allreduce` does, in this process, which has torch already."""
    one = small(one) if quick else one
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        args = command.parser().parse_args(one.arguments())
        command.resolve(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    (run,) = all_reduces(args, args.workers, args.size, lambda _: None)
    return run.as_json()


def small(one: Command) -> Command:
    """Return it so small that it says nothing about speed."""
    return replace(one, options=one.options.replace("--warmup 1", "")).quick()


def generated(found: Found) -> str:
    """Return the generated part of the document."""
    told = "**Quick: tiny sizes, to see that it runs.**\n\n" if found.quick else ""
    parts = [
        told + document.where_line("make bench-atp", found.where),
        "## Loss (Figure 10)\n",
        _LOSS.format(workers=LOSS_WORKERS, rate=_rate(LOSS_LINKS), mb=LOSS_BYTES // MB),
        document.table(
            ["loss", *(s.name for s in SYSTEMS)],
            [_loss_row(found, x) for x in found.loss[SYSTEMS[0].name]],
        ),
        _commands(found),
        "## Two jobs share a switch (Figure 13)\n",
        _SHARING.format(
            workers=sharing.WORKERS,
            rate=shown_rate(SHARING.rate_bps),
            mb=4 * SHARING.elements * SHARING.calls // MB,
            windows=found.windows,
        ),
        document.table(
            [
                *("aggregators", "alone", "A beside B", "B beside A", "both, MB/s"),
                *("added at the switch", "at the server", "collisions"),
            ],
            [_sharing_row(found.sharing["shared"][share], share) for share in sharing.SHARES],
        ),
        "### Static parts, and several servers (§A.5)\n",
        _WAYS,
        document.table(
            [
                "aggregators",
                *(f"{what}, {way}" for what in ("alone", "both") for way in WAYS),
            ],
            [_ways_row(found, share) for share in sharing.SHARES],
        ),
        "## Beside SwitchML and Gloo\n",
        _BESIDE,
        document.table(
            ["workers, links, tensor", "ATP", "SwitchML", "Gloo", "CPU: ATP", "SwitchML", "Gloo"],
            [_beside_row(what, found.beside[what]) for what in found.beside],
        ),
    ]
    return "\n".join(parts)


_LOSS = """\
{workers} workers, {rate}, {mb} MB of float32, every link loses that share of packets in each
direction (in the paper, one worker's does). Throughput by that without loss; in brackets its least
and its largest over the rounds, and the time of an all-reduce. Every sum is checked, bit by bit
between the ranks. The paper compares with congestion control off.
"""
_SHARING = """\
Two jobs, A and B, of {workers} workers each, all-reduce {mb} MB of int32; all links are {rate},
the server's as well, which stands on a host of its own. 100 % are the {windows} aggregators
that both windows hold together. Throughput of a rank's tensors in MB/s; beside the other job, also
by that alone with as many aggregators. Packets added by fragments: at best {workers} at the switch
and 1 at the server, without aggregators 0 and {workers}. Every element of every sum was compared
with the exact one.
"""
_WAYS = """\
The same jobs and as many aggregators, by turns with the rows above. MB/s, in brackets the least and
the most, and then the ratio to *shared* in the same round. With *static parts* each job has half of
the aggregators for itself. With *four servers* each worker's machine has one, and no machine is
added. Each of them sums an equal part of every tensor.
"""
_BESIDE = """\
Medians of one all-reduce of float32 on its slowest rank, one round; Gloo's beside ATP. CPU: seconds
for a gigabyte of a rank's tensor, all ranks, switches and the server together. In two racks
a switch of SwitchML stands where ATP has its server, above both racks' switches.
"""


def _loss_row(found: Found, loss: str) -> list[str]:
    cells = [loss]
    for system in SYSTEMS:
        runs = found.loss[system.name]
        pairs = zip(runs["0"], runs[loss], strict=True)
        ratios = [median_s(without, "fanin") / median_s(run, "fanin") for without, run in pairs]
        time_s = statistics.median(median_s(run, "fanin") for run in runs[loss])
        resent = sum(s["retransmissions"] for run in runs[loss] for s in fanin_samples(run))
        shown = document.spread(ratios, "{:.2f}".format)
        cells.append(f"{shown}; {shown_time(time_s)}, {resent} sent again")
    return cells


def _commands(found: Found) -> str:
    lines = []
    for system in SYSTEMS:
        arguments = " ".join(system.command(LOSSES[-1], found.quick).arguments())
        environment = "".join(f"{name}={value} " for name, value in system.environment)
        lines.append(f"{environment}fanin bench allreduce {arguments}")
    return "```\n" + "\n".join(lines) + "\n```\n"


def _ways_row(found: Found, share: int) -> list[str]:
    def both(of_round: list[sharing.Round]) -> float:
        return sum(figures.bytes_per_s for figures in of_round[-1].jobs.values())

    def alone(of_round: list[sharing.Round]) -> float:
        return statistics.median(
            figures.bytes_per_s for one in of_round[:-1] for figures in one.jobs.values()
        )

    shared = found.sharing["shared"][share]
    cells = [f"{shared[0][0].aggregators} ({share} %)"]
    for figure in (alone, both):
        for rounds in (of_way[share] for of_way in found.sharing.values()):
            rates = [figure(of_round) for of_round in rounds]
            ratios = [rate / figure(usual) for rate, usual in zip(rates, shared, strict=True)]
            shown = document.spread([rate / MB for rate in rates], "{:.1f}".format)
            cells.append(f"{shown}; {statistics.median(ratios):.2f}")
    return cells


def _sharing_row(rounds: list[list[sharing.Round]], share: int) -> list[str]:
    one, other = sharing.JOBS
    alone = {
        job: [of_round[i].jobs[job] for of_round in rounds] for i, job in enumerate((one, other))
    }
    both = [of_round[-1].jobs for of_round in rounds]

    def rate(figures: Sequence[float]) -> str:
        return document.spread([figure / MB for figure in figures], "{:.1f}".format)

    def beside(job: str) -> str:
        ours = [jobs[job].bytes_per_s for jobs in both]
        ratios = [a / b.bytes_per_s for a, b in zip(ours, alone[job], strict=True)]
        return f"{rate(ours)}; {statistics.median(ratios):.2f}"

    def median(figure: str) -> float:
        return statistics.median(
            float(getattr(figures, figure)) for jobs in both for figures in jobs.values()
        )

    total = [sum(figures.bytes_per_s for figures in jobs.values()) for jobs in both]
    return [
        f"{rounds[0][0].aggregators} ({share} %)",
        rate([figures.bytes_per_s for of_job in alone.values() for figures in of_job]),
        beside(one),
        beside(other),
        rate(total),
        f"{median('at_switch'):.2f}",
        f"{median('at_server'):.2f}",
        f"{median('collisions'):.0f}",
    ]


def _beside_row(what: str, found: Mapping[str, Sequence[Any]]) -> list[str]:
    runs = {protocol: of_one[0] for protocol, of_one in found.items()}

    def time(protocol: str) -> str:
        return shown_time(median_s(runs[protocol], "fanin"))

    def cpu(protocol: str, backend: str) -> str:
        figures = runs[protocol]["backends"][backend]
        return f"{figures['ranks_cpu_s_per_gb'] + figures['switch_cpu_s_per_gb']:.1f}"

    return [
        what,
        *(time(protocol) for protocol in PROTOCOLS),
        shown_time(median_s(runs["atp"], "gloo")),
        *(cpu(protocol, "fanin") for protocol in PROTOCOLS),
        cpu("atp", "gloo"),
    ]


def _rate(links: str) -> str:
    return shown_rate(rate_bps(links.split()[1]))


if __name__ == "__main__":
    sys.exit(main())
