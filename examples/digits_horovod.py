"""Handwritten digits (scikit-learn's 8 x 8 pixels) with Horovod's interface, elastic.

    fanin run -np 2 examples/digits_horovod.py
    fanin run -np 4 --min-np 2 examples/digits_horovod.py --epochs 200

Kill a rank of the second: the others go on from the last commit, and a new one joins them.
"""

from __future__ import annotations

import argparse
from typing import Any

import fanin.horovod as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 7
TRAINED = 1437  # of 1797 images; the rest is for the accuracy


def main() -> None:
    """Train, then count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16.0
    digits = torch.tensor(labels)
    order = torch.randperm(len(digits))
    train_on, test = order[:TRAINED], order[TRAINED:]

    data = TensorDataset(pixels[train_on], digits[train_on])
    sampler = hvd.elastic.ElasticSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < args.epochs:
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                state.sampler.record_batch(number, 32)
                if number % 10 == 9:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}, {hvd.size()} ranks, loss {loss:.3f}", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
    with torch.no_grad():
        right = (model(pixels[test]).argmax(dim=1) == digits[test]).float().mean().item()
    if hvd.rank() == 0:
        print(f"accuracy {right:.3f} on {len(test)} digits", flush=True)


if __name__ == "__main__":
    main()
