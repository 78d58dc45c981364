"""Training where one worker computes slowly: `python benches/slow_worker.py`, as root.

Every machine is a namespace behind one shaped link, with one rank. A step computes a gradient of
digits, and waits as long as a GPU would compute: the last rank `--slower` times as long. DDP waits
for that rank in every step. `AsynchronousOptimizer` and `DeltaOptimizer`, whose parameters the
ranks keep, do not. All train for as many seconds. The loss is that of held-back images, over some
seeds. A gradient has the same weight in DDP, which averages, and in `DeltaOptimizer`, which adds:
the latter's learning rate is that of DDP divided by the number of workers, times `--delta-lr`.
As a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import lab_ranks
from fanin_lab.netlab import INTERFACE, Netlab

MODES = ("DDP", "asynchronous", "delta", "delta, overlap")
TRAINED = 1437
"""The images to train with, among 1797; the loss is that of the rest."""
BATCH = 32
MARKS = 8
"""How often the loss is taken."""
TRIED = 3
"""Steps of DDP that tell how many fill the time."""


class Trained(TypedDict):
    """A rank's report of a training."""

    steps: int
    seconds: float
    curve: list[float]
    """The losses, at marks in time."""


def main() -> int:
    """Measure, and print for each system its steps and its losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate-bps", type=int, default=200_000_000, help="of each link")
    parser.add_argument("--hidden", type=int, default=512, help="neurons of each hidden layer")
    parser.add_argument("--computing-ms", type=float, default=50.0, help="of a step")
    parser.add_argument("--slower", type=float, default=4.0, help="the last worker's computing")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each training")
    parser.add_argument("--lr", type=float, default=0.1, help="of DDP's SGD")
    parser.add_argument("--delta-lr", type=float, default=1.0, help="the weight of a delta")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Netlab(args.workers, rate_bps=args.rate_bps, name=f"w{os.getpid()}") as lab,
    ):
        told = {**vars(args), "meeting": str(Path(folder) / "store")}
        found: list[dict[str, list[Trained]]] = lab_ranks.answers(lab, __file__, told)
    marks = [args.seconds * (mark + 1) / MARKS for mark in range(MARKS)]
    print(f"loss after {' '.join(f'{mark:.1f}' for mark in marks)} s, mean of {args.seeds} seeds")
    for mode in MODES:
        speeds = [
            statistics.mean(each["steps"] / each["seconds"] for each in of[mode]) for of in found
        ]
        losses = zip(*(each["curve"] for each in found[0][mode]), strict=True)
        print(
            f"{mode}: {sum(speeds):.1f} steps/s of all workers, {speeds[-1]:.1f} of the slow one; "
            f"loss {' '.join(f'{statistics.mean(loss):.3f}' for loss in losses)}"
        )
    return 0


def be_rank(args: argparse.Namespace) -> dict[str, list[Trained]]:
    """Train with all systems, and return what became of each seed."""
    import torch
    import torch.distributed as dist
    from fanin.torch import AsynchronousOptimizer, DeltaOptimizer
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ["FANIN_RATE"] = f"{args.rate_bps}bit"
    torch.set_num_threads(1)
    dist.init_process_group(
        "fanin",
        init_method=f"file://{args.meeting}",
        rank=args.rank,
        world_size=args.workers,
        timeout=timedelta(seconds=300),
    )
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    is_slow = args.rank == args.workers - 1
    computing = args.computing_ms / 1000 * (args.slower if is_slow else 1.0)

    def train(mode: str, seed: int) -> Trained:
        torch.manual_seed(seed)
        order = torch.randperm(len(digits))
        mine, held = order[:TRAINED][args.rank :: args.workers], order[TRAINED:]
        layers = [nn.Linear(64, args.hidden), nn.ReLU(), nn.Linear(args.hidden, args.hidden)]
        network = nn.Sequential(*layers, nn.ReLU(), nn.Linear(args.hidden, 10))
        drawing = torch.Generator().manual_seed(1000 * seed + args.rank)
        of_delta = args.delta_lr / args.workers if mode.startswith("delta") else 1.0
        inner = torch.optim.SGD(network.parameters(), lr=args.lr * of_delta)
        model: nn.Module = network
        optimizer: Any = inner
        if mode == "DDP":
            model = DistributedDataParallel(network)
        elif mode == "asynchronous":
            optimizer = AsynchronousOptimizer(inner)
        else:
            optimizer = DeltaOptimizer(inner, overlap=mode.endswith("overlap"))

        def step() -> None:
            batch = mine[torch.randint(len(mine), (BATCH,), generator=drawing)]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            # In the place of a GPU: the machine's own cores are shared by all workers.
            time.sleep(computing)
            optimizer.step()

        def held_loss() -> float:
            with torch.no_grad():
                return float(nn.functional.cross_entropy(network(pixels[held]), digits[held]))

        # Ranks of DDP do as many steps, which rank 0 tells. They are a part of the training.
        steps, steps_max = 0, math.inf
        dist.barrier()
        began = time.monotonic()
        curve: list[float] = []
        while steps < steps_max and (mode == "DDP" or time.monotonic() - began < args.seconds):
            step()
            steps += 1
            if mode == "DDP" and steps == TRIED:
                took = (time.monotonic() - began) / TRIED
                agreed = [math.ceil(args.seconds / took)]
                dist.broadcast_object_list(agreed)
                steps_max = agreed[0]
            passed = time.monotonic() - began
            while len(curve) < MARKS and passed * MARKS >= args.seconds * (len(curve) + 1):
                curve.append(held_loss())
        seconds = time.monotonic() - began
        if optimizer is not inner:
            optimizer.close()
        dist.barrier()
        curve += [held_loss()] * (MARKS - len(curve))
        return {"steps": steps, "seconds": seconds, "curve": curve}

    found: dict[str, list[Trained]] = {mode: [] for mode in MODES}
    for seed in range(args.seeds):
        for mode in MODES:
            found[mode].append(train(mode, seed))
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    lab_ranks.run(main, be_rank)
