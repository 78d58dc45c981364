"""§5.2, Figures 14 and 16: how long flows to parameter servers take, beside other transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason, at_least
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"resnet50": "ResNet-50", "inception-v3": "Inception-v3"}
RIVALS = {"dctcp": "DCTCP", "pias": "PIAS", "pfabric": "pFabric"}
KINDS = ["dlcp", *RIVALS]
SCALES = [36, 72, 144]
"""Workers, evenly on the racks; the text does not give Figure 14's."""
SWEPT_AT = 72
"""The scale at which settings are swept, and timeouts, which Figure 16 has without its scale."""
TIMES = {"mean_s": "mean", "p99_s": "tail (99 %)"}
LOWER = {
    ("resnet50", "mean_s"): {"dctcp": 43.1, "pias": 44.8, "pfabric": 35.5},
    ("resnet50", "p99_s"): {"dctcp": 91.8, "pias": 91.8, "pfabric": 88.6},
    ("inception-v3", "mean_s"): {"dctcp": 30.3, "pias": 31.8, "pfabric": 26.5},
    ("inception-v3", "p99_s"): {"dctcp": 89.7, "pias": 90.0, "pfabric": 89.2},
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
BATCH, FLOPS = 128, 1e13
"""Of a V100; the paper has the times from its testbed."""
Setting = Mapping[str, Any]
Wanted = tuple[str, int, Setting]
"""A transport, workers, and what is not as usual."""
SWEPT: list[Setting] = [
    {"draw": "once"},
    {"batch": 32},
    {"core": "400Gbit"},
    {"threshold": "100kB"},
    {"demotion": ["20kB", "200kB", "1MB"]},
]
ONLY = {"threshold": ["dlcp"], "demotion": ["pias"]}
"""Whom a setting says something about, where not all."""
OVER = (
    "a tensor's server drawn by each worker or once for all, 32 or 128 samples a worker, links to "
    "the core of 100 or 400 Gbit/s, DLCP's first threshold at 30 or 100 kB, two sets of PIAS's"
)
SHORT: Setting = {"rto": "250us", "initial_window": "1065kB"}
"""pFabric as its own paper has it: a window of one bandwidth-delay product, and small timeouts."""
CHANGE = "pFabric with a window of 1,065 kB and timeouts of 0.25 ms"
CONTRADICTS = '§5.2.1: "TCP initial window is 10", "RTomin is 10ms"'


def run(lab: Lab) -> Outcome:
    """Let workers push one iteration's gradients to a quarter as many servers."""
    models = ["resnet50"] if lab.quick else list(MODELS)
    scales = SCALES[:1] if lab.quick else SCALES
    settings: list[Setting] = [] if lab.quick else SWEPT
    at = scales[0] if lab.quick else SWEPT_AT
    rtos: list[Setting] = [{"rto": f"{rto}ms"} for rto in LOWER_BY_RTO]
    wanted: list[Wanted] = [(kind, workers, {}) for kind in KINDS for workers in scales]
    wanted += [(kind, at, _of(kind, more)) for kind in KINDS for more in [*settings, *rtos]]
    times = _Times(lab, models, wanted)

    def tail_below_all(model: str) -> Spread:
        of_scales = [
            _each(min, [times.lower(kind, model, "p99_s", workers) for kind in RIVALS])
            for workers in scales
        ]
        return Spread.of(_each(max, of_scales))

    findings = [
        Finding(
            "Fig. 14",
            _what(model, of, kind, percent),
            _ratio(percent),
            times.most(kind, model, of, scales, at, settings),
            unit="x",
            swept=OVER if settings else "",
        )
        for (model, of), by_kind in LOWER.items()
        if model in models
        for kind, percent in by_kind.items()
    ]
    findings += [
        Finding(
            "Fig. 14",
            f"{MODELS[model]}: by how much DLCP's tail is below the best of the others', at most",
            "80 % and more",
            tail_below_all(model),
            holds=at_least(AIM),
            unit="%",
        )
        for model in models
    ]
    findings += [
        Finding(
            "Fig. 16",
            f"{MODELS[model]}: tail with timeouts of {rto} ms, others' at most by DLCP's "
            f"({percent} % lower)",
            _ratio(percent),
            Spread.of(
                _each(
                    max,
                    [times.ratio(kind, model, "p99_s", at, {"rto": f"{rto}ms"}) for kind in RIVALS],
                )
            ),
            unit="x",
        )
        for rto, by_model in LOWER_BY_RTO.items()
        for model, percent in by_model.items()
        if model in models
    ]

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(models), 2, squeeze=False)
        figure.set_size_inches(10, 4.4 * len(models))
        for row, model in zip(rows, models, strict=True):
            for axes, of in zip(row, TIMES, strict=True):
                for kind in KINDS:
                    found = [Spread.of(times.of(kind, model, of, one)) for one in scales]
                    axes.errorbar(
                        scales,
                        [1e3 * s.median for s in found],
                        yerr=[
                            [1e3 * (s.median - s.least) for s in found],
                            [1e3 * (s.most - s.median) for s in found],
                        ],
                        fmt="o-",
                        capsize=3,
                        label=RIVALS.get(kind, "DLCP"),
                    )
                axes.set_ylim(0)
                finish(axes, "workers", "completion time (ms)", f"{MODELS[model]}, {TIMES[of]}")

    series = {
        f"{kind} {model} {of}": [times.of(kind, model, of, one) for one in scales]
        for kind in KINDS
        for model in models
        for of in (*TIMES, "p95_s", "p999_s", "max_s")
    }
    return Outcome(findings, draw, {"workers": scales, **series})


def why(lab: Lab) -> list[Reason]:
    """Give pFabric what its own paper gives it."""
    models = ["resnet50"] if lab.quick else list(MODELS)
    at = SCALES[0] if lab.quick else SWEPT_AT
    times = _Times(lab, models, [("dlcp", at, {}), ("pfabric", at, SHORT)])

    def found(model: str, of: str) -> Spread:
        theirs, ours = times.of("pfabric", model, of, at, SHORT), times.of("dlcp", model, of, at)
        return Spread.of([one / other for one, other in zip(theirs, ours, strict=True)])

    return [
        Reason(
            _what(model, of, "pfabric", by_kind["pfabric"]),
            f"{CHANGE}, {at} workers",
            found(model, of),
            CONTRADICTS,
        )
        for (model, of), by_kind in LOWER.items()
        if model in models
    ]


class _Times:
    """How long flows took: lists, an entry a seed."""

    def __init__(self, lab: Lab, models: list[str], wanted: list[Wanted]) -> None:
        # The longest first, so that none is alone at the end.
        wanted = sorted(wanted, key=lambda one: -one[1])
        self._runs = lab.with_seeds(lab.seeds[:SEEDS]).play(
            {
                _name(kind, model, workers, more): _scenario(lab, kind, model, workers, more)
                for kind, workers, more in wanted
                for model in models
            },
            throughputs=False,
        )

    def of(
        self, kind: str, model: str, of: str, workers: int, more: Setting | None = None
    ) -> list[float]:
        """Return times in seconds."""
        return _times(self._runs[_name(kind, model, workers, more or {})], of)

    def ratio(
        self, kind: str, model: str, of: str, workers: int, more: Setting | None = None
    ) -> list[float]:
        """Return a rival's by DLCP's, each with what of a setting is about it."""
        theirs = self.of(kind, model, of, workers, _of(kind, more or {}))
        ours = self.of("dlcp", model, of, workers, _of("dlcp", more or {}))
        return [one / other for one, other in zip(theirs, ours, strict=True)]

    def lower(self, kind: str, model: str, of: str, workers: int) -> list[float]:
        """Return by how many percent DLCP's is below a rival's."""
        return [100 * (1 - 1 / ratio) for ratio in self.ratio(kind, model, of, workers)]

    def most(
        self,
        kind: str,
        model: str,
        of: str,
        scales: list[int],
        at: int,
        settings: list[Setting],
    ) -> Spread:
        """Return the largest ratio of any scale, as the paper says it; over what is swept."""
        best = _each(max, [self.ratio(kind, model, of, workers) for workers in scales])
        others = [self.ratio(kind, model, of, at, more) for more in settings]
        return Spread.over([Spread.of(one) for one in [best, *others]])


def _of(kind: str, more: Setting) -> Setting:
    return {key: value for key, value in more.items() if kind in ONLY.get(key, KINDS)}


def _scenario(lab: Lab, kind: str, model: str, workers: int, more: Setting) -> dict[str, Any]:
    network: dict[str, Any] = {
        "topology": "leaf-spine",
        "leaves": 9,
        "spines": 4,
        "hosts": 16,
        "rate": "100Gbit",
        "core_rate": more.get("core", "100Gbit"),
        # Eight links there and back are the paper's 85.2 us.
        "delay": "10.65us",
        "queue": "512KiB",
        "port_buffer": "512KiB",
    }
    entry: dict[str, Any] = {
        "workers": workers,
        "servers": workers // 4,
        "model": model,
        "batch": more.get("batch", BATCH),
        "flops": FLOPS,
        "draw": more.get("draw", "each-worker"),
    }
    if lab.quick:
        entry["compression"] = 16.0
    transport: dict[str, Any] = {"kind": kind, "rto_min": more.get("rto", "10ms")}
    if kind == "dlcp":
        network["selective_dropping"] = {"threshold": more.get("threshold", "30kB"), "step": 0.5}
        # 10 % as on the testbed (§5.1.1).
        entry |= {"dlcp": {"loss_bound": "10%", "finish": "bound-met"}, "spray": True}
    elif kind == "pfabric":
        network["order"] = "least-remaining"
        if window := more.get("initial_window"):
            transport["initial_window"] = window
        entry |= {"transport": transport, "spray": True}
    else:
        # 65 packets of 1,538 bytes on the link.
        network |= {"ecn": "99970B", "nic_ecn": False}
        if kind == "pias":
            network["ecn_by_port"] = True
            transport["demotion"] = more.get("demotion", ["67kB", "500kB", "1.6MB"])
        entry |= {"transport": transport, "ecn": True}
    return {
        "title": f"Figure 14: {kind}, {model}, {workers} workers",
        "until": "5s",
        "interval": "1s",
        "network": network,
        "parameter_server": [entry],
    }


def _name(kind: str, model: str, workers: int, more: Setting) -> str:
    # DLCP has no such timeout.
    changed = {key: value for key, value in more.items() if key != "rto" or kind != "dlcp"}
    parts = [f"{key}-{_plain(value)}" for key, value in changed.items()]
    return "-".join(["completion", kind, model, str(workers), *parts])


def _plain(value: Any) -> str:
    return "-".join(value) if isinstance(value, list) else str(value)


def _each(choose: Callable[[Sequence[float]], float], lists: Sequence[list[float]]) -> list[float]:
    """Return what is chosen from all of the lists, for each seed."""
    return [choose(of_seed) for of_seed in zip(*lists, strict=True)]


def _times(runs: Runs, of: str) -> list[float]:
    def of_flows(report: Report) -> float:
        (entry,) = report["parameter_servers"]
        return float(entry["flow_times"][of])

    return runs.samples(of_flows)


def _what(model: str, of: str, kind: str, percent: float) -> str:
    return (
        f"{MODELS[model]}: {TIMES[of]} completion time, {RIVALS[kind]}'s by DLCP's at most "
        f"({percent} % lower)"
    )


def _ratio(percent: float) -> float:
    return round(1 / (1 - percent / 100), 2)


EXPERIMENT = Experiment(
    "completion", "Completion times of flows to parameter servers (Figures 14 and 16)", run, why
)
