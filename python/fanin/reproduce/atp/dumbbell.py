"""§5.3.2, Figure 12: two VGG16 jobs, each with a worker beyond a link that both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Between, Lab, Runs, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 200.0
TIME_S = 4.0
SYSTEMS: dict[str, str] = {
    "atp": "ATP",
    "ps-n-to-n": "a server beside each worker (BytePS NtoN)",
    "ring": "ring (Horovod)",
}
PAPER_GAIN = {"ps-n-to-n": 1.20, "ring": 1.25}
FASTER = "two VGG16 over a shared link: the faster job, ATP by {}"
JOBS = [("l0", "r0", "r1", "r4"), ("l1", "r2", "r3", "r5")]
"""Three workers, and the server where there is one."""


def run(lab: Lab) -> Outcome:
    """Train both jobs on each system."""
    runs = lab.play({_name(system): _scenario(system, setting.HOSTS) for system in SYSTEMS})
    images = _images(runs)

    def equal(system: str) -> Spread:
        return Spread.of([min(pair) / max(pair) for pair in zip(*images[system], strict=True)])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for job in range(len(JOBS)):
            medians = [Spread.of(images[system][job]).median for system in SYSTEMS]
            places = [at + 0.35 * (job - 0.5) for at in range(len(SYSTEMS))]
            axes.bar(places, medians, 0.35, label=f"job {job + 1}")
        axes.set_xticks(range(len(SYSTEMS)), [name.split(" (")[0] for name in SYSTEMS.values()])
        finish(axes, "", "images/s and worker")

    return Outcome(
        [
            *(
                Finding(
                    "§5.3.2, Fig. 12",
                    FASTER.format(SYSTEMS[system]),
                    paper,
                    _gain(images, system),
                    unit="x",
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
                )
                for system in ("atp", "ring")
            ),
        ],
        draw,
        {"images_per_s": images},
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let hosts cost nothing, or each byte as much."""
    changes: dict[str, Mapping[str, Any]] = {
        "hosts whose cores cost nothing": setting.HOSTS_FREE,
        "hosts that move 60 Gbit/s of whatever packets": {"host_byte_cost": "0.133ns"},
    }
    reasons = []
    for number, (change, cost) in enumerate(changes.items()):
        tag = f"-why-{number}"
        runs = lab.play({_name(system) + tag: _scenario(system, cost) for system in SYSTEMS})
        images = _images(runs, tag)
        for system in PAPER_GAIN:
            found = _gain(images, system)
            reasons.append(Reason(FASTER.format(SYSTEMS[system]), change, found))
    return reasons


def _images(runs: dict[str, Runs], tag: str = "") -> dict[str, list[list[float]]]:
    return {
        system: [
            [setting.images_per_s(report, job) for report in runs[_name(system) + tag].reports]
            for job in range(len(JOBS))
        ]
        for system in SYSTEMS
    }


def _gain(images: dict[str, list[list[float]]], system: str) -> Spread:
    ours, theirs = (
        [max(pair) for pair in zip(*images[one], strict=True)] for one in ("atp", system)
    )
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


def _scenario(system: str, cost: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": f"Figure 12: {SYSTEMS[system]}",
        # A ring waits for the timeouts of TCP.
        "stall": "1s",
        "until": setting.ms(1000 * TIME_S / SCALE),
        "warm_up": setting.ms(1000 * TIME_S / 4 / SCALE),
        "network": setting.network("dumbbell", cost, hosts=6),
        "switch": {"aggregators": setting.PAPER_PTA},
        "job": [_job(system, hosts) for hosts in JOBS],
    }


def _name(system: str) -> str:
    return f"dumbbell-{system}"


def _job(system: str, hosts: tuple[str, ...]) -> dict[str, Any]:
    *workers, server = hosts
    more: dict[str, Any] = {"server": server} if system == "atp" else {}
    return setting.training(
        "vgg16",
        SCALE,
        system=system,
        workers=workers,
        start=Between(0, 280 / SCALE),
        **more,
    )


EXPERIMENT = Experiment(
    "dumbbell", "Two VGG16 jobs over a link that they share (Figure 12)", run, why
)
