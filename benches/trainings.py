"""Real trainings, step by step, on fanin beside Gloo: `python benches/trainings.py`.

As root: machines are namespaces behind one shaped link, with one rank each. A small GPT, a VGG and
a ResNet train on the same data in several ways, which take turns: DDP on Gloo, on the ranks' own
services and on a switch, with int8 on the wire, and by the overlapped optimizer. It writes the
table of docs/overlap.md. As a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import document
import lab_ranks
from fanin_lab.bench import machine
from fanin_lab.netlab import INTERFACE, Netlab
from fanin_lab.units import rate_bps
from performance import ROOT

BEGIN = "<!-- what stands from here on is written by `python benches/trainings.py` -->"
END = "<!-- written by `python benches/trainings.py` to here -->"
PATH = ROOT / "docs" / "overlap.md"
SMOOTHED = 8
"""Steps over which a loss is averaged."""
BUCKET_MB = 2
SEED = 7
CONTEXT = 64
ALONE = "computing alone"


@dataclass(frozen=True)
class Way:
    """How gradients are summed."""

    name: str
    services: str = ""
    """Where: "own" or "switch"; none is Gloo."""
    wire_dtype: str = "native"
    overlapped: bool = False


WAYS = (
    Way("DDP on Gloo"),
    Way("DDP, own services", "own"),
    Way("DDP, own services, int8", "own", "int8"),
    Way("overlapped, own services", "own", overlapped=True),
    Way("overlapped, own services, int8", "own", "int8", overlapped=True),
    Way("DDP, a switch", "switch"),
    Way("DDP, a switch, int8", "switch", "int8"),
    Way("overlapped, a switch", "switch", overlapped=True),
    Way("overlapped, a switch, int8", "switch", "int8", overlapped=True),
)
GLOO = WAYS[0].name
MODELS = ("gpt", "vgg", "resnet")


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--rate", default="200mbit", help="of each link")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each way; one warms up")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2, as the first one warms up")
    if 3 * args.rounds * args.steps // 4 < SMOOTHED:
        parser.error(f"--steps: three quarters of all are at least {SMOOTHED}")
    before = args.into.read_text() if args.into.exists() else None
    where = machine.where()
    lines = []
    for workers in args.workers:
        for model in args.models:
            lines += _rows(model, workers, _played(args, model, workers))
    heads = ["model, workers", "way", "a step", "times as fast as Gloo", "loss at the end"]
    text = "\n".join(
        [
            document.where_line(" ".join(["python", "benches/trainings.py", *sys.argv[1:]]), where),
            f"Links of {args.rate}; {args.rounds - 1} turns of {args.steps} steps, after one that "
            "warms up. A step: the median of the turns, the least and the most.\n",
            document.table(
                [*heads, "time to the loss that Gloo has after three quarters, by Gloo's"], lines
            ),
        ]
    )
    args.into.write_text(document.rewritten(before, text, BEGIN, END, "Trainings"))
    return 0


def _played(args: argparse.Namespace, model: str, workers: int) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Netlab(workers, rate_bps=rate_bps(args.rate), name=f"train{os.getpid()}") as lab,
    ):
        lab_ranks.start_switch(lab)
        told = {
            "model": model,
            "workers": workers,
            "rate": rate_bps(args.rate),
            "rounds": args.rounds,
            "steps": args.steps,
            "meeting": str(Path(directory) / "meeting"),
        }
        return lab_ranks.answers(lab, __file__, told)


def _rows(model: str, workers: int, found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each way; `found` is by rank."""
    turns = {
        name: [max(turn) for turn in zip(*(of["turns"][name] for of in found), strict=True)]
        for name in found[0]["turns"]
    }
    curves = {
        way.name: [
            statistics.fmean(step)
            for step in zip(*(of["losses"][way.name] for of in found), strict=True)
        ]
        for way in WAYS
    }
    steps = {name: statistics.median(times[1:]) for name, times in turns.items()}
    computing = steps.pop(ALONE) / steps[GLOO]
    name = f"{model} ({found[0]['bytes'] / 1e6:.1f} MB), {workers}; computing is {computing:.0%}"
    whole = len(curves[GLOO])
    aim = smoothed(curves[GLOO][: 3 * whole // 4])[-1]
    reached = {way: steps_to(curve, aim) for way, curve in curves.items()}
    lines = []
    for way, step in steps.items():
        until = reached[way]
        lines.append(
            [
                f"{name} of Gloo's step" if way == GLOO else "",
                way,
                document.spread(turns[way][1:], lambda s: f"{1e3 * s:.0f} ms"),
                f"{steps[GLOO] / step:.2f}",
                f"{smoothed(curves[way])[-1]:.3f}",
                "not reached"
                if until is None
                else f"{until * step / steps[GLOO] / reached[GLOO]:.2f}",
            ]
        )
    return lines


def smoothed(curve: Sequence[float]) -> list[float]:
    """Return the means over the last steps, from the first step on that has so many behind it."""
    return [
        statistics.fmean(curve[end - SMOOTHED : end]) for end in range(SMOOTHED, len(curve) + 1)
    ]


def steps_to(curve: Sequence[float], loss: float) -> int | None:
    """Return after how many steps a curve, smoothed, has come to a loss."""
    below = (i for i, mean in enumerate(smoothed(curve)) if mean <= loss)
    first = next(below, None)
    return None if first is None else first + SMOOTHED


def be_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways by turns; return the seconds of a step of each turn, and the losses."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))  # for the examples
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    meeting = f"file://{args.meeting}"
    dist.init_process_group("gloo", init_method=meeting, rank=args.rank, world_size=args.workers)
    data = _data(args.model)
    trainings = {way.name: _training(args, way, data) for way in WAYS}
    trainings[ALONE] = _training(args, None, data)
    turns: dict[str, list[float]] = {name: [] for name in trainings}
    losses: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(args.rounds):
        for name, (step, finish) in trainings.items():
            dist.barrier()
            began = time.monotonic()
            for number in range(args.steps):
                losses[name].append(step(turn * args.steps + number))
            finish()
            turns[name].append((time.monotonic() - began) / args.steps)
    dist.barrier()
    size = sum(parameter.numel() for parameter in _model(args.model).parameters())
    return {"turns": turns, "losses": losses, "bytes": 4 * size}


Step = Callable[[int], float]
"""By the number of the step, its loss on this rank."""


def _training(
    args: argparse.Namespace, way: Way | None, data: Any
) -> tuple[Step, Callable[[], None]]:
    """Return a step, and what waits for the last one's end."""
    import torch
    import torch.distributed as dist
    from fanin.torch import DistributedOptimizer, Options
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    net = _model(args.model)
    model = net
    optimizer: Any = (
        torch.optim.AdamW(net.parameters(), lr=1e-3)
        if args.model == "gpt"
        else torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    )
    overlapped: Any = None
    if way is not None:
        group: Any = None
        if way.services:
            settings: dict[str, Any] = {"rate": args.rate, "wire_dtype": way.wire_dtype}
            if way.services == "switch":
                settings |= {"switch": lab_ranks.SWITCH_AT, "plan": "switch"}
            group = dist.new_group(backend="fanin", pg_options=Options(**settings))
        if way.overlapped:
            optimizer = overlapped = DistributedOptimizer(optimizer, net, group)
        else:
            model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=BUCKET_MB)

    def step(number: int) -> float:
        inputs, targets = _batch(args, data, number)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    def finish() -> None:
        if overlapped is not None:
            overlapped.synchronize()

    return step, finish


def _model(name: str) -> Any:
    import torch
    from torch import nn

    from examples import gpt, resnet

    torch.manual_seed(SEED)
    if name == "gpt":
        return gpt.Gpt(CONTEXT, width=256, heads=4, layers=3)
    layers: list[Any] = []
    if name == "vgg":
        for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if before > 3 else []
        layers += [nn.Flatten(), nn.Linear(256 * 16, 512), nn.ReLU()]
        layers += [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, resnet.CLASSES)]
        return nn.Sequential(*layers)
    layers = [nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.ReLU()]
    for before, after in ((64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)):
        layers.append(resnet.Block(before, after))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, resnet.CLASSES)]
    return nn.Sequential(*layers)


def _data(name: str) -> Any:
    from examples import gpt, resnet

    return gpt.standard_library() if name == "gpt" else resnet.textures(2000)


SAMPLES = {"gpt": 8, "vgg": 16, "resnet": 4}
"""The batch of a rank and step."""


def _batch(args: argparse.Namespace, data: Any, number: int) -> tuple[Any, Any]:
    import torch

    from examples import gpt

    dice = torch.Generator().manual_seed(SEED + number * args.workers + args.rank)
    if args.model == "gpt":
        return gpt.batch_of(data, SAMPLES["gpt"], CONTEXT, dice)
    images, labels = data
    drawn = torch.randint(len(labels), (SAMPLES[args.model],), generator=dice)
    return images[drawn] / 255.0 - 0.5, labels[drawn]


if __name__ == "__main__":
    lab_ranks.run(main, be_rank)
