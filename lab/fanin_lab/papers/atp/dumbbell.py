"""§5.3.2, Figure 12: two VGG16 jobs, each with a worker beyond a link that both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason
from fanin_lab.papers.lab import Between, Lab, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[str, Any]
TIME_S = 4.0
"""Of the unscaled time; the first quarter is warm-up."""
PACKET = "1,344"
SYSTEMS: dict[str, str] = {
    "atp": "ATP",
    "ps-n-to-n": "a server beside each worker (BytePS NtoN RDMA)",
    "ring": "ring (Horovod RDMA)",
}
PAPER_GAIN = {"ps-n-to-n": 1.20, "ring": 1.25}
FASTER = "two VGG16 over a shared link: the faster job, ATP by {}"
JOBS = [("l0", "r0", "r1", "r4"), ("l1", "r2", "r3", "r5")]
"""Three workers, and the server where there is one."""
Images = dict[str, list[list[float]]]
"""By the runs' name: each job's, by seed."""


def run(lab: Lab) -> Outcome:
    """Train both jobs on each system."""
    settings = _settings(lab)
    swept = "" if lab.quick else setting.CONTENDED_OVER
    images = _images(_play(lab, settings), settings)

    def equal(system: str) -> Spread:
        def at(more: Values) -> Spread:
            pairs = zip(*images[_name(system, more)], strict=True)
            return Spread.of([min(pair) / max(pair) for pair in pairs])

        return Spread.over([at(more) for more in settings])

    def draw(figure: Figure) -> None:
        many = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        figure.set_size_inches(3 * len(settings) + 2, 4.8)
        for axes, more in zip(many, settings, strict=True):
            for job in range(len(JOBS)):
                spreads = [Spread.of(images[_name(system, more)][job]) for system in SYSTEMS]
                medians = [s.median for s in spreads]
                errors = [
                    [s.median - s.least for s in spreads],
                    [s.most - s.median for s in spreads],
                ]
                places = [at + 0.35 * (job - 0.5) for at in range(len(SYSTEMS))]
                axes.bar(places, medians, 0.35, yerr=errors, capsize=3, label=f"job {job + 1}")
            axes.set_xticks(range(len(SYSTEMS)), ["ATP", "NtoN", "ring"])
            y = "images/s and worker" if axes is many[0] else ""
            finish(axes, "", y, words.settings(more))

    return Outcome(
        [
            *(
                Finding(
                    "§5.3.2, Fig. 12",
                    FASTER.format(SYSTEMS[system]),
                    paper,
                    _gain(images, system, settings),
                    unit="x",
                    swept=swept,
                )
                for system, paper in PAPER_GAIN.items()
            ),
            *(
                Finding(
                    "§5.3.2, Fig. 12",
                    f"the same, {SYSTEMS[system]}: the slower job by the faster",
                    1.0,
                    equal(system),
                    unit="x",
                    swept=swept,
                )
                for system in ("atp", "ring")
            ),
        ],
        draw,
        {"images_per_s": images},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let RDMA cost hosts what ATP's packets do, or these nothing."""
    settings = _settings(lab)
    atp, rdma = ["atp"], list(PAPER_GAIN)
    changes: dict[str, tuple[Sequence[str], Mapping[str, Any]]] = {
        "hosts that RDMA costs as ATP's packets do": (rdma, setting.HOSTS),
        "hosts that ATP's packets cost nothing": (atp, setting.HOSTS_FREE),
    }
    reasons = []
    for number, (change, (systems, cost)) in enumerate(changes.items()):
        costs = dict.fromkeys(systems, cost)
        tag = f"-why-{number}"
        images = _images(_play(lab, settings, costs, tag), settings, tag)
        for system in PAPER_GAIN:
            found = _gain(images, system, settings)
            reasons.append(Reason(FASTER.format(SYSTEMS[system]), change, found))
    return reasons


def _settings(lab: Lab) -> list[Values]:
    return list(setting.CONTENDED_QUICK if lab.quick else setting.CONTENDED_SWEPT)


def _play(
    lab: Lab,
    settings: Sequence[Values],
    costs: Mapping[str, Mapping[str, Any]] | None = None,
    tag: str = "",
) -> dict[str, Runs]:
    costs = {} if costs is None else costs

    def of(settings: Sequence[Values]) -> dict[str, dict[str, Any]]:
        return {
            _name(system, more) + tag: _scenario(system, more, costs.get(system))
            for system in SYSTEMS
            for more in settings
        }

    # Settings differ by more than seeds do.
    return lab.play(of(settings[:1])) | lab.play(of(settings[1:]), once=True)


def _images(runs: Mapping[str, Runs], settings: Sequence[Values], tag: str = "") -> Images:
    names = [_name(system, more) for system in SYSTEMS for more in settings]
    return {
        name: [
            [setting.images_per_s(report, job) for report in runs[name + tag].reports]
            for job in range(len(JOBS))
        ]
        for name in names
    }


def _gain(images: Images, system: str, settings: Sequence[Values]) -> Spread:
    def at(more: Values) -> Spread:
        ours, theirs = (
            [max(pair) for pair in zip(*images[_name(one, more)], strict=True)]
            for one in ("atp", system)
        )
        return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])

    return Spread.over([at(more) for more in settings])


def _scenario(system: str, more: Values, cost: Mapping[str, Any] | None) -> dict[str, Any]:
    values = {**setting.CONTENDED, **more}
    scale, round_trip_us = values["scale"], values["round_trip_us"]
    delay = setting.delay("dumbbell", round_trip_us)
    if system == "atp":
        hosts = setting.HOSTS if cost is None else cost
        network = setting.network("dumbbell", hosts, hosts=6, delay=delay)
        keys = {"system": system, "window": setting.WINDOWS[round_trip_us]}
    else:
        network = setting.rdma("dumbbell", PACKET, hosts=6, delay=delay, **(cost or {}))
        keys = setting.rdma_keys(system, PACKET)

    def job(hosts: tuple[str, ...]) -> dict[str, Any]:
        *workers, server = hosts
        own = {"server": server} if system == "atp" else {}
        start = Between(0, 280 / scale)
        return setting.training("vgg16", scale, workers=workers, start=start, **keys, **own)

    return {
        "title": f"Figure 12: {SYSTEMS[system]}",
        "until": setting.ms(1000 * TIME_S / scale),
        "warm_up": setting.ms(1000 * TIME_S / 4 / scale),
        "payload": "sample",
        "network": network,
        "switch": setting.switch(values["aggregators"]),
        "job": [job(hosts) for hosts in JOBS],
    }


def _name(system: str, more: Values) -> str:
    return "-".join(["dumbbell", system, *(f"{key}-{value}" for key, value in more.items())])


EXPERIMENT = Experiment(
    "dumbbell", "Two VGG16 jobs over a link that they share (Figure 12)", run, why
)
