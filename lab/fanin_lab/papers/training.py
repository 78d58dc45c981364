"""Small networks that are trained here, with gradients that fanin's machines sum.

The gradients of all workers of an iteration are computed by torch, and are summed by one job of the
simulator: quantised, sent, added and turned back by the state machines that run on sockets. Each
sum is checked there. Everything random comes from a seed, and torch has one thread.
"""

from __future__ import annotations

import functools
import json
import math
import sysconfig
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanin._cures import to_install

from fanin_lab.papers import ReproduceError
from fanin_lab.papers.lab import Lab, own_tables
from fanin_lab.papers.plot import Panel, Picture, Seeds
from fanin_lab.sweep.runs import Report
from fanin_lab.sweep.scenario import toml
from fanin_lab.sweep.spread import Spread

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor, nn, optim

    Array = np.ndarray[Any, np.dtype[Any]]

IN_RACK = 8
"""Workers of a rack; the server, where there is one, has a rack of its own."""
_SEEDED = threading.Lock()
"""For whoever sets the seed of torch's own generator, of which there is one for all threads."""


class Job:
    """Sums the contributions of an iteration in a simulated network."""

    def __init__(self, system: str, workers: int, seed: int, **keys: Any) -> None:
        """Take a system and what its table has; nothing is lost, and nobody else is there."""
        self._system = system
        self._workers = workers
        self._seed = seed
        self._keys = keys

    def sum(self, contributions: Array) -> tuple[Array, Report]:
        """Return the sum of the rows, float32 or int32, and what the simulator reports."""
        import numpy as np
        from fanin import _fanin

        workers, elements = contributions.shape
        assert workers == self._workers
        scenario = {
            "interval": "1s",
            "network": {
                "topology": "leaf-spine",
                "leaves": -(-workers // IN_RACK) + 1,
                "hosts": min(workers, IN_RACK),
                "spines": 1,
            },
            "switch": {"aggregators": 1024},
            "job": [
                {
                    "system": self._system,
                    "workers": workers,
                    "tensor": f"{4 * elements}B",
                    "tensors": 1,
                    "dtype": str(contributions.dtype),
                    **self._keys,
                }
            ],
        }
        text = toml(own_tables(scenario))
        sums, report = _fanin.simulated_sum(text, self._seed, contributions.tobytes())
        (job,) = json.loads(report)["jobs"]
        return np.frombuffer(sums, contributions.dtype), job


@dataclass(frozen=True)
class Task:
    """What is learned, by which network."""

    name: str
    aim: float
    """Share of right answers that is reached on the way."""
    epochs: int
    batch: int
    """Samples of a worker in an iteration."""
    begin: Callable[[Generator], Learner]


@dataclass(frozen=True)
class Learner:
    """A network and its data, before the first iteration."""

    network: nn.Module
    optimizer: optim.Optimizer
    samples: int
    """Of an epoch."""
    draw: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Returns the samples of these numbers, which may have any shape, and what they should give."""
    held_back: tuple[Tensor, Tensor]
    schedule: optim.lr_scheduler.LRScheduler | None = None
    """Of the optimizer's learning rate; it goes on after every step."""


Summed = Callable[["Array"], "Array"]
"""Is handed the gradients of an iteration, a row of float32 for each worker, and sums them."""
WORKERS = 8
Curves = Mapping[str, Mapping[str, list[list[float]]]]
"""By task, by way to sum: for each seed, the share of right answers after each epoch."""


def curves(
    lab: Lab,
    module: str | None,
    ways: Mapping[str, Callable[[str, int], Summed]],
    part: float = 1,
    learned: Mapping[str, Task] | None = None,
) -> Curves:
    """Learn every task in every way, which is told task and seed, from the same beginnings.

    With 8 workers, as many as in SwitchML's §4.6; for this part of the tasks' epochs. The tasks are
    those of `tasks` unless others are given. Curves are kept under the names that tasks and ways
    have in this module; not without one, for ways that note something else on the way.
    """
    learned = tasks() if learned is None else learned

    def one(run: tuple[str, str, int, int]) -> list[float]:
        task, way, epochs, seed = run
        return train(learned[task], seed, WORKERS, epochs, ways[way](task, seed))

    quicker = QUICKER if lab.quick else 1
    epochs = {name: max(1, round(part * task.epochs / quicker)) for name, task in learned.items()}
    runs = [
        (task, way, epochs[task], seed) for task in learned for way in ways for seed in lab.seeds
    ]
    found = iter(
        lab.each("training", one, runs) if module is None else lab.trained(one, runs, module)
    )
    return {task: {way: [next(found) for _ in lab.seeds] for way in ways} for task in learned}


QUICKER = 3


def differs(one: list[list[float]], other: list[list[float]]) -> Spread:
    """Return by how many of a hundred answers one way is better after the last epoch."""
    return Spread.of([100 * (a[-1] - b[-1]) for a, b in zip(one, other, strict=True)])


def later(one: list[list[float]], other: list[list[float]], aim: float) -> Spread:
    """Return how many epochs more it takes one way to reach the aim, a share of right answers."""
    both = zip(one, other, strict=True)
    return Spread.of([epochs_to(a, aim) - epochs_to(b, aim) for a, b in both])


def epochs_to(curve: list[float], aim: float) -> int:
    """Return the first epoch that reaches the aim; one more than there are if none does."""
    return next((at + 1 for at, right in enumerate(curve) if right >= aim), len(curve) + 1)


def picture(found: Curves, names: Mapping[str, str]) -> Picture:
    """Show each way that has a name, median and single seeds, a panel for each task."""

    def seeds(curves: list[list[float]], at: int, name: str) -> Seeds:
        points = [(range(1, len(one) + 1), [100 * right for right in one]) for one in curves]
        # The first way is what the others should be like: they lie on it.
        return Seeds(points, f"C{at}", name, width=2 if at else 6)

    y = "right answers on what was held back, %"
    return Picture(
        [
            Panel(
                [seeds(of_ways[way], at, name) for at, (way, name) in enumerate(names.items())],
                "epochs",
                y,
                task,
                whole_x=True,
            )
            for task, of_ways in found.items()
        ]
    )


def train(
    task: Task,
    seed: int,
    workers: int,
    epochs: int,
    summed: Summed,
    *,
    batch: int | None = None,
    only_to_aim: bool = False,
) -> list[float]:
    """Return the share of right answers on what was held back, after each epoch.

    With ``only_to_aim`` there is none after the one that reaches the task's aim.
    """
    import torch

    learner, dice = begun(task, seed)
    steps = Steps(learner)
    shape = workers, batch or task.batch
    curve = []
    for _ in range(epochs):
        order = torch.randperm(learner.samples, generator=dice)
        for part in torch.split(order, math.prod(shape)):
            if len(part) < math.prod(shape):
                break
            rows = steps.gradients(part.view(shape))
            steps.step(torch.from_numpy(summed(rows.numpy()) / workers))
        curve.append(steps.right())
        if only_to_aim and curve[-1] >= task.aim:
            break
    return curve


def begun(task: Task, seed: int) -> tuple[Learner, Generator]:
    """Return what learns, before its first step, and the dice for all that comes after."""
    import torch

    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(seed)
    with _SEEDED:
        torch.manual_seed(seed)
        return task.begin(dice), dice


class Steps:
    """What a learner's workers compute, and what becomes of it."""

    def __init__(self, learner: Learner) -> None:
        """Take one that has not begun."""
        from torch.func import functional_call, grad, vmap
        from torch.nn.functional import cross_entropy

        self._learner = learner
        self._parameters = dict(learner.network.named_parameters())
        self._values = {name: each.detach() for name, each in self._parameters.items()}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            scores = functional_call(learner.network, values, (x,))
            return cross_entropy(scores.flatten(0, -2), y.flatten())

        self._of = vmap(grad(loss), in_dims=(None, 0, 0))

    def gradients(self, numbers: Tensor) -> Tensor:
        """Return the gradients of the model as it is: a row for each row of samples' numbers."""
        import torch

        found = self._of(self._values, *self._learner.draw(numbers))
        rows = [found[name].reshape(len(numbers), -1) for name in self._parameters]
        return torch.cat(rows, dim=1)

    def step(self, mean: Tensor) -> None:
        """Change the model by a gradient."""
        import torch

        parts = torch.split(mean, [parameter.numel() for parameter in self._parameters.values()])
        for parameter, gradient in zip(self._parameters.values(), parts, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._learner.optimizer.step()
        if self._learner.schedule is not None:
            self._learner.schedule.step()

    def right(self) -> float:
        """Return the share of right answers on what was held back."""
        import torch

        with torch.no_grad():
            x, y = self._learner.held_back
            right = self._learner.network(x).argmax(dim=-1) == y
        return float(right.double().mean())


def sizes(task: Task) -> list[int]:
    """Return how many elements the tensors of a task's network have, from its front to its back."""
    import torch

    with _SEEDED:
        network = task.begin(torch.Generator().manual_seed(0)).network
    return [parameter.numel() for parameter in network.parameters()]


def plainly(_task: str, _seed: int) -> Summed:
    """Sum without any of fanin's machines."""
    return plain


def plain(gradients: Array) -> Array:
    """Sum as every server does: float32, in the order of the workers."""
    return functools.reduce(lambda before, row: before + row, gradients)


def tasks() -> dict[str, Task]:
    """Return what is learned, by name.

    Raises `ReproduceError` where something is not installed that it takes.
    """
    try:
        import sklearn.datasets  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise lacking(error) from None
    return {
        "digits": Task("digits", aim=0.9, epochs=20, batch=8, begin=_digits),
        "GPT": Task("GPT", aim=0.35, epochs=6, batch=4, begin=lambda dice: _gpt(dice, _code())),
    }


def lacking(error: ImportError) -> ReproduceError:
    """Return the error that says how to install what a training lacks."""
    return ReproduceError(
        f"missing for what trains: {error.name}; install with: {to_install(str(error.name))}, "
        "or leave these experiments out with --only"
    )


def on_other_data() -> dict[str, Task]:
    """Return the same networks as `tasks` does, which learn from half of the digits, and English.

    Raises `ReproduceError` as that does.
    """
    digits, gpt = tasks().values()
    half = TRAINED // 2
    return {
        "digits": replace(digits, epochs=40, begin=lambda dice: _digits(dice, half)),
        "GPT": replace(gpt, begin=lambda dice: _gpt(dice, _english())),
    }


TRAINED = 1437
"""Of 1797 digits; the rest is held back."""


def _digits(dice: Generator, samples: int = TRAINED) -> Learner:
    """Begin with the network of examples/digits.py, which learns from so many images."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(digits), generator=dice)
    held_back = order[TRAINED:]
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Learner(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        samples,
        lambda numbers: (pixels[order[numbers]], digits[order[numbers]]),
        (pixels[held_back], digits[held_back]),
    )


CONTEXT = 32
"""Characters of a sequence."""
WIDTH, HEADS, LAYERS = 32, 4, 2
CHARACTERS = 128
"""ASCII; anything else becomes "?"."""
TEXT_BYTES = 1_000_000
SEQUENCES = 640
"""Of an epoch; those of another are others."""
HELD_BACK = 256
"""Sequences, from the text's last tenth."""


def _gpt(dice: Generator, text: Tensor) -> Learner:
    """Begin with the network of examples/gpt.py, smaller."""
    import torch

    trained = len(text) * 9 // 10
    places = torch.arange(CONTEXT + 1)

    def at(starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts.unsqueeze(-1) + places].long()
        return rows[..., :-1], rows[..., 1:]

    last = len(text) - CONTEXT - 1
    network = _network()
    return Learner(
        network,
        torch.optim.AdamW(network.parameters(), lr=3e-3),
        SEQUENCES,
        lambda numbers: at(torch.randint(trained - CONTEXT, numbers.shape, generator=dice)),
        at(torch.linspace(trained, last, HELD_BACK).long()),
    )


@functools.cache
def _code() -> Tensor:
    """Return the text of examples/gpt.py: Python's own library."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        if len(text) >= TEXT_BYTES:
            break
    return _codes(text[:TEXT_BYTES])


@functools.cache
def _english() -> Tensor:
    """Return what Python's `help` says of the language, some 700,000 characters."""
    import pydoc_data.topics

    topics: dict[str, str] = pydoc_data.topics.topics
    return _codes(bytearray("\n".join(topics.values()).encode("ascii", "replace")))


def _codes(text: bytearray) -> Tensor:
    import torch

    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=CHARACTERS - 1)


def _network() -> nn.Module:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1 = nn.LayerNorm(WIDTH)
            self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
            self.attention_out = nn.Linear(WIDTH, WIDTH)
            self.norm_2 = nn.LayerNorm(WIDTH)
            self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (
                part.unflatten(-1, (HEADS, -1)).transpose(-2, -3)
                for part in self.attention_in(self.norm_1(x)).chunk(3, dim=-1)
            )
            # Not torch's own attention, of which there is no version for many workers at once.
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            future = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
            x = x + self.attention_out((weights @ value).transpose(-2, -3).flatten(-2))
            out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm_2(x))))
            return out

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(CHARACTERS, WIDTH)
            self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH))
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)

        def forward(self, codes: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(self.blocks(self.tokens(codes) + self.positions)))
            return out

    return Gpt()
