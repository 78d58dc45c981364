"""A residual network (ResNet-20) on images of CIFAR-10's shape, with plain DDP.

    fanin run --nproc-per-node 2 examples/resnet.py
    torchrun --nproc-per-node 2 examples/resnet.py --backend gloo

The images are made up, so that nothing is loaded from the network: each class is a texture, with
noise upon it. `--data FILE` takes your own: a file of `torch.save` with a pair of tensors, uint8
images of shape (N, 3, 32, 32) and int64 labels of shape (N,).
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
SEED = 7


class Block(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.around = (
            nn.Identity()
            if inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, ...), halved where it widens."""
        y = functional.relu(self.norm_1(self.first(x)))
        return functional.relu(self.norm_2(self.second(y)) + self.around(x))


def resnet(blocks: int) -> nn.Module:
    """Return a ResNet of 6 * `blocks` + 2 layers, as its paper has it for CIFAR-10."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(blocks):
            layers.append(Block(inputs, outputs))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def textures(images: int) -> tuple[Tensor, Tensor]:
    """Return made-up images and their classes, alike on every rank."""
    dice = torch.Generator().manual_seed(SEED)
    kinds = torch.rand(CLASSES, 3, 8, 8, generator=dice)
    labels = torch.randint(CLASSES, (images,), generator=dice)
    noise = torch.rand(images, 3, 32, 32, generator=dice)
    mixed = 0.4 * kinds[labels].tile(1, 1, 4, 4) + 0.6 * noise
    return (mixed * 255).to(torch.uint8), labels


def main() -> None:
    """Train, then count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fanin", help="any backend of torch.distributed")
    parser.add_argument("--data", metavar="FILE", help="your own images")
    parser.add_argument("--images", type=int, default=2000, help="how many are made up")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--blocks", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    torch.manual_seed(SEED)
    images, labels = torch.load(args.data) if args.data else textures(args.images)
    held_back = len(labels) // 5
    data = TensorDataset(images[held_back:], labels[held_back:])
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(resnet(args.blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began = time.monotonic()
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x / 255.0 - 0.5), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        speed = len(loader) * args.batch * dist.get_world_size() / (time.monotonic() - began)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}  loss {loss.item():.3f}  {speed:.0f} images/s", flush=True)

    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            guessed = model.module(images[:held_back] / 255.0 - 0.5).argmax(dim=1)
        right = (guessed == labels[:held_back]).float().mean().item()
        print(f"accuracy {right:.3f} on {held_back} images", flush=True)
    # No rank tears its connections down while another still works: Gloo may abort when they close.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
