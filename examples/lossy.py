"""Training over links that lose packets, twice: with everything sent again, and with a loss bound.

    sudo python examples/lossy.py --plot lossy.png

Builds a laboratory (fanin netlab) in which each link loses packets at random, trains the same small
network on handwritten digits in it with plain DDP, and draws what part of the gradients each step
lost, and how long it took. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin.torch
import torch
import torch.distributed as dist
from fanin import netlab
from fanin.netlab import SWITCH, SWITCH_ADDRESS, Netlab
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED = 7
TRAINED = 1437  # of 1797 images; the rest is for the accuracy
WIDTH = 512  # gradients of 1.2 MB: a tensor of less than 1 / bound packets loses nothing


def train(rank: int, spaces: list[str], args: argparse.Namespace, bound: float, told: Any) -> None:
    """Be one rank; rank 0 tells of each step its time and its loss, and the accuracy at the end."""
    netlab.enter(spaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = netlab.INTERFACE
    torch.set_num_threads(1)
    options = fanin.torch.Options(switch=f"{SWITCH_ADDRESS}:4800", plan="switch", loss_bound=bound)
    dist.init_process_group(
        "fanin",
        init_method=f"file://{args.meeting}-{bound}",
        rank=rank,
        world_size=args.ranks,
        pg_options=options,
    )
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(digits))
    train, test = order[:TRAINED], order[TRAINED:]
    layers = nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for step in range(args.steps):
        batch = train[(32 * (step * args.ranks + rank) + torch.arange(32)) % TRAINED]
        began, before = time.monotonic(), fanin.torch.lost()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took, after = time.monotonic() - began, fanin.torch.lost()
        steps.append((took, (after[0] - before[0]) / max(1, after[1] - before[1])))
    if rank == 0:
        with torch.no_grad():
            right = (model.module(pixels[test]).argmax(dim=1) == digits[test]).float().mean()
        told.put((steps, right.item()))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def summing(lab: Netlab) -> Iterator[None]:
    """Have a switch in the middle of the laboratory."""
    command = [sys.executable, "-m", "fanin", "switch", "--listen", f"{SWITCH_ADDRESS}:4800"]
    switch = lab.popen(SWITCH, [*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert switch.stdout is not None
        switch.stdout.readline()  # it listens
        yield
    finally:
        switch.terminate()
        switch.communicate()


def draw(runs: dict[float, Any], path: Path) -> None:
    """Write the PNG."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, layout="constrained")
    for bound, (steps, _) in runs.items():
        name = f"at most {100 * bound:g} % lost" if bound else "nothing lost"
        above.plot([1e3 * took for took, _ in steps], label=name, linewidth=1)
        below.plot([100 * lost for _, lost in steps], label=name, linewidth=1)
    above.set(ylabel="step (ms)", ylim=0)
    below.set(ylabel="gradients lost (%)", xlabel="step", ylim=0)
    above.legend()
    figure.savefig(path)


def main() -> None:
    """Train both, print both, and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--loss", type=float, default=0.01, help="of each link's packets")
    parser.add_argument("--bound", type=float, default=0.02, help="of each rank's gradients")
    parser.add_argument("--rate", type=int, default=100_000_000, help="of each link, bits a second")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    runs: dict[float, Any] = {}
    with contextlib.ExitStack() as stack:
        args.meeting = stack.enter_context(tempfile.TemporaryDirectory()) + "/ranks"
        lab = Netlab(args.ranks, rate_bps=args.rate, loss=args.loss, name="lossy")
        stack.enter_context(lab)
        stack.enter_context(summing(lab))
        spaces = [lab.namespace(f"w{rank}") for rank in range(args.ranks)]
        for bound in (0.0, args.bound):
            told = context.Queue()
            ranks = [
                context.Process(target=train, args=(rank, spaces, args, bound, told))
                for rank in range(args.ranks)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                sys.exit("a rank failed")
            runs[bound] = told.get()
    for bound, (steps, accuracy) in runs.items():
        times = sorted(took for took, _ in steps[5:])  # the first ones make DDP's buckets
        lost = statistics.fmean(lost for _, lost in steps)
        print(
            f"bound {bound:g}: accuracy {accuracy:.3f}, {100 * lost:.2f} % of the gradients lost; "
            f"a step takes {1e3 * statistics.median(times):.1f} ms, "
            f"the slowest {1e3 * times[-1]:.1f} ms"
        )
    if args.plot is not None:
        draw(runs, args.plot)


if __name__ == "__main__":
    main()
