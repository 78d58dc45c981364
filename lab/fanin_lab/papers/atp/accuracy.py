"""§5.3.1, §D.3, Figures 11 and 18: accuracy over epochs, with sums in ATP's fixed point.

Their other axis is time. An epoch's is that of its iterations, so what a figure says besides is a
ratio of throughputs, which Figure 8 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fanin_lab.papers import residual, training
from fanin_lab.papers.finding import Experiment, Finding, Outcome, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import outcome

NAMES = {"float32": "sums of float32", "atp": "ATP: integers, scaled by 10^8"}
ELEMENTS = 64
SEEDS = 5
"""Of the residual network."""


@dataclass
class Sums:
    """What became of a training's packets: how many sums there were, and overflows among them."""

    packets: int = 0
    overflows: int = 0


def run(lab: Lab) -> Outcome:
    """Train small networks."""
    return trained(lab, training.tasks())


def converged(lab: Lab) -> Outcome:
    """Train a residual network."""
    task = residual.task()
    part = 0.3 if lab.quick else 1.0
    return trained(lab.with_seeds(lab.seeds[:SEEDS]), {task.name: task}, part)


def trained(lab: Lab, tasks: Mapping[str, training.Task], part: float = 1) -> Outcome:
    """Train from the same beginnings, with sums of float32 and with ATP's."""
    sums = {(task, seed): Sums() for task in tasks for seed in lab.seeds}

    def atp(task: str, seed: int) -> training.Summed:
        keys = {"elements": ELEMENTS, "hashing": "linear", "window": 128}
        job, counted = training.Job("atp", training.WORKERS, seed, **keys), sums[task, seed]

        def summed(gradients: training.Array) -> training.Array:
            of_all, report = job.sum(gradients)
            counted.packets += -(-len(of_all) // ELEMENTS)
            counted.overflows += report["overflows"]
            return of_all

        return summed

    found = training.curves(lab, None, {"float32": training.plainly, "atp": atp}, part, tasks)

    findings = []
    for task, ways in found.items():
        aim = tasks[task].aim
        later = training.later(ways["atp"], ways["float32"], aim)
        differs = training.differs(ways["atp"], ways["float32"])
        counted = [sums[task, seed] for seed in lab.seeds]
        overflows = Spread.of([100 * of_seed.overflows / of_seed.packets for of_seed in counted])
        findings += [
            Finding(
                "§5.3.1, Figs. 11, 18",
                f"{task}: epochs until {100 * aim:g} % are right, more with ATP than with float32",
                "the same number: none more",
                later,
                holds=at_most(0),
            ),
            Finding(
                "§5.3.1",
                f"{task}: accuracy after the last epoch with ATP, less that with float32",
                "no loss: at most 1 %",
                differs,
                holds=at_least(-1),
                unit="%",
            ),
            Finding(
                "§3.8, §5.3.1",
                f"{task}, 8 workers: packets whose sum overflows",
                "hardly any: at most 0.1 %",
                overflows,
                holds=at_most(0.1),
                unit="%",
            ),
        ]
    return outcome(findings, training.picture(found, NAMES))


EXPERIMENT = Experiment("accuracy", "Training with ATP's sums (Figures 11 and 18)", run)
CONVERGENCE = Experiment(
    "convergence", "A residual network with ATP's sums (Figures 11 and 18)", converged
)
