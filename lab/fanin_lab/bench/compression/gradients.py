"""What is sent: gradients that somebody saved, or those of a small network that learns here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanin_lab.bench import BenchError

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("gpt", "digits")
_HOW = (
    "save a list of steps, each the list of the gradients: "
    "steps.append([p.grad.clone() for p in model.parameters()]); "
    'torch.save(steps, "gradients.pt")'
)


@dataclass(frozen=True)
class Gradients:
    """Of some steps, each on another batch."""

    shapes: list[list[int]]
    """Of the model's parameters."""
    steps: Tensor
    """A row of float32 for each step: all parameters' gradients, one behind the other."""

    def of(self, step: int, rank: int, world_size: int) -> Tensor:
        """Return a rank's: the ranks take steps that follow each other, again from the first on."""
        return self.steps[(step * world_size + rank) % len(self.steps)]

    def save(self, path: Path) -> None:
        """Write them for the ranks."""
        import torch

        torch.save({"shapes": self.shapes, "steps": self.steps}, path)

    @staticmethod
    def saved(path: Path) -> Gradients:
        """Read what `save` wrote."""
        import torch

        return Gradients(**torch.load(path, mmap=True))


def read(path: Path) -> Gradients:
    """Read what somebody saved: of one step or of several, each a tensor, a list or a dict of them.

    Raises `BenchError`.
    """
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu")
    except Exception as error:  # pickle's, zip's and torch's own are of many kinds
        raise BenchError(f"{path} cannot be read as gradients: {error}; {_HOW}") from None
    several = isinstance(found, Sequence) and bool(found) and not isinstance(found[0], torch.Tensor)
    steps = [_tensors(path, step) for step in (found if several else [found])]
    shapes = [list(tensor.shape) for tensor in steps[0]]
    rows = []
    for number, step in enumerate(steps):
        if [list(tensor.shape) for tensor in step] != shapes:
            raise BenchError(
                f"{path}: step {number} has tensors of other shapes than step 0; {_HOW}"
            )
        rows.append(torch.cat([tensor.reshape(-1).float() for tensor in step]))
    all_of_it = torch.stack(rows)
    if not all_of_it.numel() or not all_of_it.isfinite().all():
        what = "NaN or infinity in a gradient" if all_of_it.numel() else "no element"
        raise BenchError(f"{path} has {what}: nothing could be said of errors; save another step")
    return Gradients(shapes, all_of_it)


def _tensors(path: Path, step: Any) -> list[Tensor]:
    import torch

    tensors = list(step.values() if isinstance(step, Mapping) else step)
    if isinstance(step, torch.Tensor):
        tensors = [step]
    if not tensors:
        raise BenchError(f"{path} has no tensor in a step; {_HOW}")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise BenchError(f"{path} has a {type(tensor).__name__} among the tensors; {_HOW}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BenchError(
                f"{path} has a tensor of {tensor.dtype}: gradients that are compressed are "
                "float32, float16 or bfloat16; save them as float32: p.grad.float()"
            )
    return tensors


def learned(model: str, steps: int, workers: int) -> Gradients:
    """Train one of `fanin reproduce`'s networks so many steps, and return its gradients.

    Raises `BenchError`.
    """
    import torch

    from fanin_lab.papers import ReproduceError
    from fanin_lab.papers.training import Steps, begun, sizes, tasks

    try:
        task = tasks()["GPT" if model == "gpt" else model]
    except ReproduceError as error:
        raise BenchError(str(error)) from None
    learner, dice = begun(task, seed=0)
    shapes = [list(parameter.shape) for parameter in learner.network.parameters()]
    assert [torch.Size(shape).numel() for shape in shapes] == sizes(task)
    taking, rows = Steps(learner), []
    for _ in range(steps):
        numbers = torch.randint(learner.samples, (workers, task.batch), generator=dice)
        found = taking.gradients(numbers)
        taking.step(found.mean(0))
        rows.append(found)
    return Gradients(shapes, torch.cat(rows))
