"""Which four-bit levels train best: a GPT with gradients that are rounded as on the wire.

`python benches/levels.py` writes the table of docs/protocols/switchml.md. Four workers' gradients
are rounded, averaged and rounded again, in one process. Without error feedback each rounding is by
chance; with it, a worker's is to the nearest level, and its error is added to the next gradient.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import document
import torch
from fanin_lab.bench import machine
from fanin_lab.papers.training import begun, tasks
from performance import ROOT
from torch import Tensor
from torch.nn.functional import cross_entropy

BEGIN = "<!-- what stands from here on is written by `python benches/levels.py` -->"
END = "<!-- written by `python benches/levels.py` to here -->"
PATH = ROOT / "docs" / "protocols" / "switchml.md"
BLOCK = 32
WORKERS, STEPS = 4, 240
LEVELS: Final[Mapping[str, tuple[float, ...]]] = {
    "0, 1, 2, 3, 4, 6, 8, 12": (0, 1, 2, 3, 4, 6, 8, 12),
    "0 to 7": tuple(range(8)),
    "0, and 2^0 to 2^6": (0, *(2**k for k in range(7))),
    "int8: 0 to 127": tuple(range(128)),
}
ANY_STEP = "0 to 7, and a step of any size in place of a power of two"
Round = Callable[[Tensor, torch.Generator | None], Tensor]


def rounded(levels: tuple[float, ...], *, any_step: bool = False) -> Round:
    """Return what rounds to levels: by chance, or to the nearest one where there are no dice."""
    known = torch.tensor(levels, dtype=torch.float32)

    def work(flat: Tensor, dice: torch.Generator | None) -> Tensor:
        blocks = torch.cat([flat, flat.new_zeros(-flat.numel() % BLOCK)]).view(-1, BLOCK)
        step = (blocks.abs().amax(1, keepdim=True) / known[-1]).clamp_min(2.0**-126)
        if not any_step:
            step = torch.exp2(torch.ceil(torch.log2(step)))
        sizes = (blocks.abs() / step).clamp(max=levels[-1])
        below = (torch.bucketize(sizes, known, right=True) - 1).clamp(max=len(levels) - 2)
        low, high = known[below], known[below + 1]
        part = (sizes - low) / (high - low)
        bar = 0.5 if dice is None else torch.rand(part.shape, generator=dice)
        return (torch.where(part > bar, high, low) * blocks.sign() * step).view(-1)[: flat.numel()]

    return work


def loss(seed: int, work: Round | None, *, feedback: bool) -> float:
    """Return the loss of held-back text, after a training in one process."""
    task = tasks()["GPT"]
    learner, drawing = begun(task, seed)
    dice = torch.Generator().manual_seed(seed + 1)
    parameters = list(learner.network.parameters())
    errors = [torch.zeros(sum(each.numel() for each in parameters)) for _ in range(WORKERS)]
    for _step in range(STEPS):
        inputs, targets = learner.draw(
            torch.randint(learner.samples, (WORKERS, task.batch), generator=drawing)
        )
        total = torch.zeros_like(errors[0])
        for worker in range(WORKERS):
            learner.optimizer.zero_grad()
            scores = learner.network(inputs[worker]).flatten(0, -2)
            cross_entropy(scores, targets[worker].flatten()).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            sent = gradient + errors[worker]
            if work is not None:
                sent = work(sent, None if feedback else dice)
            if feedback:
                errors[worker] += gradient - sent
            total += sent
        average = total / WORKERS if work is None else work(total / WORKERS, dice)
        parts = torch.split(average, [each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        learner.optimizer.step()
    inputs, targets = learner.held_back
    with torch.no_grad():
        return cross_entropy(learner.network(inputs).flatten(0, -2), targets.flatten()).item()


def main() -> int:
    """Train with all levels, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = machine.where()
    seeds = range(args.seeds)
    usual = [loss(seed, None, feedback=False) for seed in seeds]
    rounds = {name: rounded(levels) for name, levels in LEVELS.items()}
    rounds[ANY_STEP] = rounded(LEVELS["0 to 7"], any_step=True)
    lines = []
    for name, work in rounds.items():
        cells = []
        for feedback in (False, True):
            above = [
                loss(seed, work, feedback=feedback) - of
                for seed, of in zip(seeds, usual, strict=True)
            ]
            cells.append(f"{statistics.mean(above):.4f} ({min(above):.4f} to {max(above):.4f})")
        lines.append([name, *cells])
        print(*lines[-1], sep=" | ", file=sys.stderr, flush=True)
    text = document.where_line("python benches/levels.py", where) + "\n"
    text += document.table(["levels", "without error feedback", "with it"], lines)
    args.into.write_text(document.rewritten(args.into.read_text(), text, BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
