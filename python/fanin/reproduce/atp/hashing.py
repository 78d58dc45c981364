"""§5.4.2, Figure 14: one to eight jobs with aggregators by hash, in a row, or in static parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import Experiment, Finding, Outcome, at_least
from fanin.reproduce.lab import Between, Lab, Report, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMES = {
    "hash": "hash (ATP)",
    "linear": "sequence number (linear)",
    "partition": "static parts",
}
JOBS = [1, 4, 8]
JOBS_QUICK = [1, 8]
WORKERS = 8
AGGREGATORS = 1320
"""Enough for static parts to fill the server's link, whatever the number of jobs."""


def run(lab: Lab) -> Outcome:
    """Run micro-benchmarks whose servers share a host."""
    counts = JOBS_QUICK if lab.quick else JOBS
    time_ms = 6
    runs = lab.play(
        {
            f"hashing-{scheme}-{count}": {
                "title": f"Figure 14: {count} jobs, {name}",
                "until": setting.ms(time_ms),
                "warm_up": setting.ms(time_ms / 2),
                "network": setting.rack(count * WORKERS + 1),
                "switch": {"aggregators": AGGREGATORS},
                "job": [
                    setting.job(
                        workers=WORKERS,
                        server=f"h{count * WORKERS}",
                        start=Between(0, 0.4),
                        hashing=scheme,
                        # As many as its part would be: more would be on the way in vain.
                        window=AGGREGATORS // count,
                        tensor=f"{50 / count:g}kB",
                        in_flight=8,
                    )
                    for job in range(count)
                ],
            }
            for scheme, name in SCHEMES.items()
            for count in counts
        }
    )

    def mean(report: Report) -> float:
        jobs = range(len(report["jobs"]))
        return sum(setting.goodput_gbps(report, job) for job in jobs) / len(jobs)

    goodput = {
        scheme: [runs[f"hashing-{scheme}-{count}"].spread(mean) for count in counts]
        for scheme in SCHEMES
    }
    samples = {
        scheme: [mean(report) for report in runs[f"hashing-{scheme}-{counts[-1]}"].reports]
        for scheme in SCHEMES
    }

    def by(scheme: str, other: str) -> Spread:
        pairs = zip(samples[scheme], samples[other], strict=True)
        return Spread.of([one / two for one, two in pairs])

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
        axes.plot(counts, share, ":", color="grey", label="equal shares of the server's link")
        axes.set_ylim(0)
        finish(axes, "jobs", "aggregation throughput of a job (Gbit/s)")

    hash_by_linear = by("hash", "linear")
    return Outcome(
        [
            Finding(
                "Fig. 14",
                "8 jobs: throughput by hash, by that of static parts",
                1.0,
                by("hash", "partition"),
                unit="x",
            ),
            Finding(
                "Fig. 14",
                "8 jobs: throughput by hash, by that in sequence",
                "greatly more than 1",
                hash_by_linear,
                holds=at_least(1.2),
                unit="x",
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


EXPERIMENT = Experiment("hashing", "One to eight micro-benchmarks on one switch (Figure 14)", run)
