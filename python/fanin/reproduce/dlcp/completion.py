"""§5.2, Figures 14 and 16: how long flows to parameter servers take, beside other transports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import Experiment, Finding, Outcome, at_least
from fanin.reproduce.lab import Lab, Report, Runs, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"resnet50": "ResNet-50", "inception-v3": "Inception-v3"}
RIVALS = {"dctcp": "DCTCP", "pias": "PIAS", "pfabric": "pFabric"}
SCALES = [36, 72, 144]
"""Workers, evenly on the racks; the text does not give Figure 14's."""
LARGEST, FIGURE_16 = SCALES[-1], 72
LESS = {
    ("resnet50", "mean_s"): {"dctcp": 43.1, "pias": 44.8, "pfabric": 35.5},
    ("resnet50", "p99_s"): {"dctcp": 91.8, "pias": 91.8, "pfabric": 88.6},
    ("inception-v3", "mean_s"): {"dctcp": 30.3, "pias": 31.8, "pfabric": 26.5},
    ("inception-v3", "p99_s"): {"dctcp": 89.7, "pias": 90.0, "pfabric": 89.2},
}
"""By how many percent DLCP's completion times are lower at most (§5.2.2)."""
LESS_BY_RTO = {5: {"resnet50": 83.9, "inception-v3": 72.7}, 1: {"resnet50": 84.5, "inception-v3": 71.8}}
"""The same of the tail, by the shortest timeout in ms, at most (§5.3)."""
FLOPS = 1e13
"""Of a V100; the paper takes its times from its testbed."""
SWEPT: list[dict[str, Any]] = [
    {},
    {"flops": 2e13},
    {"threshold": "100kB"},
    {"demotion": ["100kB", "1MB"]},
]
OVER = "10 or 20 Tflop/s, DLCP's first threshold at 30 or 100 kB, PIAS's demotions"


def run(lab: Lab) -> Outcome:
    """Let workers push one iteration's gradients to a quarter as many servers."""
    models = ["resnet50"] if lab.quick else list(MODELS)
    scales = SCALES[:1] if lab.quick else SCALES
    swept = SWEPT[:1] if lab.quick else SWEPT
    kinds = ["dlcp", *RIVALS]
    scenarios = {
        _name(kind, model, workers): _scenario(kind, model, workers)
        for model in models
        for workers in scales
        for kind in kinds
    }
    scenarios |= {
        _name(kind, model, scales[0], **more): _scenario(kind, model, scales[0], **more)
        for model in models
        for kind in kinds
        for more in swept[1:]
    }
    scenarios |= {
        _name(kind, model, scales[0], rto=rto): _scenario(kind, model, scales[0], rto=rto)
        for model in models
        for kind in kinds
        for rto in LESS_BY_RTO
    }
    runs = lab.play(scenarios, once=True, throughputs=False)

    def less(kind: str, model: str, of: str, workers: int, **more: Any) -> float:
        ours, theirs = (
            _time(runs[_name(which, model, workers, **more)], of) for which in ("dlcp", kind)
        )
        return 100 * (1 - ours / theirs)

    def most(kind: str, model: str, of: str) -> Spread:
        """Return the largest reduction of any scale, as the paper says it; over what is swept."""
        best = max(less(kind, model, of, workers) for workers in scales)
        others = [less(kind, model, of, scales[0], **more) for more in swept[1:]]
        return Spread.of([best, *others])

    findings = [
        Finding(
            "Fig. 14",
            f"{MODELS[model]}: {_word(of)} completion time, less than {RIVALS[kind]}'s",
            paper,
            most(kind, model, of),
            unit="%",
            swept="" if lab.quick else OVER,
        )
        for (model, of), by_kind in LESS.items()
        if model in models
        for kind, paper in by_kind.items()
    ]
    findings += [
        Finding(
            "Fig. 14",
            f"{MODELS[model]}: tail completion time, less than the best of the others'",
            "80 % and more",
            Spread.of(
                [min(less(kind, model, "p99_s", workers) for kind in RIVALS) for workers in scales]
            ),
            holds=at_least(80.0),
            unit="%",
        )
        for model in models
    ]
    findings += [
        Finding(
            "Fig. 16",
            f"{MODELS[model]}: tail completion time, less than others' with timeouts of {rto} ms",
            paper,
            Spread.of(
                [max(less(kind, model, "p99_s", scales[0], rto=rto) for kind in RIVALS)]
            ),
            unit="%",
        )
        for rto, by_model in LESS_BY_RTO.items()
        for model, paper in by_model.items()
        if model in models
    ]

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(models), 2, squeeze=False)
        for row, model in zip(rows, models, strict=True):
            for axes, of in zip(row, ("mean_s", "p99_s"), strict=True):
                for kind in kinds:
                    times = [1e3 * _time(runs[_name(kind, model, one)], of) for one in scales]
                    axes.plot(scales, times, "o-", label=RIVALS.get(kind, "DLCP"))
                axes.set_ylim(0)
                finish(axes, "workers", "completion time (ms)", f"{MODELS[model]}, {_word(of)}")

    series = {
        f"{kind} {model} {of}": [_time(runs[_name(kind, model, one)], of) for one in scales]
        for kind in kinds
        for model in models
        for of in ("mean_s", "p99_s", "max_s")
    }
    return Outcome(findings, draw, {"workers": scales, **series})


def _scenario(kind: str, model: str, workers: int, **more: Any) -> dict[str, Any]:
    network: dict[str, Any] = {
        "topology": "leaf-spine",
        "leaves": 9,
        "spines": 4,
        "hosts": 16,
        "rate": "100Gbit",
        "core_rate": "400Gbit",
        # Eight links there and back are the paper's 85.2 us.
        "delay": "10.65us",
        "queue": "512KiB",
        "port_buffer": "512KiB",
    }
    entry: dict[str, Any] = {
        "workers": workers,
        "servers": workers // 4,
        "model": model,
        "flops": more.get("flops", FLOPS),
    }
    rto = f"{more.get('rto', 10)}ms"
    if kind == "dlcp":
        network["selective_dropping"] = {"threshold": more.get("threshold", "30kB"), "step": 0.5}
        # 10 % as on the testbed (§5.1.1).
        entry |= {"dlcp": {"loss_bound": "10%"}, "spray": True}
    elif kind == "pfabric":
        network["order"] = "least-remaining"
        entry |= {"transport": {"kind": kind, "rto_min": rto}, "spray": True}
    else:
        # 65 packets of 1,538 bytes on the link.
        network |= {"ecn": "99970B", "nic_ecn": False}
        transport: dict[str, Any] = {"kind": kind, "rto_min": rto}
        if kind == "pias":
            network["ecn_by_port"] = True
            transport["demotion"] = more.get("demotion", ["67kB", "500kB", "1.6MB"])
        entry |= {"transport": transport, "ecn": True}
    title = f"Figure 14: {kind}, {model}, {workers} workers"
    return {"title": title, "until": "5s", "interval": "1s", "network": network, "parameter_server": [entry]}


def _name(kind: str, model: str, workers: int, **more: Any) -> str:
    changed = [f"{key}-{_plain(value)}" for key, value in more.items()]
    return "-".join(["completion", kind, model, str(workers), *changed])


def _plain(value: Any) -> str:
    return "-".join(value) if isinstance(value, list) else str(value)


def _time(runs: Runs, of: str) -> float:
    def of_flows(report: Report) -> float:
        (entry,) = report["parameter_servers"]
        return float(entry["flow_times"][of])

    return runs.spread(of_flows).median


def _word(of: str) -> str:
    return "mean" if of == "mean_s" else "tail (99 %)"


EXPERIMENT = Experiment(
    "completion", "Completion times of flows to parameter servers (Figures 14 and 16)", run
)
