"""Steps whose sums hide under the next forward pass, beside DDP: `python benches/overlap.py`.

As root: every machine is a namespace behind one shaped link, with one rank, and the ranks' own
services sum. A layer waits as long as a GPU would compute, and computes nothing: the machines of
this laboratory share a processor, which real layers would fight for. So each layer's time is what
it is told to be, and what is measured is the communication. Forward takes a third of the computing,
backward the rest, and all of it `--computing` times as long as the model's sum takes on fanin.

`DistributedOptimizer`, also with parts of it left out, and DDP on fanin and on Gloo take turns. As
a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lab_ranks
from fanin_lab.netlab import INTERFACE, Netlab

Layer = tuple[list[int], float]
"""The elements of its tensors, and its part of the computing."""

VGG16 = [
    *[(3, 64, 0.087), (64, 64, 1.85), (64, 128, 0.925), (128, 128, 1.85), (128, 256, 0.925)],
    *[(256, 256, 1.85), (256, 256, 1.85), (256, 512, 0.925), (512, 512, 1.85), (512, 512, 1.85)],
    *[(512, 512, 0.462), (512, 512, 0.462), (512, 512, 0.462)],
]
"""Channels in and out, and 10^9 multiplications of an image."""
VGG16_DENSE = [(25088, 4096, 0.103), (4096, 4096, 0.017), (4096, 1000, 0.004)]
BUCKETS_MB = (25, 4, 1)
"""DDP's default, and what suits models that are as small as these."""
WARM_UP = 5
"""Steps of each turn that are not counted: rank 0 learns in the first ones."""
RATE_BPS_MIN = 1_000_000
PARTS = ("overlap", "partitions", "order", "native")
"""Each with those before it: the last is all of `DistributedOptimizer`, and how floats travel."""


def gpt(width: int = 141, blocks: int = 32) -> Iterator[Layer]:
    """Return the shape of GPT-3 6.7B, which is 4096 wide: a thirtieth is its table of tokens."""
    squared = width * width
    yield [50257 * width // 4096 * width], 0.0
    for _ in range(blocks):
        yield [width, width], 0.0
        yield [3 * squared, 3 * width], 3.0
        yield [squared, width], 1.0
        yield [width, width], 0.0
        yield [4 * squared, 4 * width], 4.0
        yield [4 * squared, width], 4.0


def vgg(part: int = 16) -> Iterator[Layer]:
    """Return VGG-16's shape, with a part of its parameters: nine tenths are in the last layers."""
    for before, after, work in VGG16:
        yield [9 * before * after // part, after], work
    for before, after, work in VGG16_DENSE:
        yield [before * after // part, after], work


MODELS: dict[str, Callable[[], Iterator[Layer]]] = {
    "gpt": gpt,
    "vgg": vgg,
    "small": lambda: gpt(blocks=2),  # to see that all runs
}


def main() -> int:
    """Measure, and print a line for each system."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate-bps", type=int, default=200_000_000, help="of each link")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--computing", type=float, default=1.0, help="for each second of sums")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--steps", type=int, default=10, help="of a turn; the first five warm up")
    parser.add_argument("--only", default="", help="systems with this in their names, and DDP")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps is {args.steps}: more than the {WARM_UP} that warm up")
    if args.rate_bps < RATE_BPS_MIN:
        parser.error(
            f"--rate-bps is {args.rate_bps}: at least {RATE_BPS_MIN}, where a step takes minutes"
        )
    with (
        tempfile.TemporaryDirectory() as directory,
        Netlab(args.workers, rate_bps=args.rate_bps, name=f"ov{os.getpid()}") as lab,
    ):
        meeting = str(Path(directory) / "rendezvous")
        found = lab_ranks.answers(lab, __file__, {**vars(args), "meeting": meeting})
    print(
        f"{args.model}, {found[0]['bytes'] / 1e6:.1f} MB, at {args.rate_bps / 1e6:g} Mbit/s: its "
        f"sum takes {1000 * found[0]['sum']:.0f} ms, computing {1000 * found[0]['computing']:.0f}"
    )
    medians = {}
    for system in found[0]["times"]:
        steps = [max(step) for step in zip(*(of["times"][system] for of in found), strict=True)]
        medians[system] = statistics.median(steps)
        spread = f"{1000 * min(steps):.0f} to {1000 * max(steps):.0f}"
        print(f"{system}: {1000 * medians[system]:.0f} ms a step ({spread})")
    best = min(
        (name for name in medians if name.startswith("DDP on fanin")), key=medians.__getitem__
    )
    for system in (name for name in medians if not name.startswith("DDP on fanin")):
        print(f"{system} takes {medians[system] / medians[best]:.2f} of the time of {best}")
    return 0


def be_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Train with all systems, and return the seconds of each step."""
    import torch
    import torch.distributed as dist
    from fanin.torch import Options

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.meeting}", rank=args.rank, world_size=args.workers
    )
    sums: Any = dist.new_group(backend="fanin", pg_options=Options(rate=args.rate_bps))
    options = Options(rate=args.rate_bps, wire_dtype="shared_exponent")
    blocks: Any = dist.new_group(backend="fanin", pg_options=options)
    layers = list(MODELS[args.model]())
    elements = sum(sum(lengths) for lengths, _ in layers)
    whole = torch.ones(elements)
    took = []
    for _ in range(6):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(whole, group=sums)
        took.append(time.monotonic() - began)
    agreed = [statistics.median(took[1:])]
    dist.broadcast_object_list(agreed)
    computing = args.computing * agreed[0]
    systems = {
        name: system
        for name, system in _systems(torch, layers, computing, sums, blocks)
        if args.only in name or name.startswith("DDP on fanin")
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(args.rounds):
        for name, step in systems.items():
            dist.barrier()
            for number in range(args.steps):
                began = time.monotonic()
                step()
                if number >= WARM_UP:
                    times[name].append(time.monotonic() - began)
    dist.barrier()
    return {"bytes": 4 * elements, "sum": agreed[0], "computing": computing, "times": times}


def _systems(
    torch: Any, layers: list[Layer], computing: float, group: Any, blocks: Any
) -> Iterator[tuple[str, Callable[[], None]]]:
    from torch.nn.parallel import DistributedDataParallel

    for megabytes in BUCKETS_MB:
        net = model_of(torch, layers, computing)
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=megabytes)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        yield f"DDP on fanin, buckets of {megabytes} MB", step_of(torch, model, optimizer)
    net = model_of(torch, layers, computing)
    model = DistributedDataParallel(net, bucket_cap_mb=4)
    yield "DDP on Gloo", step_of(torch, model, torch.optim.SGD(net.parameters(), lr=0.1))
    for part in PARTS:
        of = group if part == "native" else blocks
        yield part, _overlapped(torch, model_of(torch, layers, computing), of, part)


def _overlapped(torch: Any, net: Any, group: Any, part: str) -> Callable[[], None]:
    from fanin.torch import DistributedOptimizer
    from fanin.torch.optimizers import partitions as whole
    from fanin.torch.optimizers import send_order as orders

    order: Any = orders
    pieces: Any = whole
    kept = pieces.packed, pieces.PARTITION_BYTES_MIN, pieces.PARTITION_BYTES_MAX
    if part == "overlap":  # each tensor whole and by itself
        pieces.packed = lambda lengths, _: [[length] for length in lengths]
        pieces.PARTITION_BYTES_MIN = pieces.PARTITION_BYTES_MAX = 1 << 40
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    step = step_of(torch, net, DistributedOptimizer(plain, net, group))
    pieces.packed, pieces.PARTITION_BYTES_MIN, pieces.PARTITION_BYTES_MAX = kept
    learned = order.is_learned

    def stepped() -> None:
        order.is_learned = learned if part in PARTS[2:] else lambda _: False
        step()

    return stepped


def step_of(torch: Any, model: Any, optimizer: Any) -> Callable[[], None]:
    """Return a step of a training by this model and optimizer."""
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def model_of(torch: Any, layers: list[Layer], computing: float) -> Any:
    """Return a model of these layers, a step of which waits so many seconds."""

    class Computed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float, *weights: Any) -> Any:
            ctx.seconds, ctx.weights = seconds, weights
            time.sleep(seconds)  # in place of a GPU: four ranks' computing would share two cores
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(2 * ctx.seconds)  # as forward; the usual two thirds of a step
            return gradient, None, *(torch.full_like(each, 1e-3) for each in ctx.weights)

    class Waiting(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, lengths: list[int], seconds: float) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(length) for length in lengths)
            self.seconds = seconds

        def forward(self, x: Any) -> Any:
            return Computed.apply(x, self.seconds, *self.weights)

    work = sum(part for _, part in layers)
    return torch.nn.Sequential(
        *(Waiting(lengths, computing / 3 * part / work) for lengths, part in layers)
    )


if __name__ == "__main__":
    lab_ranks.run(main, be_rank)
