"""§5, Figure 9(a): what optimizers cost a CPU beside sums, and a training whose servers run them.

Memory is the limit (§5), so an optimizer's cost is told in accesses. While it applies a byte of
gradients, a copy reads and writes so many bytes. Told so, the cost carries over to the paper's
machine: the paper says how much its memory moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fanin_lab.papers.byteps.cluster import NIC_GBPS
from fanin_lab.papers.byteps.summation import available, cpu_gbps, service_sums
from fanin_lab.papers.byteps.training import COMPUTINGS, OVER_COMPUTING, USUAL, Case, Trained
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, at_least, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Level, Panel, Picture, outcome

FLOATS, FLOATS_QUICK = 2**23, 2**20
"""Parameters of a core: out of its caches, but where it is quick."""
REPEAT, REPEAT_QUICK = 10, 3
MEMORY_GBPS = 1024.0
"""§5: read and written, with six channels of DDR4-2666."""
NIC_ACCESSES = 2.0
"""§5: what comes from the NIC is written and read."""
NIC_AT_MOST_GBPS = 100.0
"""§5: what comes by the NIC."""
ADAM_ACCESSES = 10.0
"""§5: "more than 10x memory access (read+write)"."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "Mtm": ("SGD", {"momentum": 0.9}),
    "Adam": ("Adam", {}),
    "RMSProp": ("RMSprop", {}),
}
"""By the names of Figure 9(a), and of torch.optim."""
LOOPS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
"""torch's ways to go over parameters."""
OVER_LOOPS = "torch's loops: one operation after the other, over all tensors, or fused"


def run(lab: Lab) -> Outcome:
    """Measure each optimizer beside sums and copies, and train with servers that are as slow."""
    accesses, sums = _measured(lab)
    computings = [USUAL] if lab.quick else COMPUTINGS
    gbps = {
        name: [min(NIC_GBPS, taken(Spread.of(of_loop).median)) for of_loop in of_loops]
        for name, of_loops in accesses.items()
    }
    every = sorted({NIC_GBPS, *(rate for rates in gbps.values() for rate in rates)})
    trained = Trained(lab, "optimizers", (_case(of, rate) for of in computings for rate in every))

    def slower(rates: Sequence[float], by: Sequence[float]) -> Spread:
        """Return how many times as long an iteration takes at these rates, over what is swept."""
        return Spread.of_each(
            [trained.gain(_case(of, other), _case(of, rate))]
            for of in computings
            for rate, other in zip(rates, by, strict=True)
        )

    on_gpu = [NIC_GBPS] * len(LOOPS)
    swept = OVER_LOOPS if lab.quick else f"{OVER_COMPUTING}, {OVER_LOOPS}"
    played = "VGG-16, one machine that trains and one server with 1,024 Gbit/s of memory"
    taken_by = "gradients that 1,024 Gbit/s of memory let "
    findings = [
        Finding(
            "§5",
            "Adam: memory accesses for a gradient's byte, in copies that take as long",
            "more than 10",
            Spread.of_each(accesses["Adam"]),
            at_least(ADAM_ACCESSES),
            swept=OVER_LOOPS,
        ),
        Finding(
            "§5",
            f"{taken_by}Adam take",
            "not sufficient for Adam to process 100 Gbps",
            Spread.of_each([[taken(one) for one in of] for of in accesses["Adam"]]),
            at_most(NIC_AT_MOST_GBPS),
            "Gbit/s",
            OVER_LOOPS,
        ),
        Finding(
            "Fig. 9",
            f"{taken_by}a service's sum take",
            "CPU is slow for optimizers but not for summation",
            Spread.of([taken(one) for one in sums]),
            at_least(NIC_AT_MOST_GBPS),
            "Gbit/s",
        ),
        Finding(
            "Fig. 9(a)",
            f"{played}: an iteration with RMSProp on the server by one with updates on the GPU",
            "can slow down the end-to-end training",
            slower(gbps["RMSProp"], on_gpu),
            MORE,
            "x",
            swept,
        ),
        Finding(
            "Fig. 9(a)",
            f"{played}: an iteration with RMSProp on the server by one with SGD there",
            "the more complicated, the more severe",
            slower(gbps["RMSProp"], gbps["SGD"]),
            MORE,
            "x",
            swept,
        ),
    ]
    names = list(OPTIMIZERS)
    costs = [Spread.of_each(accesses[name]) for name in names]
    left = Panel(
        [
            Bars([*names, "sum"], [*costs, Spread.of(sums)]),
            Level(ADAM_ACCESSES, "the paper's of Adam"),
        ],
        "",
        "memory accesses for a gradient's byte",
        "on this machine",
    )
    times = [Spread.of([1.0]), *(slower(gbps[name], on_gpu) for name in names)]
    right = Panel(
        [Bars(["GPU", *names], times)],
        "parameters are updated on",
        "times as long an iteration",
        "VGG-16, played",
        least_y=0,
    )
    return outcome(findings, Picture([left, right]))


def taken(accesses: float) -> float:
    """Return how many Gbit/s of gradients the paper's memory lets a server take, to whole ones."""
    return round(MEMORY_GBPS / (accesses + NIC_ACCESSES))


def _measured(lab: Lab) -> tuple[dict[str, list[list[float]]], list[float]]:
    """Return the accesses of each optimizer, by torch's loops and by rounds, and of a sum."""
    import torch

    threads = torch.get_num_threads()
    # A thread for each core is ours.
    torch.set_num_threads(1)
    accesses: dict[str, list[list[float]]] = {name: [[] for _ in LOOPS] for name in OPTIMIZERS}
    sums = []
    try:
        for _ in lab.seeds:
            # In each round, as other programs use the memory, too.
            copied = 2 * cpu_gbps(*_sizes(lab), _copies(lab))
            for name, (kind, settings) in OPTIMIZERS.items():
                for of_loop, loop in zip(accesses[name], LOOPS, strict=True):
                    if "fused" in loop and kind == "RMSprop":
                        # torch has none. It would read and write as much as momentum's.
                        of_loop.append(accesses["Mtm"][-1][-1])
                        continue
                    rate = cpu_gbps(*_sizes(lab), _updates(lab, kind, settings | loop))
                    of_loop.append(copied / rate)
            sums.append(copied / cpu_gbps(*service_sums(lab, "float32")))
    finally:
        torch.set_num_threads(threads)
    return accesses, sums


def _case(computing: int, gbps: float) -> Case:
    return Case("vgg16", "servers", 1, 1, gbps, computing)


def _sizes(lab: Lab) -> tuple[int, int]:
    """Return how often to measure, and of how many bytes a core."""
    return (REPEAT_QUICK, 4 * FLOATS_QUICK) if lab.quick else (REPEAT, 4 * FLOATS)


def _copies(lab: Lab) -> Callable[[int], object]:
    import torch

    _, size = _sizes(lab)
    pairs = [(torch.ones(size // 4), torch.ones(size // 4)) for _ in range(available())]
    return lambda core: pairs[core][0].copy_(pairs[core][1])


def _updates(lab: Lab, kind: str, settings: dict[str, Any]) -> Callable[[int], object]:
    import torch

    _, size = _sizes(lab)

    def optimizer() -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(size // 4))
        parameter.grad = torch.full_like(parameter, 1e-3)
        of_core: torch.optim.Optimizer = getattr(torch.optim, kind)(
            [parameter], lr=1e-3, **settings
        )
        of_core.step()  # makes its state
        return of_core

    optimizers = [optimizer() for _ in range(available())]
    return lambda core: optimizers[core].step()


EXPERIMENT = Experiment("optimizers", "Optimizers on CPUs (Figure 9a)", run, measures=True)
