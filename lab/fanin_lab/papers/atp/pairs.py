"""§D.2, Figure 20: two jobs on one switch.

Which machines serve is not said. In one setting each job's server has a host of its own.
"""

from __future__ import annotations

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import PAPER, Bars, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated, computed, figure
from fanin_lab.sweep import words

TIME_S = 4.0
"""Of the unscaled time; the first quarter is warm-up."""
SWEPT = Either([*setting.CONTENDED_SWEPT, {"servers": "apart"}], quick=setting.CONTENDED_QUICK)
OVER = f"one host for both servers or two, {setting.CONTENDED_OVER}"
NAMES = {"vgg16": "VGG16", "resnet50": "ResNet50"}
SHORT = {"vgg16": "VGG\n16", "resnet50": "ResNet\n50"}
PAIRS = {
    "equal": [("vgg16", 3), ("vgg16", 3)],
    "workers": [("vgg16", 5), ("vgg16", 2)],
    "models": [("vgg16", 3), ("resnet50", 3)],
}
ALONE = {
    f"{model}-{workers}": (model, workers)
    for model, workers in sorted({job for pair in PAIRS.values() for job in pair})
}
PAPER_RATIO = {"equal": [0.9, 0.9], "models": [0.95, 0.9]}
PAPER_IMAGES = [145.6, 159.3]


def scenario(
    pair: str, scale: float, round_trip_us: float, aggregators: int, servers: str = "together"
) -> Scenario:
    """Return both jobs of a pair, or one of them alone."""
    jobs = PAIRS[pair] if pair in PAIRS else [ALONE[pair]]
    if pair in PAIRS:
        title = _named(jobs)
    else:
        ((model, workers),) = jobs
        title = f"{NAMES[model]} alone, {workers} workers"
    count = sum(workers for _, workers in jobs)
    places = {"together": [0] * len(jobs), "apart": range(len(jobs))}[servers]
    window = setting.WINDOWS[round_trip_us]
    own = [
        (*job, {"window": window, "server": f"h{count + place}"})
        for job, place in zip(jobs, places, strict=True)
    ]
    delay = setting.delay("rack", round_trip_us)
    return {
        "title": f"§D.2: {title}",
        **setting.measured(TIME_S, scale),
        "payload": "sample",
        "network": setting.rack(count + max(places) + 1, delay=delay),
        "switch": setting.switch(aggregators),
        "job": setting.sharing(own, scale),
    }


def _named(jobs: list[tuple[str, int]]) -> str:
    return " and ".join(f"{NAMES[model]} of {workers}" for model, workers in jobs)


def by_alone(at: At, pair: str, job: int) -> list[float]:
    """Return a job's images a second by those that it has alone."""
    model, workers = PAIRS[pair][job]
    (single,) = at.samples(setting.images_per_s, pair=f"{model}-{workers}")
    return [shared / single for shared in at.samples(setting.images_of(job), pair=pair)]


def equal(at: At) -> list[float]:
    """Return the slower job's by the faster one's, each by what it has alone."""
    both = zip(by_alone(at, "equal", 0), by_alone(at, "equal", 1), strict=True)
    return [min(of_seed) / max(of_seed) for of_seed in both]


def _five_by_two(report: Report) -> float:
    five, two = setting.images_of_jobs(report)
    return five / two


def picture(at: At) -> Picture:
    """Show each job's throughput by that alone, a panel for each setting."""

    def panel(of: At, y: str) -> Panel:
        marks: list[Mark] = []
        ticks: dict[int, str] = {}
        place = 0
        for pair, jobs in PAIRS.items():
            for job, (model, workers) in enumerate(jobs):
                spread = Spread.of(by_alone(of, pair, job))
                marks.append(Bars([place], [spread], look={"color": f"C{job}"}))
                if pair in PAPER_RATIO:
                    label = None if place else "paper (none for 5 and 2 workers)"
                    ends, paper = [place - 0.4, place + 0.4], [PAPER_RATIO[pair][job]] * 2
                    marks.append(Line(ends, paper, label=label, look=PAPER))
                ticks[place] = f"{SHORT[model]}\nof {workers}"
                place += 1
            place += 1
        title = words.settings(of.setting)
        return Panel(marks, "", y, title, ticks=ticks, small_ticks=True, least_y=0, most_y=1.1)

    y = "throughput beside the other job, by that alone"
    panels = [panel(of, "" if number else y) for number, of in enumerate(at.settings)]
    return Picture(panels, (3.5 * len(panels) + 2, 4.8), share_y=True)


EXPERIMENT = Simulated(
    "pairs",
    "Two jobs on one switch (§D.2)",
    scenario,
    # Settings differ by more than seeds do, and these choose nothing that matters to one alone.
    [Cases({"pair": PAIRS}, SWEPT, seeds_swept=1), Cases({"pair": ALONE}, SWEPT, seeds=1)],
    [
        *(
            Row(
                "§D.2",
                f"{NAMES[model]} of {workers} workers beside "
                f"{_named([PAIRS[pair][1 - job]])}, by alone",
                PAPER_RATIO[pair][job],
                computed(by_alone, pair, job),
                "x",
            )
            for pair in PAPER_RATIO
            for job, (model, workers) in enumerate(PAIRS[pair])
            if not (pair == "equal" and job)
        ),
        Row(
            "§D.2, Fig. 20",
            "VGG16 of 3 workers beside VGG16 of 3: the slower job by the faster",
            1.0,
            equal,
            "x",
        ),
        Row(
            "§D.2",
            "VGG16 of 5 workers beside VGG16 of 2: 5 by 2",
            PAPER_IMAGES[0] / PAPER_IMAGES[1],
            figure(_five_by_two, pair="workers"),
            "x",
        ),
        *(
            Row(
                "§D.2",
                f"VGG16 of {PAIRS['workers'][job][1]} of these",
                paper,
                figure(setting.images_of(job), pair="workers"),
                "images/s",
            )
            for job, paper in enumerate(PAPER_IMAGES)
        ),
    ],
    picture,
    usual=setting.CONTENDED,
    over=OVER,
).experiment()
