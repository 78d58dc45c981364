"""`fanin bench compression`: the options, what is measured where, the table."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fanin import _signals

from fanin_lab import commands, units
from fanin_lab.bench import BenchError
from fanin_lab.bench.compression.gradients import MODELS, Gradients, learned, read
from fanin_lab.bench.compression.methods import (
    AS_THEY_ARE,
    UNCOMPRESSED_STEPS,
    Method,
    defaults,
    method,
)
from fanin_lab.bench.progress import progress
from fanin_lab.units import shown_rate, shown_size, shown_time

FORMAT = 1
"""The JSON's version. A field may be added without a new number."""
RATES_BPS = [100_000_000, 1_000_000_000]
HEADERS = 1.058
"""Bytes on Ethernet for a byte of payload, at an MTU of 1500 (docs/protocols/byteps.md)."""
_EXCHANGE = str(Path(__file__).with_name("exchange.py"))
_REPEATS = 3

DESCRIPTION = """\
Sends gradients in fewer bytes, by one method after the other, and says what each makes of them:
what a rank sends in a step, how far the average is off, what compressing costs the processor, and
how long a step's exchange takes at some rates. Each rank is a machine of its own, and the services
are the ranks' own; --rate measures in a laboratory of network namespaces (see fanin netlab; needs
root), else times are predicted.

The gradients are those of a small network that learns here, or your own. In your program, for some
steps: steps.append([p.grad.clone() for p in model.parameters()]), before the optimizer's step, and
in the end torch.save(steps, "gradients.pt"). Ranks take steps that follow each other."""

EXAMPLES = """\
examples:
  fanin bench compression
  fanin bench compression --gradients gradients.pt --methods bfloat16,onebit,topk:0.001
  sudo $(which fanin) bench compression --rate 100mbit,1gbit --plot compression.png
"""

LEGEND = """\
sent: by a rank in a step, without headers; error: of the average, relative to it (Euclidean norms),
in the median of steps, nothing being sent later; of the sum: of all steps' averages together,
without and with error feedback; compress: a thread's CPU time in one step; predicted: what is sent,
at that rate with headers, and compress; measured: the slowest rank's median step, all of it."""


@dataclass
class Row:
    """What was found of a method."""

    method: str
    sent_bytes: int
    compress_s: float | None
    """None: not by itself, as it is a part of sending, or torch's."""
    predicted_s: dict[str, float]
    error: float = 0.0
    error_of_sum: float = 0.0
    error_of_sum_without_feedback: float | None = None
    """None: nothing is sent later."""
    measured_s: dict[str, float] = field(default_factory=dict)
    """By the rate of the links."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="fanin bench compression",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--model", choices=MODELS, default="gpt", help="whose gradients are sent (default: gpt)"
    )
    what.add_argument("--gradients", type=Path, metavar="FILE.pt", help="yours, in its place")
    made.add_argument(
        "--methods",
        default=",".join(defaults()),
        metavar="M[,M..]",
        help="(default: %(default)s)",
    )
    made.add_argument(
        "--workers", type=units.positive_number, default=4, metavar="N", help="(default: 4)"
    )
    made.add_argument(
        "--steps",
        type=units.positive_number,
        default=8,
        metavar="K",
        help="that are compressed, after two that are not (default: 8)",
    )
    made.add_argument(
        "--rate",
        type=lambda text: [units.rate_bps(part) for part in text.split(",")],
        default=[],
        metavar="R[,R..]",
        help="of the laboratory's links, one laboratory after the other (needs root)",
    )
    made.add_argument(
        "--json", type=units.new_file, metavar="FILE", help="all figures, machine, versions"
    )
    made.add_argument(
        "--plot", type=units.new_file, metavar="FILE.png", help="error and time over bytes"
    )
    return made


def main(argv: list[str]) -> int:
    """Run `fanin bench compression ARGV` and return its exit status."""
    args = parser().parse_args(argv)
    command = ["fanin", "bench", "compression", *argv]
    return commands.status("fanin bench", lambda: _run(args, command))


def _run(args: argparse.Namespace, command: list[str]) -> int:
    from fanin_lab.bench import machine

    if args.workers < 2:
        raise BenchError("one worker sends nothing: --workers 2, or more")
    if args.steps < 2:
        raise BenchError("the first step also makes what later ones use: --steps 2, or more")
    try:
        methods = [method(name) for name in args.methods.split(",")]
    except argparse.ArgumentTypeError as error:
        raise BenchError(str(error)) from None
    machine.warn_of_a_build_for_tests()
    where = machine.where()  # its load, too, before ours
    with _signals.as_exit():
        given = (
            read(args.gradients)
            if args.gradients
            else learned(args.model, UNCOMPRESSED_STEPS + args.steps, args.workers)
        )
        rows = measure(given, methods, args.workers, args.steps, args.rate)
    print(title(given, args.workers))
    print(table(rows) + "\n\n" + LEGEND)
    if len(given.steps) == 1:
        print("there is one step: all ranks have the same gradient, in every step")
    if args.json is not None:
        document = {
            "format": FORMAT,
            "command": shlex.join(command),
            **where,
            "workers": args.workers,
            "steps": args.steps,
            "elements": given.steps.shape[1],
            "methods": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot is not None:
        from fanin_lab.bench.compression.plot import draw

        draw(rows, title(given, args.workers), args.plot)
        print(f"plot: {args.plot}")
    return 0


def measure(
    given: Gradients,
    methods: Sequence[Method],
    workers: int,
    steps: int,
    rates_bps: Sequence[int],
) -> list[Row]:
    """Exchange the gradients by each method: without a laboratory for errors, in one for times.

    Raises `BenchError`, and `fanin_lab.netlab.NetlabError`.
    """
    from fanin_lab.bench.compression.ranks import run

    rows = [_row(given, each, workers, rates_bps or RATES_BPS) for each in methods]
    with (
        tempfile.TemporaryDirectory(prefix="fanin-bench-") as folder,
        progress(1 + len(rates_bps)) as advance,
    ):
        file = Path(folder) / "gradients.pt"
        given.save(file)
        task = {
            "gradients": str(file),
            "methods": [each.name for each in methods],
            "steps": steps,
        }
        advance("errors")
        for row, found in zip(
            rows, run(_EXCHANGE, {**task, "with_errors": True}, workers)[0], strict=True
        ):
            row.error = found["error"]
            row.error_of_sum = found["error_of_sum"]
            row.error_of_sum_without_feedback = found.get("error_of_sum_without_feedback")
        for rate in rates_bps:
            advance(f"times at {shown_rate(rate)}")
            of_ranks = run(_EXCHANGE, {**task, "with_errors": False}, workers, rate)
            for row, by_rank in zip(rows, zip(*of_ranks, strict=True), strict=True):
                row.measured_s[shown_rate(rate)] = max(found["time_s"] for found in by_rank)
    return rows


def _row(given: Gradients, sending: Method, workers: int, rates_bps: Sequence[int]) -> Row:
    sent = sending.sent_bytes(given.shapes, workers)
    compress = _compress_s(sending, given, workers)
    return Row(
        sending.name,
        sent,
        compress,
        {
            shown_rate(rate): 8 * HEADERS * sent / rate + (compress or 0.0)
            for rate in sorted(rates_bps)
        },
    )


def _compress_s(sending: Method, given: Gradients, workers: int) -> float | None:
    """Return how long a rank's part of a step keeps a processor: the least of some."""
    if sending.compressor is None:
        return None
    import torch
    from fanin.torch.compression import RandomK, TwoWay
    from fanin.torch.compression.cut import Cut
    from fanin.torch.compression.memory import Memory

    torch.set_num_threads(1)
    gradient, dice = given.steps[0], torch.Generator().manual_seed(0)
    memory = Memory(Cut.of(len(gradient), workers), 0, gradient.device, feedback=True)
    times = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        if isinstance(sending.compressor, RandomK):
            indices, values = memory.drawn(gradient, sending.compressor, dice)
            torch.zeros_like(gradient)[indices] = values
        else:
            assert isinstance(sending.compressor, TwoWay)
            messages = memory.messages(gradient, sending.compressor, dice)
            memory.sum_message(messages, sending.compressor, dice)
            memory.average(messages, sending.compressor)
        times.append(time.thread_time() - began)
    return min(times)


def title(given: Gradients, workers: int) -> str:
    """Return in a line what was sent."""
    elements = given.steps.shape[1]
    size = shown_size(4 * elements)
    return f"{workers} workers, gradients of {elements:,} elements, {size} of float32"


def table(rows: Sequence[Row]) -> str:
    """Return the figures as a table."""
    rates = list(rows[0].predicted_s)
    measured = list(rows[0].measured_s)
    head = ["", "sent", f"of {AS_THEY_ARE}", "error", "of the sum", "with feedback", "compress"]
    head += [f"{rate}, predicted" for rate in rates] + [f"{rate}, measured" for rate in measured]
    plain = next((row.sent_bytes for row in rows if row.method == AS_THEY_ARE), None)
    cells = [head]
    for row in rows:
        without = row.error_of_sum_without_feedback
        cells.append(
            [
                row.method,
                shown_size(row.sent_bytes),
                "-" if plain is None else f"{100 * row.sent_bytes / plain:.1f} %",
                _shown(row.error),
                _shown(row.error_of_sum if without is None else without),
                "-" if without is None else _shown(row.error_of_sum),
                "-" if row.compress_s is None else shown_time(row.compress_s),
                *(shown_time(row.predicted_s[rate]) for rate in rates),
                *(shown_time(row.measured_s[rate]) for rate in measured),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _shown(error: float) -> str:
    return f"{error:.1e}" if error < 0.001 else f"{100 * error:.3g} %"
