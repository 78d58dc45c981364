"""A step of FSDP2 on fanin beside one on Gloo: `python benches/sharded.py`, as root.

Every machine is a namespace, behind one shaped link, with a rank or several, and the ranks' own
services sum. The model is wide and its batch small, so that a step is what is gathered and
scattered; both backends train the same model from the same start, in turns, and their losses are
compared. As a program with arguments, this file is one such rank.
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
from typing import Any

from fanin_lab.netlab import INTERFACE, Netlab

WIDTH = 1024
"""A layer is WIDTH x WIDTH: 4 MiB of float32. FSDP2 gathers layers one by one."""
BACKENDS = ("fanin", "gloo")


def main() -> int:
    """Measure, and print a line for each backend."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks-per-machine", type=int, default=1)
    parser.add_argument("--rate-bps", type=int, default=10**9)
    parser.add_argument("--steps", type=int, default=7, help="of each backend; the first warms up")
    parser.add_argument("--layers", type=int, default=8, help="of the model, 4 MiB each")
    args = parser.parse_args()
    grouped = args.ranks_per_machine
    if args.workers % grouped:
        parser.error(f"{args.workers} ranks do not fill machines of {grouped}")
    with (
        tempfile.TemporaryDirectory() as directory,
        Netlab(args.workers // grouped, rate_bps=args.rate_bps, name=f"shard{os.getpid()}") as lab,
    ):
        meeting = Path(directory) / "rendezvous"
        ranks = []
        for rank in range(args.workers):
            command = [sys.executable, __file__, "rank", str(rank), str(args.workers)]
            command += [str(meeting), str(args.rate_bps), str(args.steps), str(args.layers)]
            machine = f"w{rank // grouped}"
            ranks.append(lab.popen(machine, command, stdout=subprocess.PIPE, text=True))
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        print("a rank failed", file=sys.stderr)
        return 1
    found = [json.loads(text.splitlines()[-1]) for text in said]
    slowest = {
        backend: [max(times) for times in zip(*(of[backend] for of in found), strict=True)]
        for backend in BACKENDS
    }
    medians = {backend: statistics.median(times[1:]) for backend, times in slowest.items()}
    for backend, median in medians.items():
        times = slowest[backend][1:]
        spread = f"{1000 * min(times):.0f} to {1000 * max(times):.0f}"
        print(f"{backend}: {1000 * median:.0f} ms a step ({spread})")
    print(f"fanin is {medians['gloo'] / medians['fanin']:.2f} times as fast as Gloo")
    first, last = found[0]["losses"]
    difference = max(of["difference"] for of in found)
    print(f"rank 0's loss went from {first:.4f} to {last:.4f}; losses differ by {difference:.1e}")
    return 0


def be_rank(
    rank: int, world_size: int, meeting: str, rate_bps: int, steps: int, layers: int
) -> dict[str, Any]:
    """Train both models, and return the seconds of each step."""
    import torch
    import torch.distributed as dist
    from fanin.torch import Options
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    groups: dict[str, Any] = {
        "fanin": dist.new_group(backend="fanin", pg_options=Options(rate=rate_bps)),
        "gloo": dist.group.WORLD,
    }
    models: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    for backend, group in groups.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *[
                layer
                for _ in range(layers)
                for layer in (torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU())
            ]
        )
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                fully_shard(layer, mesh=mesh)
        models[backend] = fully_shard(model, mesh=mesh)
        optimizers[backend] = torch.optim.SGD(model.parameters(), lr=1e-2)
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    losses: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    generator = torch.Generator().manual_seed(rank + 1)
    for _ in range(steps):
        batch = torch.randn(2, WIDTH, generator=generator)
        for backend in BACKENDS:
            dist.barrier()
            began = time.monotonic()
            loss = (models[backend](batch) - 1).square().mean()
            loss.backward()
            optimizers[backend].step()
            optimizers[backend].zero_grad()
            times[backend].append(time.monotonic() - began)
            losses[backend].append(loss.item())
    pairs = zip(losses["fanin"], losses["gloo"], strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    dist.barrier()
    ends = [losses["fanin"][0], losses["fanin"][-1]]
    return {**times, "difference": difference, "losses": ends}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank, world_size, meeting, *numbers = sys.argv[2:]
        found = be_rank(int(rank), int(world_size), meeting, *map(int, numbers))
        print(json.dumps(found), flush=True)
        os._exit(0)  # PyTorch may abort a process that is taken apart
    else:
        sys.exit(main())
