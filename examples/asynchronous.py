"""Workers of unequal speed: plain DDP waits for the slowest, asynchronous training does not.

    fanin run --nproc-per-node 4 examples/asynchronous.py --plot asynchronous.png

The slowest of the workers takes four times as long for a step as the fastest (they sleep). Each
training changes the model as often; it prints how long that took and how right the model is, and
draws the accuracy over time. Half a minute.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fanin.torch import AsynchronousOptimizer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRAINED = 1437  # of 1797 images; the rest is for the accuracy
BATCH = 32  # of each rank
SEED = 7

Curve = list[tuple[float, float]]


class Digits:
    """The images, and the order in which this rank learns them."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SEED))
        train, self._test = order[:TRAINED], order[TRAINED:]
        self._train = train[dist.get_rank() :: dist.get_world_size()]
        self._pixels, self._digits = pixels, digits
        self._drawing = torch.Generator().manual_seed(SEED + dist.get_rank())

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the next batch."""
        drawn = torch.randint(len(self._train), (BATCH,), generator=self._drawing)
        batch = self._train[drawn]
        return nn.functional.cross_entropy(model(self._pixels[batch]), self._digits[batch])

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of right answers on what was held back."""
        with torch.no_grad():
            answers = model(self._pixels[self._test]).argmax(dim=1)
        return float((answers == self._digits[self._test]).float().mean())


def network() -> nn.Module:
    """Return the same one on all ranks."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def synchronous(digits: Digits, changes: int, seconds: float) -> Curve:
    """Train with DDP."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began, curve = time.monotonic(), Curve()
    for _ in range(changes):
        optimizer.zero_grad()
        time.sleep(seconds)
        digits.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        curve.append((time.monotonic() - began, digits.accuracy(model.module)))
    return curve


def asynchronous(digits: Digits, changes: int, seconds: float) -> Curve:
    """Train without waiting for who is late."""
    model = network()
    optimizer = AsynchronousOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    began, curve = time.monotonic(), Curve()
    while optimizer.epoch < changes:
        optimizer.zero_grad()
        time.sleep(seconds)
        digits.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        curve.append((time.monotonic() - began, digits.accuracy(model)))
    steps = torch.tensor([optimizer.steps])
    optimizer.close()
    of_all = [torch.zeros_like(steps) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, steps)
    if dist.get_rank() == 0:
        print("gradients of each rank in the model:", *(int(of_one) for of_one in of_all))
    return [*curve, (curve[-1][0], digits.accuracy(model))]


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Write the PNG."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="seconds", ylabel="accuracy", xlim=0, ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train both ways, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--changes", type=int, default=200, help="of the model")
    parser.add_argument("--seconds", type=float, default=0.02, help="a step of the fastest worker")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fanin")
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = args.seconds * (1 + 3 * rank / max(1, size - 1))
    curves: dict[str, Curve] = {}
    for train in (synchronous, asynchronous):
        dist.barrier()
        curves[train.__name__] = curve = train(Digits(), args.changes, seconds)
        if rank == 0:
            took, right = curve[-1]
            print(f"{train.__name__}: {args.changes} changes in {took:.1f} s, accuracy {right:.3f}")
    if rank == 0 and args.plot is not None:
        draw(curves, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
