"""One rank that exchanges given gradients, by one method after the other."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fanin_lab.bench.compression.gradients import Gradients
from fanin_lab.bench.compression.methods import UNCOMPRESSED_STEPS, Method, method
from fanin_lab.bench.compression.ranks import Groups, play


class Given(nn.Module):
    """Parameters whose gradients are what is handed to `forward`."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        # PowerSGD of torch takes no scalar.
        self.of = nn.ParameterList(torch.zeros(shape or [1]) for shape in shapes)

    def forward(self, gradient: Tensor) -> Tensor:
        """Return what has this gradient."""
        parts = torch.split(gradient, [parameter.numel() for parameter in self.of])
        products = [
            (parameter * part.view_as(parameter)).sum()
            for parameter, part in zip(self.of, parts, strict=True)
        ]
        return torch.stack(products).sum()


def body(groups: Groups, task: dict[str, Any]) -> list[dict[str, float]]:
    """Return the figures of each method, in order."""
    gradients = Gradients.saved(Path(task["gradients"]))
    return [
        _measure(groups, gradients, method(name), task["steps"], task["with_errors"])
        for name in task["methods"]
    ]


def _measure(
    groups: Groups, gradients: Gradients, sending: Method, steps: int, with_errors: bool
) -> dict[str, float]:
    found = _exchange(groups, gradients, sending, steps, with_errors, feedback=True)
    if with_errors and sending.has_feedback:
        without = _exchange(groups, gradients, sending, steps, with_errors, feedback=False)
        if groups.rank == 0:  # which alone looks
            found["error"] = without["error"]
            found["error_of_sum_without_feedback"] = without["error_of_sum"]
    return found


def _exchange(
    groups: Groups,
    gradients: Gradients,
    sending: Method,
    steps: int,
    with_errors: bool,
    feedback: bool,
) -> dict[str, float]:
    group = groups.on_fanin(sending.wire_dtype)
    model = DistributedDataParallel(Given(gradients.shapes), process_group=group)
    sending.register(model, group, feedback)
    errors, times, cpus = [], [], []
    of_sum, of_exact = torch.zeros(2, gradients.steps.shape[1], dtype=torch.float64)
    for step in range(UNCOMPRESSED_STEPS + steps):
        model.zero_grad()
        loss = model(gradients.of(step, groups.rank, groups.size))
        distributed.barrier()
        cpu, began = time.process_time(), time.monotonic()
        loss.backward()
        times.append(time.monotonic() - began)
        cpus.append(time.process_time() - cpu)
        if step >= UNCOMPRESSED_STEPS and with_errors and groups.rank == 0:
            average = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
            of_ranks = [gradients.of(step, rank, groups.size) for rank in range(groups.size)]
            exact = torch.stack(of_ranks).double().mean(0)
            errors.append(_error(average, exact))
            of_sum += average
            of_exact += exact
    # The first one that is compressed also makes its memory.
    figures = {
        "time_s": statistics.median(times[UNCOMPRESSED_STEPS + 1 :]),
        "cpu_s": statistics.median(cpus[UNCOMPRESSED_STEPS + 1 :]),
    }
    if errors:
        figures["error"] = statistics.median(errors)
        figures["error_of_sum"] = _error(of_sum, of_exact)
    return figures


def _error(found: Tensor, exact: Tensor) -> float:
    size = exact.norm().item()
    return (found.double() - exact).norm().item() / size if size else 0.0


if __name__ == "__main__":
    play(body)
