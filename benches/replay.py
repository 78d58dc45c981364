"""Steps that are predicted from recorded ones, beside measured ones: `python benches/replay.py`.

As root: machines are namespaces behind one shaped link, with one rank each. A training is recorded
at each rate (FANIN_TRACE), and each recording predicts the steps at all rates: by `fanin plan
--trace`, and by `fanin sim`, which plays its layers (`fanin trace`) packet by packet. As in
`overlap.py`, a layer waits as long as a GPU would compute. DDP takes turns: on a switch, on the
ranks' own services, and on Gloo, a ring. It writes the table of docs/planning.md. As a program with
arguments, this file is one rank.
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
from pathlib import Path
from typing import Any, TypeAlias

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
BACKENDS = {"switch": "on a switch", "own": "on own services", "gloo": "on Gloo"}
SYSTEMS = {"switch": "switchml", "gloo": "ring"}
"""As the simulator calls them; it has no system like the own services."""
SCENARIO = """
until = "1000s"
payload = "sample"
[network]
topology = "rack"
hosts = {workers}
rate = "{rate_bps}bit"
[[job]]
system = "{system}"
workers = {workers}
layers = "{layers}"
iterations = 3
"""

Predicted: TypeAlias = dict[str, dict[str, float]]
"""Seconds by predictor (plan, sim) and backend."""


def main() -> int:
    """Measure, predict, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "vgg"])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--computing", type=float, default=0.6, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=12, help="of each backend's turn")
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    where = machine.where()
    lines = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as directory:
            measured = {rate: measure(args, model, rate, Path(directory)) for rate in args.rates}
            for rate in args.rates:
                predicted = [predict(Path(directory), recorded, rate) for recorded in args.rates]
                lines.append(_row(model, rate, measured[rate], predicted))
    heads = ["model", "links"]
    for name, where_to in BACKENDS.items():
        heads += [f"DDP {where_to}", "planned, by that"]
        heads += ["simulated, by that"] if name in SYSTEMS else []
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
    model: str, rate: str, measured: dict[str, float], predicted: list[Predicted]
) -> list[str]:
    cells = [model, rate]
    for backend in BACKENDS:
        cells.append(f"{1e3 * measured[backend]:.0f} ms")
        for way in ("plan", "sim") if backend in SYSTEMS else ("plan",):
            ratios = [each[way][backend] / measured[backend] for each in predicted]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
    return cells


def measure(args: argparse.Namespace, model: str, rate: str, into: Path) -> dict[str, float]:
    """Return the seconds of a step by backend; the timelines of fanin's lie in `into`."""
    with Netlab(WORKERS, rate_bps=rate_bps(rate), name=f"replay{os.getpid()}") as lab:
        lab_ranks.start_switch(lab)
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


def predict(recordings: Path, recorded: str, rate: str) -> Predicted:
    """Return what plan and simulator make of the timelines of one rate, for links of another."""
    timelines = [str(path) for path in sorted(recordings.glob(f"{recorded}.*.json"))]
    machines = ["plan", "--json", "--machines", WORKERS, "--rate", rate]
    own = _fanin(*machines, "--trace", *timelines)
    switch = ["--spare", 1, "--spare-rate", f"{WORKERS * rate_bps(rate)}bit"]
    plan = {
        "switch": _fanin(*machines, *switch, "--trace", *timelines)["one_switch"]["time_s"],
        "own": own["split"]["time_s"],
        "gloo": own["ring_s"],
    }
    layers = recordings / f"{recorded}.toml"
    _fanin("trace", "--json", "--out", layers, *timelines)
    sim = {}
    for name, system in SYSTEMS.items():
        scenario = recordings / f"{recorded}-{rate}-{system}.toml"
        scenario.write_text(
            SCENARIO.format(
                workers=WORKERS, rate_bps=rate_bps(rate), system=system, layers=layers.name
            )
        )
        (job,) = _fanin("sim", scenario, "--json", "-")["result"]["jobs"]
        sim[name] = job["finished_s"] / job["training"]["iterations"]
    return {"plan": plan, "sim": sim}


def _fanin(*arguments: object) -> Any:
    command = [sys.executable, "-m", "fanin", *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


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
    at_switch = Options(rate=args.rate, switch=lab_ranks.SWITCH_AT, plan="switch")
    groups: dict[str, Any] = {
        "switch": dist.new_group(backend="fanin", pg_options=at_switch),
        "own": dist.new_group(backend="fanin", pg_options=options),
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
