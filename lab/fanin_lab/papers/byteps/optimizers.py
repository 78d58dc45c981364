"""§5, Figure 9(a): what optimizers cost a CPU beside sums, and a training whose servers run them.

Memory is the limit (§5), so an optimizer's cost is told in accesses: how many bytes a copy reads
and writes while the optimizer applies a byte of gradients. Measured so, it carries over to the
paper's machine, of which the paper gives how much its memory moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fanin_lab.papers.byteps.cluster import NIC_GBPS
from fanin_lab.papers.byteps.summation import available, cpu_gbps, service_sums
from fanin_lab.papers.byteps.training import COMPUTINGS, OVER_COMPUTING, USUAL, Case, Trained
from fanin_lab.papers.finding import MORE, Experiment, Finding, Outcome, at_least
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Bars, Level, Panel, Picture, outcome

FLOATS, FLOATS_QUICK = 2**23, 2**20
"""Parameters of a core: out of its caches, but where it is quick."""
REPEAT, REPEAT_QUICK = 10, 3
MEMORY_GBPS = 1024.0
"""§5: read and written, with six channels of DDR4-2666."""
NIC_ACCESSES = 2.0
"""§5: what comes from the NIC is written and read."""
ADAM_ACCESSES = 10.0
"""§5: "more than 10x memory access (read+write)"."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "Mtm": ("SGD", {"momentum": 0.9}),
    "Adam": ("Adam", {}),
    "RMSProp": ("RMSprop", {}),
}
"""As Figure 9(a) calls them, and what they are in torch.optim."""
LOOPS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
"""torch's ways to go over parameters; RMSProp has no fused one."""
OVER_LOOPS = "torch's loops: one operation after the other, over all tensors, or fused"


def run(lab: Lab) -> Outcome:
    """Measure each optimizer beside sums and copies, and train with servers that are as slow."""
    accesses, sums = _measured(lab)
    computings = [USUAL] if lab.quick else COMPUTINGS
    gbps = {
        name: [_gbps(Spread.of(of_loop).median) for of_loop in of_loops]
        for name, of_loops in accesses.items()
    }
    every = sorted({NIC_GBPS, *(rate for rates in gbps.values() for rate in rates)})
    trained = Trained(lab, "optimizers", (_case(of, rate) for of in computings for rate in every))

    def slower(rates: Iterable[float], by: Iterable[float]) -> Spread:
        """Return how many times as long an iteration takes at these rates, over what is swept."""
        pairs = list(zip(rates, by, strict=False))
        return Spread.of_each(
            [trained.gain(_case(of, other), _case(of, rate))]
            for of in computings
            for rate, other in pairs
        )

    adam = Spread.of_each(accesses["Adam"])
    swept = OVER_LOOPS if lab.quick else f"{OVER_COMPUTING}, {OVER_LOOPS}"
    figure = "Fig. 9(a)"
    played = "VGG-16, one machine that trains and one server with 1,024 Gbit/s of memory"
    findings = [
        Finding(
            "§5",
            "Adam: memory accesses for a gradient's byte, in copies that take as long",
            "more than 10",
            adam,
            at_least(ADAM_ACCESSES),
            swept=OVER_LOOPS,
        ),
        Finding(
            "§5",
            "CPU time of Adam's update by that of a service's sum, a byte",
            "optimizers exhaust the memory, and sums do not",
            Spread.of_each(
                [[one / Spread.of(sums).median for one in of] for of in accesses["Adam"]]
            ),
            MORE,
            "x",
            OVER_LOOPS,
        ),
        Finding(
            figure,
            f"{played}: an iteration with RMSProp on the server by one with updates on the GPU",
            "slower",
            slower(gbps["RMSProp"], [NIC_GBPS] * len(LOOPS)),
            MORE,
            "x",
            swept,
        ),
        Finding(
            figure,
            f"{played}: an iteration with RMSProp on the server by one with SGD there",
            "the more complicated the optimizer, the slower",
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
    right = Panel(
        [
            Bars(
                ["GPU", *names],
                [
                    Spread.of([1.0]),
                    *(slower(gbps[name], [NIC_GBPS] * len(LOOPS)) for name in names),
                ],
            )
        ],
        "parameters are updated on",
        "times as long an iteration",
        "VGG-16, played",
        least_y=0,
    )
    return outcome(findings, Picture([left, right]))


def _measured(lab: Lab) -> tuple[dict[str, list[list[float]]], list[float]]:
    """Return the accesses of each optimizer, by torch's loops and by rounds, and of a sum."""
    import torch

    threads = torch.get_num_threads()
    # A thread for each core is ours.
    torch.set_num_threads(1)
    accesses: dict[str, list[list[float]]] = {}
    try:
        copied = 2 * cpu_gbps(*_sizes(lab), _copies(lab))
        for name, (kind, settings) in OPTIMIZERS.items():
            for loop in LOOPS:
                if "fused" in loop and kind == "RMSprop":
                    continue
                rates = [
                    cpu_gbps(*_sizes(lab), _updates(lab, kind, settings | loop)) for _ in lab.seeds
                ]
                accesses.setdefault(name, []).append([copied / rate for rate in rates])
        sums = [copied / cpu_gbps(*service_sums(lab, "float32")) for _ in lab.seeds]
    finally:
        torch.set_num_threads(threads)
    return accesses, sums


def _gbps(accesses: float) -> float:
    """Return what gradients a server of the paper's takes, to whole Gbit/s."""
    return round(min(NIC_GBPS, MEMORY_GBPS / (accesses + NIC_ACCESSES)))


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
