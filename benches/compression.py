"""What compression does to training: `python benches/compression.py`, as root for times.

Each method trains `fanin reproduce`'s networks with each seed, in ranks that are processes, each a
machine of its own, by DDP on fanin. All else is alike: learning rates are those of float32; the
optimizer's momentum (of digits') is Nesterov's, and CompressionState's where there is one. A
step's time at a rate is what the model takes to compute a step, and what the exchange of its
gradients takes in a laboratory (fanin bench compression); time to a loss is so many steps of it.

Writes the table of docs/compression.md. A method more is a name more: see --methods. As a program
with one argument this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import document
from fanin import _signals
from fanin_lab.bench.compression.command import HEADERS, Row, measure
from fanin_lab.bench.compression.gradients import learned
from fanin_lab.bench.compression.methods import AS_THEY_ARE, Method, defaults, method
from fanin_lab.bench.compression.ranks import Groups, play, run
from fanin_lab.units import rate_bps, shown_rate, shown_size

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "compression.md"
BEGIN = "<!-- what stands from here to the next mark is written by benches/compression.py -->"
END = "<!-- written by benches/compression.py to here -->"
STEPS = {"gpt": 240, "digits": 240}
EVERY = 10
"""Steps between two looks at what was held back."""
# Student's t for a two-sided interval of 95 %, by the number of seeds.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# The times are given for the loss that float32 reaches in this part of its steps.
PART = 2 / 3
COUNTED = 12
"""Steps whose exchange is measured."""


@dataclass(frozen=True)
class Curve:
    """Of one training: after every so many steps, on what was held back."""

    losses: list[float]
    right: list[float]
    """Share of answers."""

    def steps_to(self, loss: float) -> float:
        """Return after how many steps it is as low; infinity if it never is."""
        reached = (at for at, found in enumerate(self.losses, 1) if found <= loss)
        return EVERY * next(reached, math.inf)


def body(groups: Groups, task: dict[str, Any]) -> list[list[list[float]]]:
    """Train as one rank, by each method and with each seed; rank 0 says what came of it."""
    return [
        [_train(groups, method(name), task["model"], seed) for seed in task["seeds"]]
        for name in task["methods"]
    ]


def _train(groups: Groups, sending: Method, model: str, seed: int) -> list[float]:
    import torch
    from fanin_lab.papers.training import begun, tasks
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    chosen = tasks()[_TASKS[model]]
    learner, dice = begun(chosen, seed)
    group = groups.on_fanin(sending.wire_dtype)
    network = DistributedDataParallel(learner.network, process_group=group)
    (of_optimizer,) = learner.optimizer.param_groups
    momentum = of_optimizer.get("momentum", 0.0)
    if momentum and sending.compressor is not None:
        # As BytePS says: a momentum is added before gradients are compressed, and not once more.
        of_optimizer["momentum"] = 0.0
    elif momentum:
        of_optimizer["nesterov"] = True
    sending.register(network, group, momentum=momentum)
    curve = []
    for step in range(1, STEPS[model] + 1):
        # All ranks draw the same numbers, and each takes its row.
        numbers = torch.randint(learner.samples, (groups.size, chosen.batch), generator=dice)
        x, y = (each[groups.rank] for each in learner.draw(numbers))
        learner.optimizer.zero_grad()
        loss = cross_entropy(network(x).flatten(0, -2), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        if step % EVERY == 0 and groups.rank == 0:
            with torch.no_grad():
                scores, y = learner.network(learner.held_back[0]), learner.held_back[1]
                held_back = cross_entropy(scores.flatten(0, -2), y.flatten()).item()
                right = (scores.argmax(dim=-1) == y).double().mean().item()
            curve += [held_back, right]
    return curve


_TASKS = {"gpt": "GPT", "digits": "digits"}


def _compute_s(model: str) -> float:
    """Return how long a rank computes in a step, with the machine to itself."""
    import torch
    from fanin_lab.papers.training import begun, tasks
    from torch.nn.functional import cross_entropy

    chosen = tasks()[_TASKS[model]]
    learner, dice = begun(chosen, 0)
    times = []
    for _ in range(20):
        x, y = learner.draw(torch.randint(learner.samples, (chosen.batch,), generator=dice))
        began = time.perf_counter()
        learner.optimizer.zero_grad()
        loss = cross_entropy(learner.network(x).flatten(0, -2), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", default=",".join(defaults()), metavar="M[,M..]")
    parser.add_argument("--models", default="gpt,digits", metavar="M[,M..]")
    parser.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rates", default="100mbit,1gbit", metavar="R[,R..]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that was found")
    parser.add_argument("--out", type=Path, default=DOCUMENT, metavar="FILE.md")
    args = parser.parse_args()
    names = args.methods.split(",")
    rates = [rate_bps(each) for each in args.rates.split(",")]
    if AS_THEY_ARE not in names:
        parser.error(f"all is held against {AS_THEY_ARE}: name it among the methods")
    if not 2 <= args.seeds <= max(T_95):
        parser.error(f"an interval takes 2 to {max(T_95)} seeds")
    if os.geteuid() != 0:
        print("times are predicted, as laboratories need root", file=sys.stderr)
    found: dict[str, Any] = {}
    parts = []
    with _signals.as_exit():
        for model in args.models.split(","):
            compute = _compute_s(model)
            print(f"{model}: exchanging", file=sys.stderr, flush=True)
            rows = measure(
                learned(model, COUNTED, args.workers),
                [method(name) for name in names],
                args.workers,
                COUNTED,
                rates if os.geteuid() == 0 else [],
            )
            print(f"{model}: training", file=sys.stderr, flush=True)
            task = {"methods": names, "model": model, "seeds": list(range(args.seeds))}
            curves = {
                name: [Curve(flat[::2], flat[1::2]) for flat in of_seeds]
                for name, of_seeds in zip(names, run(__file__, task, args.workers)[0], strict=True)
            }
            parts.append(_section(model, args.workers, compute, rows, curves, rates))
            found[model] = {
                "compute_s": compute,
                "exchange": [vars(row) for row in rows],
                "curves": {name: [vars(c) for c in each] for name, each in curves.items()},
            }
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    text = args.out.read_text() if args.out.exists() else None
    generated = "\n\n".join(parts)
    args.out.write_text(document.rewritten(text, generated, BEGIN, END, "Compression"))
    return 0


def _section(
    model: str,
    workers: int,
    compute_s: float,
    rows: Sequence[Row],
    curves: dict[str, list[Curve]],
    rates: Sequence[int],
) -> str:
    plain = curves[AS_THEY_ARE]
    at = round(PART * len(plain[0].losses)) - 1
    goal = statistics.mean(curve.losses[at] for curve in plain)
    ways = [(shown_rate(rate), shown_rate(rate) in rows[0].measured_s) for rate in rates]
    how = "measured" if all(measured for _, measured in ways) else f"predicted, headers {HEADERS}"
    elements = rows[0].sent_bytes if rows[0].method == AS_THEY_ARE else 0
    size = shown_size(elements * workers // (2 * (workers - 1)))
    head = ["method", "sent a step", "loss", "right answers", "steps to the loss"]
    head += [f"time at {rate}" for rate, _ in ways]
    lines = [
        f"**{model}**, {workers} ranks, {len(plain)} seeds, {STEPS[model]} steps, {size} of "
        f"gradients as float32; the loss that times are given for is {goal:.3f}; a step computes "
        f"for {1000 * compute_s:.1f} ms, exchanges are {how}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in rows:
        of_method = curves[row.method]
        steps = [curve.steps_to(goal) for curve in of_method]
        median = statistics.median(steps)
        cells = [
            row.method,
            shown_size(row.sent_bytes),
            _interval([curve.losses[-1] for curve in of_method], 1, ""),
            _interval([curve.right[-1] for curve in of_method], 100, " %"),
            _shown_steps(steps),
        ]
        for rate, measured in ways:
            exchange = (row.measured_s if measured else row.predicted_s)[rate]
            taken = median * (compute_s + exchange)
            cells.append("-" if math.isinf(taken) else f"{taken:.2f} s")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval(values: Sequence[float], times: float, unit: str) -> str:
    """Return the mean and its interval of 95 %."""
    if not all(map(math.isfinite, values)):
        return "not finite"
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    digits = 1 if unit else 3
    return f"{times * statistics.mean(values):.{digits}f} ± {times * half:.{digits}f}{unit}"


def _shown_steps(steps: Sequence[float]) -> str:
    median = statistics.median(steps)
    never = sum(map(math.isinf, steps))
    reached = f", {never} of {len(steps)} never" if never else ""
    return f"{'never' if math.isinf(median) else f'{median:.0f}'}{reached}"


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        play(body)
    else:
        sys.exit(main())
