"""§5.5, Figure 15: half the aggregators that a job needs, with and without congestion control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason, at_most
from fanin_lab.papers.lab import Between, Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITERATIONS = 10
"""As many as in the paper. Times and figures include everything from an empty network on."""
LIMIT_S = 30.0
"""Of the unscaled time: what is not done by then is not measured."""
USUAL: dict[str, Any] = {
    "scale": 200.0,
    "delay": setting.DELAY,
    "windows": 1,
    "nic": "1MB",
    "queue": "1MB",
    "ecn": "100kB",
}
"""`windows`: how long those are, by what fills a host. `nic`: what waits for the server's cores at
most; nothing of it is marked. `queue` and `ecn`: of the switch's queues."""
SWEPT: list[dict[str, Any]] = [
    {},
    {"delay": setting.PAPER_DELAY},
    {"windows": 2},
    {"nic": "64MB"},
    {"queue": "300kB"},
    {"ecn": "300kB"},
    {"scale": 100.0},
]
SWEPT_QUICK = SWEPT[:2]
SEEDS = 3
"""Of those that there are, with every setting but the first."""
OVER = (
    "links of 6 or 20 us, windows that fill a host once or twice, 1 or 64 MB for the server's "
    "cores, queues of 0.3 or 1 MB, marks from 100 or 300 kB on, scales of 100 or 200"
)
PAPER_IMAGES = {"on": 66.8, "off": 23.2}
PAPER_GOODPUT_GBPS = 7.5
PAPER_OFF_GBPS = 4.0
"""Without control the goodput of a second is between this and none."""
RATIO = "VGG16 with half of its aggregators, congestion control on by off"
IMAGES = "VGG16 with half of its aggregators, congestion control {}"
GOODPUT = "the same with congestion control: a worker's goodput"
GREATEST = "the same without: a worker's goodput in its best second"
LEAST = "the same without: a worker's goodput in its worst second"


def run(lab: Lab) -> Outcome:
    """Train for ten iterations with every setting, with and without control."""
    swept = SWEPT_QUICK if lab.quick else SWEPT
    runs = _play(lab, swept[:1]) | _play(lab.with_seeds(lab.seeds[:SEEDS]), swept[1:])
    over = "" if lab.quick else OVER
    figures = _figures(runs, swept)

    def draw(figure: Figure) -> None:
        one, two = figure.subplots(1, 2)
        for case, colour in (("on", "C0"), ("off", "C3")):
            seconds = _seconds(runs[_name(case, {})].reports[0])
            times = [at + 0.5 for at in range(len(seconds))]
            one.plot(times, seconds, f"{colour}o-", label=f"control {case}")
            shown = [runs[_name(case, more)].spread(setting.images_per_s) for more in swept]
            label = f"control {case}"
            two.plot([s.median for s in shown], range(len(swept)), f"{colour}o", label=label)
            paper = f"paper, control {case}"
            two.axvline(PAPER_IMAGES[case], color=colour, linestyle="--", label=paper)
        one.set_ylim(0)
        title = words.setting("scale", USUAL["scale"])
        finish(one, "time until the job ends (s, unscaled)", "goodput of a worker (Gbit/s)", title)
        names = [words.settings(more) for more in swept]
        two.set_yticks(range(len(swept)), names)
        two.set_xlim(0)
        finish(two, "images/s and worker", "")

    papers = {
        RATIO: (PAPER_IMAGES["on"] / PAPER_IMAGES["off"], "x"),
        IMAGES.format("on"): (PAPER_IMAGES["on"], "images/s"),
        IMAGES.format("off"): (PAPER_IMAGES["off"], "images/s"),
        GOODPUT: (PAPER_GOODPUT_GBPS, "Gbit/s"),
        GREATEST: (PAPER_OFF_GBPS, "Gbit/s"),
    }
    return Outcome(
        [
            *(
                Finding("§5.5, Fig. 15", what, paper, figures[what], unit=unit, swept=over)
                for what, (paper, unit) in papers.items()
            ),
            Finding(
                "§5.5, Fig. 15",
                LEAST,
                "0: less than a tenth of the best second's there",
                figures[LEAST],
                holds=at_most(PAPER_OFF_GBPS / 10),
                unit="Gbit/s",
                swept=over,
            ),
        ],
        draw,
        {
            "settings": [USUAL | more for more in swept],
            "images_per_s": {
                case: [runs[_name(case, m)].samples(setting.images_per_s) for m in swept]
                for case in PAPER_IMAGES
            },
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Take away all of the aggregators."""
    change = "no aggregator at all: every fragment goes to the server"
    half = '§5.5: "We reserve only 50% of the switch aggregators"'
    settings = [{**more, "aggregators": 0} for more in SWEPT[:2]]
    runs = _play(lab, settings)
    return [Reason(what, change, ours, half) for what, ours in _figures(runs, settings).items()]


def _play(lab: Lab, settings: Sequence[dict[str, Any]]) -> dict[str, Runs]:
    scenarios = {
        _name(case, more): _scenario(case, more) for case in PAPER_IMAGES for more in settings
    }
    # Without control it may take for ever, and that is the finding.
    return lab.play(scenarios, unfinished=True)


def _figures(runs: Mapping[str, Runs], settings: Sequence[dict[str, Any]]) -> dict[str, Spread]:
    """Return all of the figures, over the settings."""

    def by(more: dict[str, Any]) -> Spread:
        both = (runs[_name(case, more)].samples(setting.images_per_s) for case in ("on", "off"))
        return Spread.of([on / off for on, off in zip(*both, strict=True)])

    found = {RATIO: [by(more) for more in settings]}
    for what, case, figure in (
        (IMAGES.format("on"), "on", setting.images_per_s),
        (IMAGES.format("off"), "off", setting.images_per_s),
        (GOODPUT, "on", setting.goodput_gbps),
        (GREATEST, "off", lambda report: max(_seconds(report))),
        (LEAST, "off", lambda report: min(_seconds(report))),
    ):
        found[what] = [runs[_name(case, more)].spread(figure) for more in settings]
    return {what: Spread.over(spreads) for what, spreads in found.items()}


def _seconds(report: Report) -> list[float]:
    """Return the goodput of each unscaled second, but of the last, in which the job ends."""
    series: list[float] = report["jobs"][0]["series"]["aggregation_gbps"]
    return series[:-1] or series


def _scenario(case: str, more: Mapping[str, Any]) -> dict[str, Any]:
    of = {**USUAL, **more}
    scale = of["scale"]
    fills = setting.FILLS[of["delay"]]
    work = setting.training(
        "vgg16",
        scale,
        window=of["windows"] * fills,
        iterations=ITERATIONS,
        congestion_control=case == "on",
        start=Between(0, 1),
    )
    return {
        "title": f"Figure 15: congestion control {case}",
        "until": setting.ms(1000 * LIMIT_S / scale),
        "interval": setting.ms(1000 / scale),
        "payload": "sample",
        "network": setting.rack(9, delay=of["delay"], queue=of["queue"], ecn=of["ecn"]),
        # What peak throughput needs with all of it aggregated in the switch: what fills a host.
        "switch": setting.switch(of.get("aggregators", fills // 2)),
        "node": [{"name": "h8", "queue": of["nic"]}],
        "job": [{**work, "server": "h8"}],
    }


def _name(case: str, more: Mapping[str, Any]) -> str:
    return "-".join(["congestion", case, *(f"{key}-{value}" for key, value in more.items())])


EXPERIMENT = Experiment(
    "congestion",
    "Half of the aggregators, VGG16 of 8 workers, one server (Figure 15)",
    run,
    why,
)
