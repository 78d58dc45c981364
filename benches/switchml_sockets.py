"""Repeats five experiments of the SwitchML paper on real sockets, small.

    make bench-switchml
    python benches/switchml_sockets.py --quick

How many workers there are (Figure 3), losses (Figures 6 and 7), slots (Figure 9) and types of
numbers (Figure 12). Writes its part of docs/reproduction-sockets.md, and the JSON. Needs root:
every worker is a network namespace. Takes five to eight minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import document
import part
from atp_sockets import Environment, bench, small
from fanin._settings import variable
from fanin_lab.bench import BenchError
from fanin_lab.bench.progress import progress
from fanin_lab.units import shown_time
from performance import say
from rows import MB, Command, median_s

ROUNDS = 3
BEGIN = "<!-- what stands from here to the next mark is written by `make bench-switchml` -->"
END = "<!-- written by `make bench-switchml` to here -->"
LINKS = "--rate 250mbit"
FAST = "--rate 1gbit"
"""Where a few packets do not fill the link in the time that hosts take."""
BYTES = 10 * MB


@dataclass(frozen=True)
class Row:
    """A setting of an experiment."""

    name: str
    command: Command
    environment: Environment = ()
    over_time: bool = False
    """Whether the service's sums over time are wanted, which a timeline of rank 0 has."""


def _command(
    what: str, workers: int = 4, links: str = LINKS, options: str = "", peers: str = "none"
) -> Command:
    options = f"--plan switch --warmup 1 {options}".strip()
    return Command(what, workers, BYTES, links, options, repeat=3, peers=peers)


WORKERS = [
    Row(str(count), _command(f"{count} workers", count, peers="gloo")) for count in (2, 4, 6, 8)
]
LOSSES = [
    Row(
        loss,
        _command(
            f"loss {loss}", links=f"{LINKS} --loss {loss}" if loss != "0" else LINKS, peers="gloo"
        ),
    )
    for loss in ("0", "0.01%", "0.1%", "1%")
]
LONG_BYTES = 100 * MB
TIMELINE = [
    Row(
        loss,
        replace(_command(f"loss {loss}, over time", links=links), size_bytes=LONG_BYTES, repeat=1),
        over_time=True,
    )
    for loss, links in (
        ("0", LINKS),
        ("0.01%", f"{LINKS} --loss 0.01%"),
        ("1%", f"{LINKS} --loss 1%"),
    )
]
SLOTS = [
    Row(str(slots), _command(f"{slots} slots", links=FAST), ((variable("in_flight"), str(slots)),))
    for slots in (1, 2, 4, 8, 16, 64, 512)
]
TYPES = [
    Row(
        "float32 as int32 with a factor", _command("scaled", options="--wire-dtype shared_exponent")
    ),
    Row("float32 as it is", _command("native")),
    Row("int32", _command("int32", options="--dtype int32")),
    Row(
        "float16, half of the bytes",
        replace(_command("float16", options="--dtype float16"), size_bytes=BYTES // 2),
    ),
    Row("float32 as bfloat16", _command("bfloat16", options="--wire-dtype bfloat16")),
    Row("float32 as int8", _command("int8", options="--wire-dtype int8")),
]
EXPERIMENTS = {
    "workers": WORKERS,
    "loss": LOSSES,
    "over time": TIMELINE,
    "slots": SLOTS,
    "types": TYPES,
}
Found = Mapping[str, Mapping[str, Sequence[Any]]]
"""By experiment and row, the ``runs[0]`` of each round's JSON."""


def main() -> int:
    """Measure, write, and say where."""

    def measured(where: Mapping[str, Any], quick: bool) -> tuple[str, Mapping[str, Any]]:
        found = measure(quick)
        head = document.where_line("make bench-switchml", where)
        return f"{head}\n{generated(found)}", {**where, "runs": found}

    what = "Repeat SwitchML's experiments on real sockets"
    return part.main(what, (BEGIN, END), "switchml-sockets.json", measured)


def measure(quick: bool) -> Found:
    """Run everything, what is compared by turns.

    Raises `BenchError`, and `fanin_lab.netlab.NetlabError`.
    """
    chosen = {name: rows[:2] if quick else rows for name, rows in EXPERIMENTS.items()}
    found: dict[str, dict[str, list[Any]]] = {
        name: {row.name: [] for row in rows} for name, rows in chosen.items()
    }
    rounds = 1 if quick else ROUNDS
    with progress(rounds * sum(map(len, chosen.values()))) as bar:
        for number in range(rounds):
            # Backwards every other round: a machine that grows slower favours nobody.
            for name, rows in chosen.items():
                for row in rows[:: -1 if number % 2 else 1]:
                    say(bar, f"{name}: {row.command.what}")
                    found[name][row.name].append(_measured(row, quick))
    return found


def _measured(row: Row, quick: bool) -> Any:
    """Measure a row; one with variables in a process of its own, whose ranks have them, too."""
    if not row.environment and not row.over_time:
        return bench(row.command, quick=quick)
    one = small(row.command) if quick else row.command
    with tempfile.TemporaryDirectory() as folder:
        file, trace = Path(folder) / "run.json", Path(folder) / "trace.json"
        environment = dict(row.environment)
        if row.over_time:
            environment[variable("trace")] = str(trace)
        command = [sys.executable, "-m", "fanin", "bench", "allreduce", *one.arguments()]
        ended = subprocess.run(
            [*command, "--json", str(file)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise BenchError(ended.stderr.strip())
        (run,) = json.loads(file.read_text())["runs"]
        if row.over_time:
            run["mbit_per_s"] = _over_time(json.loads(trace.with_suffix(".0.json").read_text()))
        return run


def _over_time(timeline: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return what the service summed in each tenth of the last all-reduce, in Mbit/s."""
    sums = [one for one in timeline if one["name"].startswith("all-reduce ")]
    last = max(one["args"]["number"] for one in sums)
    its = [one for one in sums if one["args"]["number"] == last]
    begin = min(one["ts"] for one in its)
    end = max(one["ts"] + one["dur"] for one in its)
    shown = sorted(
        (one["ts"], one["args"]["Mbit/s"])
        for one in timeline
        if one["ph"] == "C" and one["name"].startswith("sums ")
    )
    tenth = (end - begin) / 10
    # A sample holds until the next one. At both ends it is of less time than that, as nothing is
    # summed outside.
    megabits = [0.0] * 10
    for (ts, rate), to in zip(shown, [ts for ts, _ in [*shown[1:], (end, 0.0)]], strict=False):
        first, last = max(ts, begin), min(to, end)
        if first < last:
            inside = rate * (to - ts) / (last - first)
            for at in range(10):
                ends = begin + at * tenth, begin + (at + 1) * tenth
                megabits[at] += inside * max(0.0, min(last, ends[1]) - max(first, ends[0]))
    return [of_tenth / tenth for of_tenth in megabits]


def generated(found: Found) -> str:
    """Return the tables."""
    first = {name: next(iter(of_one)) for name, of_one in found.items()}
    workers = document.table(
        ["workers", "SwitchML, 10^6 elements/s", "Gloo", "SwitchML by Gloo"],
        [[name, *_rates(runs)] for name, runs in found["workers"].items()],
    )
    losses = document.table(
        ["loss", "SwitchML: time by that without loss", "Gloo"],
        [
            [name, *(_by(found["loss"][first["loss"]], runs, of) for of in ("fanin", "gloo"))]
            for name, runs in found["loss"].items()
        ],
    )
    over_time = document.table(
        ["loss", "in the first four fifths, Mbit/s", "in the last fifth", "in each tenth"],
        [
            [
                name,
                *(_rate_over_time(runs, part) for part in (slice(8), slice(8, 10))),
                _tenths(runs),
            ]
            for name, runs in found["over time"].items()
        ],
    )
    most = list(found["slots"])[-1]
    slots = document.table(
        ["slots", f"time by that with {most}", "CPU seconds a GB of a rank's tensor"],
        [
            [name, _by(found["slots"][most], runs, "fanin"), _cpu(runs)]
            for name, runs in found["slots"].items()
        ],
    )
    types = document.table(
        ["numbers", f"time by that of {first['types']}", "CPU seconds a GB of a rank's tensor"],
        [
            [name, _by(found["types"][first["types"]], runs, "fanin"), _cpu(runs)]
            for name, runs in found["types"].items()
        ],
    )
    parts = [
        "## SwitchML: workers (Figure 3)\n",
        _WORKERS,
        workers,
        "## SwitchML: losses (Figure 6)\n",
    ]
    parts += [_LOSSES, losses, "## SwitchML: losses over time (Figure 7)\n", _OVER_TIME, over_time]
    parts += ["## SwitchML: slots (Figure 9)\n", _SLOTS, slots]
    return "\n".join([*parts, "## SwitchML: types of numbers (Figure 12)\n", _TYPES, types])


_WORKERS = f"""\
All-reduces of {BYTES // MB} MB of float32 by one switch, which has a link of 250 Mbit/s for each
worker; Gloo's ring takes turns. In brackets the least and the most of {ROUNDS} rounds. In the paper
the number of workers makes no difference to SwitchML, and a ring is slower.
"""
_LOSSES = """\
4 workers; every link loses that share of packets in each direction, as in the paper. In the paper
SwitchML is significantly faster than Gloo at 0.1 % and more, and 0.01 % costs either little.
"""
_OVER_TIME = f"""\
4 workers and {LONG_BYTES // MB} MB. Sums that the switch completes, by its own counters, as rank
0's timeline has them (FANIN_TRACE). In the paper a worker's rate stays close to that without loss.
At a loss of 1 % it falls in the last part of the time. Some slots are behind then, and no other
slot takes their work.
"""
_SLOTS = """\
4 workers with links of 1 Gbit/s. As many packets of a worker are on the way (FANIN_IN_FLIGHT). In
the paper the time falls until the slots fill the link's bandwidth-delay product. The delay is here
what hosts take, and short trains of packets cost them more.
"""
_TYPES = """\
4 workers. In the paper, scaling and conversion to int32 cost nothing beside int32, and half of the
bytes take half of the time.
"""


def _spread(figures: Sequence[float]) -> str:
    return document.spread(list(figures), "{:.2f}".format)


def _rates(runs: Sequence[Any]) -> list[str]:
    def rate(of: str) -> str:
        return _spread([run["elements"] / median_s(run, of) / 1e6 for run in runs])

    return [
        rate("fanin"),
        rate("gloo"),
        _spread([median_s(run, "gloo") / median_s(run, "fanin") for run in runs]),
    ]


def _rate_over_time(runs: Sequence[Any], part: slice) -> str:
    means = [statistics.mean(run["mbit_per_s"][part]) for run in runs]
    return document.spread(means, "{:.0f}".format)


def _tenths(runs: Sequence[Any]) -> str:
    tenths = zip(*(run["mbit_per_s"] for run in runs), strict=True)
    return " ".join(f"{statistics.median(tenth):.0f}" for tenth in tenths)


def _by(usual: Sequence[Any], runs: Sequence[Any], of: str) -> str:
    pairs = zip(usual, runs, strict=True)
    time_s = statistics.median(median_s(run, of) for run in runs)
    ratios = _spread([median_s(run, of) / median_s(one, of) for one, run in pairs])
    return f"{ratios}; {shown_time(time_s)}"


def _cpu(runs: Sequence[Any]) -> str:
    figures = [run["backends"]["fanin"] for run in runs]
    seconds = [of["ranks_cpu_s_per_gb"] + of["switch_cpu_s_per_gb"] for of in figures]
    return f"{statistics.median(seconds):.1f}"


if __name__ == "__main__":
    sys.exit(main())
