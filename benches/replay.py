"""Steps as `fanin plan --trace` predicts them, beside measured ones: `python benches/replay.py`.

As root: machines are namespaces behind one shaped link, with one rank each. A training is recorded
at each rate (FANIN_TRACE), and each recording predicts the steps at all rates. As in `overlap.py`,
a layer waits as long as a GPU would compute. DDP on fanin and on Gloo, a ring, take turns. It
writes the table of docs/planning.md. As a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import document
import lab_ranks
from fanin_lab.bench import machine
from fanin_lab.netlab import INTERFACE, Netlab
from fanin_lab.units import rate_bps
from overlap import MODELS, model_of, step_of
from performance import ROOT

BEGIN = "<!-- what stands from here on is written by `python benches/replay.py` -->"
END = "<!-- written by `python benches/replay.py` to here -->"
PATH = ROOT / "docs" / "planning.md"
RATES = ("100mbit", "200mbit", "1gbit")
WORKERS = 4
BUCKET_MB = 4
WARM_UP = 3
BACKENDS = ("fanin", "gloo")


def main() -> int:
    """Measure, predict, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "vgg"])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--computing", type=float, default=0.6, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=12, help="of each backend's turn")
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    where = {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }
    lines = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as directory:
            measured = {rate: measure(args, model, rate, Path(directory)) for rate in args.rates}
            for rate in args.rates:
                predicted = [predict(Path(directory), recorded, rate) for recorded in args.rates]
                lines.append(_row(model, rate, measured[rate], predicted))
    heads = ["model", "links", *("DDP on fanin", "predicted by each recording, by that")]
    heads += ["DDP on Gloo", "predicted, by that"]
    text = "\n".join(
        [
            document.where_line("python benches/replay.py", where),
            f"{WORKERS} machines, {1e3 * args.computing:.0f} ms of computing, medians of "
            f"{args.steps - WARM_UP} steps. Recorded at {', '.join(args.rates)}, in this order.\n",
            document.table(heads, lines),
        ]
    )
    args.into.write_text(document.rewritten(args.into.read_text(), text, BEGIN, END, "Planning"))
    return 0


def _row(
    model: str, rate: str, measured: dict[str, float], predicted: list[dict[str, float]]
) -> list[str]:
    cells = [model, rate]
    for backend in BACKENDS:
        ratios = [each[backend] / measured[backend] for each in predicted]
        cells.append(f"{1e3 * measured[backend]:.0f} ms")
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
    return cells


def measure(args: argparse.Namespace, model: str, rate: str, into: Path) -> dict[str, float]:
    """Return the seconds of a step by backend; the timelines of fanin's lie in `into`."""
    with Netlab(WORKERS, rate_bps=rate_bps(rate), name=f"replay{os.getpid()}") as lab:
        told = {
            "model": model,
            "rate": rate_bps(rate),
            "computing": args.computing,
            "steps": args.steps,
            "meeting": str(into / f"meeting-{rate}"),
            "trace": str(into / f"{rate}.json"),
        }
        times = lab_ranks.answers(lab, __file__, told)
    slowest = {
        name: [max(step) for step in zip(*(t[name] for t in times), strict=True)]
        for name in BACKENDS
    }
    return {name: statistics.median(steps) for name, steps in slowest.items()}


def predict(recordings: Path, recorded: str, rate: str) -> dict[str, float]:
    """Return what `fanin plan` makes of the timelines of one rate, for links of another."""
    command = [sys.executable, "-m", "fanin", "plan", "--json", "--machines", str(WORKERS)]
    command += ["--rate", rate, "--trace", *map(str, sorted(recordings.glob(f"{recorded}.*.json")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    return {"fanin": said["split"]["time_s"], "gloo": said["ring_s"]}


def be_rank(args: argparse.Namespace) -> dict[str, list[float]]:
    """Train by DDP on each backend, and return the seconds of each step."""
    import torch
    import torch.distributed as dist
    from fanin.torch import Options
    from torch.nn.parallel import DistributedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    meeting = f"file://{args.meeting}"
    dist.init_process_group("gloo", init_method=meeting, rank=args.rank, world_size=WORKERS)
    options = Options(rate=args.rate, trace=args.trace)
    groups: dict[str, Any] = {
        "fanin": dist.new_group(backend="fanin", pg_options=options),
        "gloo": None,
    }
    times: dict[str, list[float]] = {}
    for name, group in groups.items():
        net = model_of(torch, list(MODELS[args.model]()), args.computing)
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=BUCKET_MB)
        step = step_of(torch, model, torch.optim.SGD(net.parameters(), lr=0.1))
        took = times[name] = []
        dist.barrier()
        for number in range(args.steps):
            began = time.monotonic()
            step()
            if number >= WARM_UP:
                took.append(time.monotonic() - began)
    dist.barrier()
    return times


if __name__ == "__main__":
    lab_ranks.run(main, be_rank)
