"""§5.2, Figures 14 and 16: how long flows to parameter servers take, beside other transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fanin_lab.papers.dlcp.setting import flow_time_ms, flow_time_s
from fanin_lab.papers.finding import at_least, by_lower
from fanin_lab.papers.lab import Scenario
from fanin_lab.papers.plot import Panel, Picture, Whiskers
from fanin_lab.papers.simulated import (
    At,
    Cases,
    Change,
    Either,
    NotPlayedError,
    Read,
    Row,
    Simulated,
    computed,
    each,
)

MODELS = {"resnet50": "ResNet-50", "inception-v3": "Inception-v3"}
PLAYED = Either(list(MODELS), quick=["resnet50"])
RIVALS = {"dctcp": "DCTCP", "pias": "PIAS", "pfabric": "pFabric"}
NAMES = {"dlcp": "DLCP", **RIVALS}
SCALES = Either([144, 72, 36], quick=[36])
"""Workers, evenly on the racks, the longest runs first; the text does not give Figure 14's."""
SWEPT_AT = Either(72, quick=36)
"""The scale at which most settings are swept."""
MOST_AT = Either([144], quick=[36])
"""The scale at which late workers, timeouts and links of the core are swept."""
BY_TIMEOUT_AT = Either([144, 72], quick=[36])
"""Figure 16 has no scale; what is said of it is "up to"."""
MEAN, TAIL = "mean", "tail"
LOWER = {
    ("resnet50", MEAN): {"dctcp": 43.1, "pias": 44.8, "pfabric": 35.5},
    ("resnet50", TAIL): {"dctcp": 91.8, "pias": 91.8, "pfabric": 88.6},
    ("inception-v3", MEAN): {"dctcp": 30.3, "pias": 31.8, "pfabric": 26.5},
    ("inception-v3", TAIL): {"dctcp": 89.7, "pias": 90.0, "pfabric": 89.2},
}
"""By how many percent DLCP's completion times are lower at most (§5.2.2)."""
LOWER_BY_RTO = {
    5: {"resnet50": 83.9, "inception-v3": 72.7},
    1: {"resnet50": 84.5, "inception-v3": 71.8},
}
"""The same of the tail, by the shortest timeout in ms, at most (§5.3)."""
AIM = 80.0
"""What the tail is to be lower by than the best of the others, in percent."""
SEEDS = 1
"""A run has up to 73,000 flows: the tails of three seeds of DLCP at 72 workers differ by 2 %."""
FLOPS = 1e13
"""A second, of a V100."""
LATE = {"jitter": "10%"}
"""How far a worker's computing is from the others' at most; usually all begin to send at once."""
FAST_CORE = {"core": "400Gbit"}
"""The paper's "4 x 100 Gbps" between a ToR and a core switch, if it is one link."""
OF_TESTBED: list[dict[str, Any]] = [
    {"batch": 32},
    {"batch": 32, "flops": 5e12},
    {"batch": 32, "flops": 2e13},
]
"""Samples as on the paper's testbed, from which its simulations have how long is computed."""
SWEPT: list[dict[str, Any]] = [
    {"draw": "once"},
    *OF_TESTBED,
    FAST_CORE,
    {"threshold": "10kB"},
    {"threshold": "60kB"},
    {"threshold": "120kB"},
    {"step": 0.1},
    {"demotion": ["20kB", "200kB", "1MB"]},
]
USUAL_TAIL, PERCENTILE = "p99_s", {"tail": "p999_s"}
"""Of the report: the paper does not say which percentile its tail is."""
OVER = (
    "the 99th or the 99.9th percentile as the tail, workers that are alike or differ by up to 10 "
    "%, a tensor's server drawn by each worker or once for all, 128 samples a worker or 32 with 5, "
    "10 or 20 TFLOP/s, links to the core of 100 or 400 Gbit/s, DLCP's first threshold at 10 to "
    "120 kB and the next ones 0.5 or 0.1 of it apart, two sets of PIAS's"
)
OVER_BY_TIMEOUT = (
    "the 99th or the 99.9th percentile as the tail, workers that are alike or differ by up to 10 "
    "%, 128 samples a worker or 32 with 5, 10 or 20 TFLOP/s, links to the core of 100 or 400 Gbit/s"
)
SHORT = {"rto": "250us", "initial_window": "1065kB"}
"""pFabric as its own paper has it: a window of one bandwidth-delay product, and small timeouts."""


def scenario(
    system: str,
    model: str,
    workers: int,
    compression: float | None,
    draw: str = "each-worker",
    batch: int = 128,
    flops: float = FLOPS,
    core: str = "100Gbit",
    threshold: str = "30kB",
    step: float = 0.5,
    demotion: Sequence[str] = ("67kB", "500kB", "1.6MB"),
    rto: str = "10ms",
    initial_window: str | None = None,
    jitter: str | None = None,
    tail: str = USUAL_TAIL,
) -> Scenario:
    """Return workers that push one iteration's gradients to a quarter as many servers.

    `tail` is which figure of the report stands for the paper's tail, and changes no scenario.
    """
    del tail
    network: dict[str, Any] = {
        "topology": "leaf-spine",
        "leaves": 9,
        "spines": 4,
        "hosts": 16,
        "rate": "100Gbit",
        "core_rate": core,
        # Eight links there and back are the paper's 85.2 us.
        "delay": "10.65us",
        "queue": "512KiB",
        "port_buffer": "512KiB",
    }
    entry: dict[str, Any] = {
        "workers": workers,
        "servers": workers // 4,
        "model": model,
        "batch": batch,
        "flops": flops,
        "draw": draw,
    }
    if compression:
        entry["compression"] = compression
    if jitter:
        entry["jitter"] = jitter
    transport: dict[str, Any] = {"kind": system, "rto_min": rto}
    if system == "dlcp":
        network["selective_dropping"] = {"threshold": threshold, "step": step}
        # 10 % as on the testbed (§5.1.1). It has no such timeout.
        entry |= {"dlcp": {"loss_bound": "10%", "finish": "bound-met"}, "spray": True}
    elif system == "pfabric":
        network["order"] = "least-remaining"
        if initial_window:
            transport["initial_window"] = initial_window
        entry |= {"transport": transport, "spray": True}
    else:
        # 65 packets of 1,538 bytes on the link.
        network |= {"ecn": "99970B", "nic_ecn": False}
        if system == "pias":
            network["ecn_by_port"] = True
            transport["demotion"] = list(demotion)
        entry |= {"transport": transport, "ecn": True}
    return {
        "title": f"Figure 14: {system}, {model}, {workers} workers",
        "until": "5s",
        "interval": "1s",
        "network": network,
        "parameter_server": [entry],
    }


def time_s(at: At, of: str) -> Read:
    """Return what reads the mean or the tail. NotPlayedError where a mean is of no new scenario."""
    if of == TAIL:
        return flow_time_s(at.setting.get("tail", USUAL_TAIL))
    if "tail" in at.setting:
        raise NotPlayedError(of)
    return flow_time_s("mean_s")


def by_dlcp(at: At, of: str, rival: str, **case: Any) -> list[float]:
    """Return a rival's time by DLCP's."""
    return at.by(time_s(at, of), {"system": rival, **case}, {"system": "dlcp", **case})


def most(at: At, model: str, of: str, rival: str) -> list[float]:
    """Return the largest ratio of any scale that was played, as the paper says it."""
    scales = at.played("workers", system=rival, model=model)
    return each(max, [by_dlcp(at, of, rival, model=model, workers=w) for w in scales])


def tail_below_all(at: At, model: str) -> list[float]:
    """Return by how many percent DLCP's tail is below the best of the others', at most."""

    def below(workers: int) -> list[float]:
        ratios = [by_dlcp(at, TAIL, rival, model=model, workers=workers) for rival in RIVALS]
        return each(min, [[100 * (1 - 1 / one) for one in of_rival] for of_rival in ratios])

    scales = at.played("workers", system="dlcp", model=model)
    return each(max, [below(workers) for workers in scales])


def most_by_rto(at: At, model: str, rto: int) -> list[float]:
    """Return the largest ratio of a rival's tail to DLCP's with a timeout, at any scale."""
    timeout = {"model": model, "rto": f"{rto}ms"}
    scales = at.played("workers", system="dlcp", **timeout)
    return each(
        max,
        [
            by_dlcp(at, TAIL, rival, **timeout, workers=workers)
            for rival in RIVALS
            for workers in scales
        ],
    )


def picture(at: At) -> Picture:
    """Show mean and tail by the workers: a row for each model."""
    models, scales = at.values("model"), sorted(at.values("workers"))
    shown = {MEAN: "mean_s", TAIL: USUAL_TAIL}

    def line(model: str, of: str, system: str) -> Whiskers:
        read, case = flow_time_ms(shown[of]), {"model": model, "system": system}
        spreads = [at.spread(read, **case, workers=workers) for workers in scales]
        return Whiskers(scales, spreads, NAMES[system])

    panels = [
        Panel(
            [line(model, of, system) for system in NAMES],
            "workers",
            "completion time (ms)",
            f"{MODELS[model]}, {of}{' (99 %)' if of == TAIL else ''}",
            least_y=0,
        )
        for model in models
        for of in shown
    ]
    return Picture(panels, (10, 4.4 * len(models)), rows=len(models))


BY_RIVAL = {
    (model, of, rival): Row(
        "Fig. 14",
        f"{MODELS[model]}: {of} completion time, {RIVALS[rival]}'s by DLCP's at most "
        f"({percent} % lower)",
        by_lower(percent),
        computed(most, model, of, rival),
        "x",
    )
    for (model, of), by_rival in LOWER.items()
    for rival, percent in by_rival.items()
}


def _as_its_own_paper(workers: int) -> Change:
    return Change(
        f"pFabric with a window of 1,065 kB and timeouts of 0.25 ms, {workers} workers",
        SHORT,
        '§5.2.1: "TCP initial window is 10", "RTomin is 10ms"',
        where={"system": ["pfabric"]},
        of=[row for (_, _, rival), row in BY_RIVAL.items() if rival == "pfabric"],
        cases=[_cases(["dlcp", "pfabric"], [workers])],
    )


def _cases(systems: Sequence[str], workers: Any, settings: Any = ({},), **more: Any) -> Cases:
    axes = {"workers": workers, "system": systems, "model": PLAYED, **more}
    return Cases(axes, settings, seeds=SEEDS, throughputs=False)


def _both(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a setting with both percentiles."""
    return [setting, {**setting, **PERCENTILE}]


LATE_OR_FAST = [*_both(LATE), *_both(FAST_CORE)]
TIMEOUTS = [f"{rto}ms" for rto in LOWER_BY_RTO]
AT = Either([SWEPT_AT.full], quick=[SWEPT_AT.quick])
EXPERIMENT = Simulated(
    "completion",
    "Completion times of flows to parameter servers (Figures 14 and 16)",
    scenario,
    [
        _cases(list(NAMES), SCALES, _both({})),
        _cases(list(NAMES), AT, Either([{}, *SWEPT], quick=[{}])),
        _cases(
            list(NAMES),
            MOST_AT,
            Either([*LATE_OR_FAST, *_both(LATE | FAST_CORE)], quick=_both(LATE)),
        ),
        _cases(list(NAMES), BY_TIMEOUT_AT, _both({}), rto=TIMEOUTS),
        _cases(list(NAMES), MOST_AT, Either(LATE_OR_FAST, quick=[]), rto=TIMEOUTS),
        _cases(list(NAMES), AT, Either(OF_TESTBED, quick=[]), rto=TIMEOUTS),
    ],
    [
        *BY_RIVAL.values(),
        *(
            Row(
                "Fig. 14",
                f"{name}: by how much DLCP's tail is below the best of the others', at most",
                "80 % and more",
                computed(tail_below_all, model),
                "%",
                at_least(AIM),
            )
            for model, name in MODELS.items()
        ),
        *(
            Row(
                "Fig. 16",
                f"{MODELS[model]}: tail with timeouts of {rto} ms, others' at most by DLCP's "
                f"({percent} % lower)",
                by_lower(percent),
                computed(most_by_rto, model, rto),
                "x",
                over=OVER_BY_TIMEOUT,
            )
            for rto, by_model in LOWER_BY_RTO.items()
            for model, percent in by_model.items()
        ),
    ],
    picture,
    usual={"compression": Either(None, quick=16.0)},
    over=OVER,
    changes=Either([_as_its_own_paper(SWEPT_AT.full)], quick=[_as_its_own_paper(SWEPT_AT.quick)]),
).experiment()
