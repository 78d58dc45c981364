"""A step of ResNet-50's gradients by `fanin.horovod`, beside DDP on fanin and on Gloo, by turns.

`python benches/horovod_steps.py` writes the table of docs/horovod.md.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import document
from fanin_lab.bench import machine
from fanin_lab.units import shown_time
from performance import ROOT

BEGIN = "<!-- what stands from here on is written by `python benches/horovod_steps.py` -->"
END = "<!-- written by `python benches/horovod_steps.py` to here -->"
PATH = ROOT / "docs" / "horovod.md"
USUAL = "DDP on fanin"


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
    """Play one rank; rank 0 prints the seconds of each way's steps."""
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
    for name, group in ((USUAL, None), ("DDP on Gloo", gloo)):
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
                took[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps(took))
    hvd.shutdown()
    dist.destroy_process_group()


def main() -> int:
    """Measure, and write the table of docs/horovod.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_rank(args.steps)
        return 0
    where = machine.where()
    rounds = {
        ranks: [_round(ranks, args.steps) for _ in range(args.rounds)] for ranks in args.ranks
    }
    lines = [
        [name, *(cell for each in rounds.values() for cell in _cells(each, name))]
        for name in next(iter(rounds.values()))[0]
    ]
    heads = ["", *(head for ranks in rounds for head in (f"{ranks} ranks", "times DDP on fanin"))]
    text = "\n".join(
        [
            document.where_line("python benches/horovod_steps.py", where),
            f"{args.rounds} runs of {args.steps} steps each, by turns: medians, and the least and "
            "the most of the runs.\n",
            document.table(heads, lines),
        ]
    )
    args.into.write_text(document.rewritten(args.into.read_text(), text, BEGIN, END, "Horovod"))
    return 0


def _round(ranks: int, steps: int) -> dict[str, float]:
    """Return the median seconds of a step by each way, in one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, "--rank", "--steps", str(steps)]
    said = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
    ).stdout
    return {name: statistics.median(each) for name, each in json.loads(said).items()}


def _cells(rounds: Sequence[Mapping[str, float]], name: str) -> tuple[str, str]:
    took = [each[name] for each in rounds]
    times = [each[name] / each[USUAL] for each in rounds]
    return document.spread(took, shown_time), document.spread(times, "{:.2f}".format)


if __name__ == "__main__":
    sys.exit(main())
