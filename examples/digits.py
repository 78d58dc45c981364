"""Handwritten digits (scikit-learn's 8 x 8 pixels), a small network, plain DDP.

    fanin run --nproc-per-node 2 examples/digits.py
    fanin profile loss-tolerance --target 0.9 --nproc-per-node 2 examples/digits.py

Prints the accuracy on digits that were held back, and reports it after each epoch for the second.
"""

from __future__ import annotations

import argparse

import fanin.profile
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 7
TRAINED = 1437  # of 1797 images; the rest is for the accuracy


def main() -> None:
    """Train, then count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fanin", help="any backend of torch.distributed")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16.0
    digits = torch.tensor(labels)
    order = torch.randperm(len(digits))
    train, test = order[:TRAINED], order[TRAINED:]

    data = TensorDataset(pixels[train], digits[train])
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            right = (model.module(pixels[test]).argmax(dim=1) == digits[test]).float().mean().item()
        fanin.profile.report(accuracy=right)

    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f} on {len(test)} digits, after {args.epochs} epochs", flush=True)
    # No rank tears its connections down while another still works: Gloo may abort when they close.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
