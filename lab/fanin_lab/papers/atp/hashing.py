"""§5.4.2, Figure 14: one to eight jobs with aggregators by hash, in a row, or in static parts."""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import at_least
from fanin_lab.papers.lab import Between, Report, Scenario
from fanin_lab.papers.plot import Line, Panel, Picture, Whiskers
from fanin_lab.papers.simulated import At, Cases, Change, Either, Row, Simulated, ratio

SCHEMES = {"hash": "hash (ATP)", "linear": "sequence number (linear)", "partition": "static parts"}
MOST = 8
FEWER = Either([1, 4], quick=[])
"""Jobs."""
TIME_MS = 50.0
WARM_UP_MS = 10.0
WORKERS, WINDOW = 2, setting.PAPER_PTA // 3
"""Workers of a job, and packets that each has on the way at most. The window is Figure 13's: there
it is a third of the peak-throughput aggregators."""
SWEPT: Either[list[dict[str, Any]]] = Either(
    [{}, {"workers": 4}, {"window": setting.PAPER_PTA}, {"window": setting.PAPER_PTA // 8}],
    quick=[{}],
)
"""With eight jobs. The paper says of neither; its eight machines hold fewer than eight workers of
each of eight jobs, if each has its own. It compares "when there is no contention for switch
aggregators" (§5.4.2): then windows are an eighth of the table at most."""
SEEDS = 3
"""Of those that there are, with every setting but the first."""
OVER = "jobs of 2 or 4 workers, windows of 247, 660 or 1,980 packets"


def scenario(
    scheme: str, count: int, workers: int = WORKERS, window: int = WINDOW, ways: int = 1
) -> Scenario:
    """Return micro-benchmarks whose servers share a host."""
    job = setting.job(
        workers=workers,
        server=f"h{count * workers}",
        start=Between(0, 5),
        hashing=scheme,
        window=window,
        tensor="4MB",
        # One after the other: the pause between is a fiftieth of the time at most.
        in_flight=1,
    )
    return {
        "title": f"Figure 14: {count} jobs of {workers} workers, {SCHEMES[scheme]}",
        "until": setting.ms(TIME_MS),
        "warm_up": setting.ms(WARM_UP_MS),
        "payload": "sample",
        "network": setting.rack(count * workers + 1, delay=setting.PAPER_DELAY),
        "switch": setting.switch(setting.PAPER_PTA, ways),
        "job": [job] * count,
    }


def _mean(report: Report) -> float:
    jobs = range(len(report["jobs"]))
    return sum(setting.goodput_gbps(report, job) for job in jobs) / len(jobs)


def picture(at: At) -> Picture:
    """Show a job's throughput by the number of jobs."""
    counts = [*FEWER.of(at.quick), MOST]
    lines = [
        Whiskers(
            counts,
            [at.spread(_mean, scheme=scheme, count=count) for count in counts],
            name,
            look={"color": f"C{number}"},
        )
        for number, (scheme, name) in enumerate(SCHEMES.items())
    ]
    shares = [setting.HOST_GOODPUT_GBPS / count for count in counts]
    label = "equal shares of the server's host"
    equal = Line(counts, shares, ":", label, {"color": "grey"})
    title = f"{WORKERS} workers a job, windows of {WINDOW} packets"
    y = "aggregation throughput of a job (Gbit/s)"
    return Picture([Panel([*lines, equal], "jobs", y, title, least_y=0)])


HASH = {"scheme": "hash", "count": MOST}
OF_MOST = Cases({"scheme": SCHEMES, "count": MOST}, SWEPT, seeds_swept=SEEDS)
EXPERIMENT = Simulated(
    "hashing",
    "One to eight micro-benchmarks on one switch (Figure 14)",
    scenario,
    [OF_MOST, Cases({"scheme": SCHEMES, "count": FEWER}, seeds=SEEDS)],
    [
        Row(
            "Fig. 14",
            "8 jobs: throughput by hash, by that of static parts",
            1.0,
            ratio(_mean, HASH, {**HASH, "scheme": "partition"}),
            "x",
        ),
        Row(
            "Fig. 14",
            "8 jobs: throughput by hash, by that in sequence",
            "greatly more than 1",
            ratio(_mean, HASH, {**HASH, "scheme": "linear"}),
            "x",
            at_least(1.2),
        ),
    ],
    picture,
    over=OVER,
    changes=[
        Change(
            setting.WITH_WAYS,
            {"ways": setting.WAYS},
            setting.ONE_WAY,
            where={"scheme": ["hash"]},
            cases=[OF_MOST],
        )
    ],
).experiment()
