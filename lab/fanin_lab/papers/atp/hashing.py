"""§5.4.2, Figure 14: one to eight jobs with aggregators by hash, in a row, or in static parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason, at_least
from fanin_lab.papers.lab import Between, Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMES = {
    "hash": "hash (ATP)",
    "linear": "sequence number (linear)",
    "partition": "static parts",
}
JOBS = [1, 4, 8]
JOBS_QUICK = [8]
TIME_MS = 50.0
WARM_UP_MS = 10.0
Values = tuple[int, int]
"""Workers of a job, and packets that each has on the way at most."""
USUAL = (2, setting.PAPER_PTA // 3)
"""The window is Figure 13's: there it is a third of the peak-throughput aggregators."""
SWEPT = [USUAL, (4, USUAL[1]), (2, setting.PAPER_PTA), (2, setting.PAPER_PTA // 8)]
"""With eight jobs. The paper says of neither; its eight machines hold fewer than eight workers of
each of eight jobs, if each has its own. It compares "when there is no contention for switch
aggregators" (§5.4.2): then windows are an eighth of the table at most."""
SEEDS = 3
"""Of those that there are, with every setting but the first."""
OVER = "jobs of 2 or 4 workers, windows of 247, 660 or 1,980 packets"


STATIC = "8 jobs: throughput by hash, by that of static parts"
LINEAR = "8 jobs: throughput by hash, by that in sequence"
WAYS_TAG = "-ways"


def run(lab: Lab) -> Outcome:
    """Run micro-benchmarks whose servers share a host."""
    counts = JOBS_QUICK if lab.quick else JOBS
    swept = [USUAL] if lab.quick else SWEPT
    most = counts[-1]
    few = lab.with_seeds(lab.seeds[:SEEDS])
    runs = lab.play({_name(s, most, USUAL): _scenario(s, most, USUAL) for s in SCHEMES}) | few.play(
        {
            _name(scheme, count, values): _scenario(scheme, count, values)
            for scheme in SCHEMES
            for count, values in [
                *((count, USUAL) for count in counts[:-1]),
                *((most, values) for values in swept[1:]),
            ]
        }
    )
    goodput = {
        scheme: [runs[_name(scheme, count, USUAL)].spread(_mean) for count in counts]
        for scheme in SCHEMES
    }

    def by(scheme: str, other: str) -> Spread:
        return Spread.over([_by(runs, scheme, other, most, values) for values in swept])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, (scheme, name) in enumerate(SCHEMES.items()):
            spreads = goodput[scheme]
            axes.errorbar(
                counts,
                [s.median for s in spreads],
                yerr=[
                    [s.median - s.least for s in spreads],
                    [s.most - s.median for s in spreads],
                ],
                fmt="o-",
                color=f"C{at}",
                capsize=3,
                label=name,
            )
        share = [setting.HOST_GOODPUT_GBPS / count for count in counts]
        axes.plot(counts, share, ":", color="grey", label="equal shares of the server's host")
        axes.set_ylim(0)
        title = f"{USUAL[0]} workers a job, windows of {USUAL[1]} packets"
        finish(axes, "jobs", "aggregation throughput of a job (Gbit/s)", title)

    over = OVER if len(swept) > 1 else ""
    return Outcome(
        [
            Finding(
                "Fig. 14",
                STATIC,
                1.0,
                by("hash", "partition"),
                unit="x",
                swept=over,
            ),
            Finding(
                "Fig. 14",
                LINEAR,
                "greatly more than 1",
                by("hash", "linear"),
                holds=at_least(1.2),
                unit="x",
                swept=over,
            ),
        ],
        draw,
        {
            "jobs": counts,
            "goodput_gbps": {
                scheme: [[s.median, s.least, s.most] for s in goodput[scheme]] for scheme in SCHEMES
            },
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Let a fragment take any free aggregator of a few neighbours, as fanin's own switches do."""
    swept = [USUAL] if lab.quick else SWEPT
    most = (JOBS_QUICK if lab.quick else JOBS)[-1]
    few = lab.with_seeds(lab.seeds[:SEEDS])
    scenarios = {
        _name(s, most, values): _scenario(s, most, values) for s in SCHEMES for values in swept
    }
    own = {
        name + WAYS_TAG: setting.with_ways(scenario)
        for name, scenario in scenarios.items()
        if scenario["job"][0]["hashing"] == "hash"
    }
    runs = few.play(scenarios | own)
    return [
        Reason(
            what,
            setting.WITH_WAYS,
            Spread.over([_by(runs, "hash", other, most, values, WAYS_TAG) for values in swept]),
            setting.ONE_WAY,
        )
        for what, other in ((STATIC, "partition"), (LINEAR, "linear"))
    ]


def _scenario(scheme: str, count: int, values: Values) -> dict[str, Any]:
    workers, window = values
    server = f"h{count * workers}"
    return {
        "title": f"Figure 14: {count} jobs of {workers} workers, {SCHEMES[scheme]}",
        "until": setting.ms(TIME_MS),
        "warm_up": setting.ms(WARM_UP_MS),
        "payload": "sample",
        "network": setting.rack(count * workers + 1, delay=setting.PAPER_DELAY),
        "switch": setting.switch(setting.PAPER_PTA),
        "job": [
            setting.job(
                workers=workers,
                server=server,
                start=Between(0, 5),
                hashing=scheme,
                window=window,
                tensor="4MB",
                # One after the other: the pause between is a fiftieth of the time at most.
                in_flight=1,
            )
            for job in range(count)
        ],
    }


def _name(scheme: str, count: int, values: Values) -> str:
    return f"hashing-{scheme}-{count}-{'-'.join(map(str, values))}"


def _mean(report: Report) -> float:
    jobs = range(len(report["jobs"]))
    return sum(setting.goodput_gbps(report, job) for job in jobs) / len(jobs)


def _by(
    runs: Mapping[str, Runs], scheme: str, other: str, count: int, values: Values, tag: str = ""
) -> Spread:
    """Return the first scheme's throughput, in scenarios of the tag, by the other's."""
    ours = runs[_name(scheme, count, values) + tag].samples(_mean)
    theirs = runs[_name(other, count, values)].samples(_mean)
    return Spread.of([one / two for one, two in zip(ours, theirs, strict=True)])


EXPERIMENT = Experiment(
    "hashing", "One to eight micro-benchmarks on one switch (Figure 14)", run, why
)
