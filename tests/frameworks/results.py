"""What the programs beside this file leave for the test that ran them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def write(rank: int, **results: Any) -> None:
    """Leave what this rank came to, as JSON."""
    path = Path(os.environ["RESULTS"]) / f"{rank}.json"
    path.write_text(json.dumps(results))


def flat(model: torch.nn.Module) -> list[float]:
    """All parameters of a small model, whole, also if each rank has a shard of them."""
    whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters())
    return [value for each in whole for value in each.detach().flatten().tolist()]


def model() -> torch.nn.Module:
    """The same small model in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data() -> torch.utils.data.TensorDataset:
    """The same 32 examples in every process."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
