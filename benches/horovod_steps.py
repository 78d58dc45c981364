"""A step of ResNet-50's gradients by `fanin.horovod`, beside DDP on fanin and on Gloo, by turns.

    python benches/horovod_steps.py [--ranks 4] [--steps 10]

The 161 gradients have ResNet-50's shapes, and computing takes next to nothing: what is measured is
how soon the ranks agree on them, and sum them. The ranks are processes of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any


def shapes() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of ResNet-50's parameters (He et al., 2016, Table 1)."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inner_before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in (
                (width, inner_before, 1),
                (width, width, 3),
                (4 * width, width, 1),
            ):
                yield from ((out, into, kernel, kernel), (out,), (out,))
            if block == 0:
                yield from ((4 * width, inner_before, 1, 1), (4 * width,), (4 * width,))
            inner_before = 4 * width
    yield from ((1000, 2048), (1000,))


def be_rank(steps: int) -> None:
    """Play one rank; rank 0 prints the milliseconds of each way's steps."""
    import fanin.horovod as hvd
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Gradients(nn.Module):
        """Parameters whose gradients are themselves: computing takes next to nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.ones(shape) for shape in shapes())

        def forward(self) -> torch.Tensor:
            """Return what has them all in it."""
            return torch.stack([each.sum() for each in self.all]).sum()

    torch.set_num_threads(1)
    dist.init_process_group("fanin")
    hvd.init()
    gloo = dist.new_group(backend="gloo")
    ways: dict[str, tuple[Any, Any]] = {}
    for name, group in (("DDP on fanin", None), ("DDP on Gloo", gloo)):
        ddp = DistributedDataParallel(Gradients(), process_group=group)
        ways[name] = ddp, torch.optim.SGD(ddp.parameters(), lr=0.0)
    plain = Gradients()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.0)
    ways["fanin.horovod"] = plain, hvd.DistributedOptimizer(sgd, plain.named_parameters())
    took: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 2):
        for name, (model, optimizer) in ways.items():
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            dist.barrier()
            if step >= 2:
                took[name].append(1000 * (time.perf_counter() - began))
    if dist.get_rank() == 0:
        print(json.dumps(took))
    hvd.shutdown()
    dist.destroy_process_group()


def main() -> int:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_rank(args.steps)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["--master-port", "29517", __file__, "--rank", "--steps", str(args.steps)]
    said = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
    ).stdout
    took = json.loads(said)
    usual = statistics.median(took["DDP on fanin"])
    for name, each in took.items():
        median = statistics.median(each)
        print(
            f"{name}: {median:.0f} ms ({min(each):.0f} to {max(each):.0f}), "
            f"{median / usual:.2f} times DDP on fanin"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
