"""§4.6, Appendix D, Table 4 and Figure 10: a residual network, by SwitchML's sums and by Top-k.

Top-k is the product's own compressor. Each worker sends the largest elements of its gradient, and
adds what it did not send to its next one. The paper trains ResNet-50 on ImageNet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers import residual, training
from fanin_lab.papers.finding import Experiment, Finding, Outcome, at_least
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import outcome
from fanin_lab.papers.switchml import accuracy

if TYPE_CHECKING:
    from torch import Tensor

SEEDS = 5
WORSE = 1.0
"""Per cent of right answers that count: what the paper shades in Table 2."""
NAMES = {
    **accuracy.NAMES,
    "top 10 %": "Top-k, 10 % of the elements",
    "top 1 %": "Top-k, 1 % of the elements",
}


def run(lab: Lab) -> Outcome:
    """Train from the same beginnings in each way."""
    task = residual.task()
    tasks = {task.name: task}
    ways = {
        "float32": training.plainly,
        "scaled": accuracy.switchml,
        "top 10 %": lambda _task, _seed: top_k(0.1),
        "top 1 %": lambda _task, _seed: top_k(0.01),
    }
    part = 0.3 if lab.quick else 1.0
    found = training.curves(lab.with_seeds(lab.seeds[:SEEDS]), __name__, ways, part, tasks)
    of_ways = found[task.name]
    none, sparse = of_ways["float32"], of_ways["top 1 %"]
    worse = training.differs(none, sparse)
    either = [
        training.epochs_to(after, task.aim) > training.epochs_to(before, task.aim)
        or 100 * (before[-1] - after[-1]) >= WORSE
        for before, after in zip(none, sparse, strict=True)
    ]
    findings = [
        *accuracy.findings(found, tasks),
        Finding(
            "§3, App. D, Fig. 10",
            f"{task.name}: seeds with which Top-k at 1 % takes an epoch more to "
            f"{100 * task.aim:g} %, or has {WORSE:g} % less right in the end",
            "in many cases: half of them at least",
            Spread.of([100 * sum(either) / len(either)]),
            holds=at_least(50),
            unit="%",
        ),
        Finding(
            "App. D, Table 4",
            f"{task.name}: accuracy without compression, less that with Top-k at 1 %",
            "ResNet-50: 1.7 %; above 0",
            worse,
            holds=at_least(0.01),
            unit="%",
        ),
    ]
    return outcome(findings, training.picture(found, NAMES))


def top_k(part: float) -> training.Summed:
    """Return what sums this part of each worker's gradient: its largest elements."""
    import torch
    from fanin.torch.compression.compressors import TopK
    from fanin.torch.compression.cut import Cut

    compressor, dice = TopK(part), torch.Generator()
    unsent: Tensor | None = None

    def summed(gradients: training.Array) -> training.Array:
        nonlocal unsent
        workers, elements = gradients.shape
        # A gradient is one bucket.
        cut = Cut.of(elements, 1)
        if unsent is None:
            unsent = torch.zeros(workers, cut.length)
        unsent[:, :elements] += torch.from_numpy(gradients)
        messages = compressor.compress(unsent, cut, dice)
        compressor.subtract(unsent, messages, cut)
        of_all: training.Array = compressor.decompress(messages, cut).sum(0)[:elements].numpy()
        return of_all

    return summed


EXPERIMENT = Experiment(
    "convergence", "A residual network with SwitchML's sums and with Top-k (Figure 10)", run
)
