"""§5.5, Figure 15: half the aggregators that a job needs, with and without congestion control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason
from fanin.reproduce.lab import Between, Lab, Runs, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 200.0
AGGREGATORS = setting.WINDOW // 2
"""Half of what the job has on the way when all of it is aggregated in the switch."""
PAPER_IMAGES = {"on": 66.8, "off": 23.2}
PAPER_GOODPUT_GBPS = 7.5
TIME_S = 3.0
"""Of the unscaled time: more than ten iterations with control, which is what the paper has."""
USUAL = ("1MB", "100kB")
QUEUES = ["700kB", "1MB", "2MB"]
QUEUES_QUICK = ["700kB", "1MB"]
MARKS = ["50kB", "300kB"]
"""Beside the usual, with control; without it nobody hears of a mark."""
Values = tuple[str, str]
"""Of the queue in front of the server: its length, and from where on it marks."""
RATIO = "VGG16 with half of its aggregators, congestion control on by off"
IMAGES = "VGG16 with half of its aggregators, congestion control {}"
GOODPUT = "the same with congestion control: a worker's goodput"


def run(lab: Lab) -> Outcome:
    """Train from an empty network on, as the paper does; the time includes everything."""
    queues = QUEUES_QUICK if lab.quick else QUEUES
    marks = [] if lab.quick else MARKS
    settings = {"off": [(queue, USUAL[1]) for queue in queues]}
    settings["on"] = settings["off"] + [(USUAL[0], mark) for mark in marks]
    swept = f"queues of {queues[0]} to {queues[-1]}"
    with_marks = f"{swept}, marks from {marks[0]} to {marks[-1]} on" if marks else swept
    runs = lab.play(
        {
            _name(case, values): _scenario(case, values)
            for case, of_case in settings.items()
            for values in of_case
        }
    )
    ratios = [_ratio(runs, values) for values in settings["on"]]
    images = {
        case: [runs[_name(case, values)].spread(setting.images_per_s) for values in of_case]
        for case, of_case in settings.items()
    }
    goodput = [runs[_name("on", values)].spread(setting.goodput_gbps) for values in settings["on"]]

    def draw(figure: Figure) -> None:
        one, two = figure.subplots(1, 2)
        for case, style in (("on", "C0-"), ("off", "C3-")):
            report = runs[_name(case, USUAL)].reports[0]
            series = report["jobs"][0]["series"]["aggregation_gbps"]
            times = [report["interval_s"] * SCALE * (at + 0.5) for at in range(len(series))]
            one.plot(times, series, style, label=f"congestion control {case}")
        title = "queue of 1 MB, marks from 100 kB on"
        finish(one, f"time (s, unscaled; scale {SCALE:g})", "goodput of a worker (Gbit/s)", title)
        for case, style in (("on", "C0o-"), ("off", "C3o-")):
            shown = [
                runs[_name(case, (queue, USUAL[1]))].spread(setting.images_per_s)
                for queue in queues
            ]
            two.plot(queues, [spread.median for spread in shown], style, label=f"control {case}")
            two.axhline(
                PAPER_IMAGES[case], color=style[:2], linestyle="--", label=f"paper, control {case}"
            )
        finish(two, "the queue in front of the server", "images/s and worker")

    def images_finding(case: str) -> Finding:
        over = Spread.over(images[case])
        what = IMAGES.format(case)
        of_what = with_marks if case == "on" else swept
        return Finding("Fig. 15", what, PAPER_IMAGES[case], over, unit="images/s", swept=of_what)

    return Outcome(
        [
            Finding(
                "Fig. 15",
                RATIO,
                PAPER_IMAGES["on"] / PAPER_IMAGES["off"],
                Spread.over(ratios),
                unit="x",
                swept=with_marks,
            ),
            images_finding("on"),
            images_finding("off"),
            Finding(
                "§5.5",
                GOODPUT,
                PAPER_GOODPUT_GBPS,
                Spread.over(goodput),
                unit="Gbit/s",
                swept=with_marks,
            ),
        ],
        draw,
        {
            "settings": settings,
            "images_per_s": {case: [s.median for s in of_one] for case, of_one in images.items()},
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Take away all that lets the window fit the aggregators."""
    values = USUAL
    half = '§5.5: "We reserve only 50% of the switch aggregators"'
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "no aggregator at all: every fragment goes to the server": ({"aggregators": 0}, half),
        "a quarter of the aggregators": ({"aggregators": AGGREGATORS // 2}, half),
        "indices in sequence instead of hashed": (
            {"hashing": "linear"},
            '§3.5: "HASH(<Job ID, Sequence Number>)%numAggregators"',
        ),
    }
    reasons = []
    for change, (more, contradicts) in changes.items():
        tag = "-".join(map(str, more.values()))
        names = {case: f"{_name(case, values)}-{tag}" for case in PAPER_IMAGES}
        runs = lab.play({name: _scenario(case, values, **more) for case, name in names.items()})
        on, off = (runs[names[case]] for case in ("on", "off"))
        reasons += [
            Reason(what, change, ours, contradicts)
            for what, ours in (
                (RATIO, _by(on, off)),
                (IMAGES.format("on"), on.spread(setting.images_per_s)),
                (IMAGES.format("off"), off.spread(setting.images_per_s)),
                (GOODPUT, on.spread(setting.goodput_gbps)),
            )
        ]
    return reasons


def _scenario(
    case: str, values: Values, *, aggregators: int = AGGREGATORS, **more: Any
) -> dict[str, Any]:
    queue, mark = values
    more |= {"start": Between(0, 1), "congestion_control": case == "on"}
    return {
        "title": f"Figure 15: congestion control {case}",
        "until": setting.ms(1000 * TIME_S / SCALE),
        "stall": "1s",
        "interval": setting.ms(250 / SCALE),
        "network": setting.rack(9, queue=queue, ecn=mark),
        "switch": {"aggregators": aggregators},
        "job": [setting.training("vgg16", SCALE, **more)],
    }


def _name(case: str, values: Values) -> str:
    return f"congestion-{case}-{'-'.join(values)}"


def _ratio(runs: dict[str, Runs], values: Values) -> Spread:
    return _by(runs[_name("on", values)], runs[_name("off", (values[0], USUAL[1]))])


def _by(on: Runs, off: Runs) -> Spread:
    pairs = zip(*(runs.samples(setting.images_per_s) for runs in (on, off)), strict=True)
    return Spread.of([one / other for one, other in pairs])


EXPERIMENT = Experiment(
    "congestion",
    "Half of the aggregators, VGG16 of 8 workers, one server (Figure 15)",
    run,
    why,
)
