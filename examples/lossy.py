"""Training over links that lose packets, twice: with everything sent again, and with a loss bound.

    sudo python examples/lossy.py --plot lossy.png

Builds a laboratory (fanin netlab) in which each link loses packets at random, trains the same small
network on handwritten digits in it with plain DDP, and draws what part of the gradients each step
lost, and how long it took. About a minute on two cores. With --seeds 5 --gloo it trains five times
each, and with Gloo as well: the accuracy after as many steps, and the time to one. With
--loss-burst 8 links lose packets in a row, and with --convolutional the network is larger.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fanin.torch
import torch
import torch.distributed as dist
from fanin_lab import netlab
from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRAINED = 1437  # of 1797 images; the rest is for the accuracy
BATCH = 32  # of each rank
WIDTH = 512  # gradients of 1.2 MB: a tensor of less than 1 / bound packets loses nothing
GLOO = -1.0
"""In place of a bound."""


@dataclass(frozen=True)
class Run:
    """One training: of each step how long it took and what part was lost, and accuracies."""

    steps: list[tuple[float, float]]
    accuracies: list[tuple[int, float]]
    """After how many steps."""

    def time_to(self, accuracy: float) -> float:
        """Return the seconds of training that it took, infinite if it did not come to it."""
        reached = (step for step, found in self.accuracies if found >= accuracy)
        step = next(reached, None)
        return float("inf") if step is None else sum(took for took, _ in self.steps[:step])


def dense() -> nn.Module:
    """Return a network with gradients of 1.2 MB."""
    layers = nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def convolutional() -> nn.Module:
    """Return one of 1.1 million parameters, with gradients of 4.5 MB."""
    images = nn.Unflatten(1, (1, 8, 8))
    first = nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(
        images, *first, *second, nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def train(
    rank: int, spaces: list[str], args: argparse.Namespace, bound: float, seed: int, told: Any
) -> None:
    """Be one rank; rank 0 tells."""
    netlab.enter(spaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = netlab.INTERFACE
    torch.set_num_threads(1)
    meeting = f"file://{args.meeting}-{bound}-{seed}"
    if bound == GLOO:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.ranks)
    else:
        switch = f"{SWITCH_ADDRESS}:4800"
        # A virtual interface does not tell what its link carries.
        rate = f"{args.rate}bit"
        options = fanin.torch.Options(switch=switch, plan="switch", rate=rate, loss_bound=bound)
        dist.init_process_group(
            "fanin",
            init_method=meeting,
            rank=rank,
            world_size=args.ranks,
            pg_options=options,
        )
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(digits))
    train, test = order[:TRAINED], order[TRAINED:]
    model = DistributedDataParallel(convolutional() if args.convolutional else dense())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)

    def lost_so_far() -> tuple[int, int]:
        return (0, 0) if bound == GLOO else fanin.torch.lost()

    epoch = TRAINED // (BATCH * args.ranks)
    run = Run([], [])
    for step in range(args.steps):
        batch = train[(BATCH * (step * args.ranks + rank) + torch.arange(BATCH)) % TRAINED]
        began, before = time.monotonic(), lost_so_far()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took, after = time.monotonic() - began, lost_so_far()
        run.steps.append((took, (after[0] - before[0]) / max(1, after[1] - before[1])))
        if (step + 1) % epoch == 0 or step + 1 == args.steps:
            with torch.no_grad():
                right = (model.module(pixels[test]).argmax(dim=1) == digits[test]).float().mean()
            run.accuracies.append((step + 1, right.item()))
            dist.barrier()  # the next step begins for all
    if rank == 0:
        told.put(run)
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


def name(bound: float) -> str:
    """Return whom the bound is of."""
    if bound == GLOO:
        return "Gloo"
    return f"at most {100 * bound:g} % lost" if bound else "nothing lost"


def draw(runs: dict[float, list[Run]], path: Path) -> None:
    """Write the PNG: the first training of each."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, layout="constrained")
    for bound, (run, *_) in runs.items():
        above.plot([1e3 * took for took, _ in run.steps], label=name(bound), linewidth=1)
        if bound != GLOO:
            below.plot([100 * lost for _, lost in run.steps], label=name(bound), linewidth=1)
    above.set(ylabel="step (ms)", ylim=0)
    below.set(ylabel="gradients lost (%)", xlabel="step", ylim=0)
    above.legend()
    figure.savefig(path)


def tell(bound: float, runs: list[Run], target: float) -> str:
    """Return a line about the trainings with a bound."""
    steps = [step for run in runs for step in run.steps[5:]]  # the first ones make DDP's buckets
    times = sorted(took for took, _ in steps)
    lost = statistics.fmean(lost for _, lost in steps)
    return (
        f"{name(bound)}: accuracy {spread([run.accuracies[-1][1] for run in runs], '.3f')}, "
        f"{spread([run.time_to(target) for run in runs], '.1f')} s to {target:g}; "
        f"{100 * lost:.2f} % of the gradients lost; "
        f"a step takes {1e3 * statistics.median(times):.1f} ms, "
        f"the slowest {1e3 * times[-1]:.1f} ms"
    )


def spread(values: list[float], shown: str) -> str:
    """Return the median, and of several the least and the most."""
    median, least, most = (f"{of(values):{shown}}" for of in (statistics.median, min, max))
    return median if len(values) == 1 else f"{median} ({least} to {most})"


def main() -> None:
    """Train with each, print what came of it, and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, help="trainings with each")
    parser.add_argument("--gloo", action="store_true", help="with Gloo, too")
    parser.add_argument("--loss", type=float, default=0.01, help="of each link's packets")
    parser.add_argument("--loss-burst", type=int, help="packets that are lost in a row")
    parser.add_argument("--bound", type=float, default=0.02, help="of each rank's gradients")
    parser.add_argument("--rate", type=int, default=100_000_000, help="of each link, bits a second")
    parser.add_argument("--target", type=float, default=0.9, help="the accuracy to come to")
    parser.add_argument(
        "--convolutional", action="store_true", help="a network of 1.1 million parameters"
    )
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    runs: dict[float, list[Run]] = {bound: [] for bound in (0.0, args.bound)}
    if args.gloo:
        runs[GLOO] = []
    with contextlib.ExitStack() as stack:
        args.meeting = stack.enter_context(tempfile.TemporaryDirectory()) + "/ranks"
        lab = Netlab(
            args.ranks,
            rate_bps=args.rate,
            loss=args.loss,
            loss_burst=args.loss_burst,
            name="lossy",
        )
        stack.enter_context(lab)
        stack.enter_context(summing(lab))
        spaces = [lab.namespace(f"w{rank}") for rank in range(args.ranks)]
        for seed in range(1, args.seeds + 1):
            for bound, trained in runs.items():
                told = context.Queue()
                ranks = [
                    context.Process(target=train, args=(rank, spaces, args, bound, seed, told))
                    for rank in range(args.ranks)
                ]
                for process in ranks:
                    process.start()
                for process in ranks:
                    process.join()
                if any(process.exitcode for process in ranks):
                    sys.exit("a rank failed")
                trained.append(told.get())
    for bound, trained in runs.items():
        print(tell(bound, trained, args.target))
    if args.plot is not None:
        draw(runs, args.plot)


if __name__ == "__main__":
    main()
