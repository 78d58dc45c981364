"""§5.4.1, Figure 13: three VGG16 jobs that share a switch's aggregators, or have static parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.atp import setting
from fanin.reproduce.finding import (
    MORE,
    Experiment,
    Finding,
    Outcome,
    Range,
    Reason,
    at_least,
    at_most,
)
from fanin.reproduce.lab import Lab, Report, Runs, Spread
from fanin.reproduce.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 200.0
JOBS = 3
WORKERS = [2, 4, 8]
"""The paper's eight GPUs hold no third worker of each of three jobs; it does not say how many."""
WORKERS_QUICK = [2]
WINDOW = setting.PAPER_PTA // JOBS
CANDIDATES = [495, 990, 1485, 1980, 2640]
CANDIDATES_QUICK = [990, 1980]
PEAK = 0.95
"""Of the best static throughput: what counts as maximal, since seeds differ by a few percent."""
SHARES = [100, 80, 67, 50, 33]
SHARES_QUICK = [100, 33]
SHARES_SWEPT = [100, 50, 33]
"""With every number of workers, and one seed: they differ by more than seeds do."""
PAPER_GAIN = 1.38
TIME_S = 5.0
"""Of the unscaled time; the first quarter is warm-up."""
OFF_JOB = 2
INTERVAL_S = 0.1
SWEPT = "jobs of {} workers"
WHAT = "3 VGG16, {} % of peak-throughput aggregators: dynamic by static"
HALF = "3 VGG16, dynamic: throughput lost with half of the aggregators"
NONE_LEFT = "100 %: fragments aggregated at the server in the last quarter, of all"


def run(lab: Lab) -> Outcome:
    """Take aggregators away from what fills the link with the paper's round trip."""
    shares = SHARES_QUICK if lab.quick else SHARES
    counts = WORKERS_QUICK if lab.quick else WORKERS
    candidates = CANDIDATES_QUICK if lab.quick else CANDIDATES
    few, *more = counts
    scenarios = {
        _name(hashing, share, few): _scenario(hashing, share, few)
        for hashing in ("hash", "partition")
        for share in shares
    }
    once = {
        _name(hashing, share, workers): _scenario(hashing, share, workers)
        for workers in more
        for hashing in ("hash", "partition")
        for share in SHARES_SWEPT
    } | {
        f"sharing-static-{aggregators}": _scenario("partition", 100, few, aggregators=aggregators)
        for aggregators in candidates
    }
    off = _scenario("hash", 33, 2)
    off["job"][OFF_JOB].update({"pause_every": 6, "pause": setting.ms(1500 / SCALE)})
    scenarios["sharing-off-phase"] = off
    runs = lab.play(scenarios) | lab.play(once, once=True)

    searched = {n: runs[f"sharing-static-{n}"].spread(_images) for n in candidates}
    enough = PEAK * Spread.over(list(searched.values())).most
    peak = min((n for n, spread in searched.items() if spread.median >= enough), default=math.nan)
    gains = _gains(runs, shares, counts)
    swept = SWEPT.format(" or ".join(map(str, counts))) if more else ""
    throughput = {
        (hashing, workers): {
            share: runs[_name(hashing, share, workers)].spread(_images)
            for share in (shares if workers == few else SHARES_SWEPT)
        }
        for hashing in ("hash", "partition")
        for workers in counts
    }
    converged = runs[_name("hash", 100, 2)]
    at_server = [_at_server(report) for report in converged.reports]
    left = converged.spread(_share_at_server)
    rises = runs["sharing-off-phase"].spread(_rise)

    def draw(figure: Figure) -> None:
        figure.set_size_inches(14, 4.8)
        one, two, three = figure.subplots(1, 3)
        for at, workers in enumerate(counts):
            for hashing, style, name in (("hash", "o-", "dynamic"), ("partition", "s:", "static")):
                found = throughput[hashing, workers]
                spreads = list(found.values())
                medians = [s.median for s in spreads]
                errors = [
                    [s.median - s.least for s in spreads],
                    [s.most - s.median for s in spreads],
                ]
                colour, label = f"C{at}", f"{name}, {workers} workers"
                one.errorbar(
                    list(found),
                    medians,
                    yerr=errors,
                    fmt=style,
                    color=colour,
                    capsize=3,
                    label=label,
                )
        reached = PAPER_GAIN * throughput["partition", few][33].median
        label = "paper: 1.38 times static"
        one.plot(shares[-1], reached, "k*", markersize=12, zorder=5, label=label)
        one.set_ylim(0)
        one.invert_xaxis()
        finish(one, f"aggregators (% of {setting.PAPER_PTA})", "images/s and worker", "13a")
        for job, series in enumerate(at_server[0]):
            two.plot(*_coarse(series), label=f"job {job + 1}")
        two.set_ylim(0)
        finish(two, "time (s, unscaled)", "aggregated at the server in 0.5 s", "13b: 100 %")
        for job, of_job in enumerate(runs["sharing-off-phase"].reports[0]["jobs"]):
            counted = of_job["series"]["switch_aggregations"]
            three.plot(*_coarse(counted), label=f"job {job + 1}")
        three.set_ylim(0)
        title = "13c: 33 %, job 3 pauses now and then"
        finish(three, "time (s, unscaled)", "aggregated in the switch in 0.5 s", title)

    findings = [
        Finding(
            "§5.4.1",
            "3 VGG16: peak-throughput aggregators, static parts, with a round trip of 80 us",
            float(setting.PAPER_PTA),
            Spread.of([peak]),
            cannot_fail="the round trip follows from this number",
        ),
        Finding("Fig. 13a", WHAT.format(33), PAPER_GAIN, gains[33], unit="x", swept=swept),
        Finding("Fig. 13a", WHAT.format(100), 1.0, gains[100], unit="x", swept=swept),
        *(
            Finding(
                "Fig. 13a",
                WHAT.format(share),
                "at least 1",
                gains[share],
                holds=at_least(1),
                unit="x",
                swept=swept if share in SHARES_SWEPT else "",
            )
            for share in shares
            if share not in (33, 100)
        ),
        Finding(
            "Fig. 13b",
            NONE_LEFT,
            "falls to none: less than 2 %",
            left,
            holds=at_most(2),
            unit="%",
        ),
        Finding(
            "Fig. 13c",
            "33 %: in-network aggregations of the others while one job pauses, by before and after",
            "more than 1",
            rises,
            holds=MORE,
            unit="x",
        ),
    ]
    if 50 in shares:
        lost = Spread.over([_lost(runs, workers) for workers in counts])
        findings.append(
            Finding(
                "abstract",
                HALF,
                "5 to 10 %",
                lost,
                holds=Range(5, 10),
                unit="%",
                swept=swept,
            )
        )
    return Outcome(
        findings,
        draw,
        {
            "static_images_per_s": {n: spread.median for n, spread in searched.items()},
            "shares": shares,
            "images_per_s": {
                f"{hashing}, {workers} workers": {
                    share: [s.median, s.least, s.most] for share, s in spreads.items()
                }
                for (hashing, workers), spreads in throughput.items()
            },
        },
    )


def why(lab: Lab) -> Sequence[Reason]:
    """Take the halving of windows away; and play what scale and round trip do."""
    changes: dict[str, tuple[dict[str, Any], str]] = {
        # Off, in both schemes: their windows stay what they are.
        "windows that nothing halves (no congestion control)": (
            {"congestion_control": False},
            '§3.7: on congestion "it halves the window"',
        ),
        "a round trip of 24 us, and windows and aggregators in proportion": (
            {"delay": "6us"},
            '§5.4.1: "1980 aggregators"',
        ),
        "parameters and times divided by half the scale: 100": ({"scale": 100.0}, ""),
    }
    shares = SHARES_QUICK if lab.quick else SHARES
    few, *rest = WORKERS_QUICK if lab.quick else WORKERS
    reasons = []
    for change, (more, contradicts) in changes.items():
        # As the rows are; what explains nothing anyway, once and with few workers.
        counts = [few] if contradicts else [few, *rest]
        runs = _changed(lab, shares, few, more, once=bool(contradicts))
        for workers in counts[1:]:
            runs |= _changed(lab, SHARES_SWEPT, workers, more, once=True)
        found = {WHAT.format(share): gain for share, gain in _gains(runs, shares, counts).items()}
        found[NONE_LEFT] = runs[_name("hash", 100, few)].spread(_share_at_server)
        if 50 in shares:
            found[HALF] = Spread.over([_lost(runs, workers) for workers in counts])
        reasons += [Reason(what, change, ours, contradicts) for what, ours in found.items()]
    return reasons


def _changed(
    lab: Lab, shares: Sequence[int], workers: int, more: Mapping[str, Any], *, once: bool
) -> dict[str, Runs]:
    """Play scenarios with something changed; return the runs by the unchanged ones' names."""
    tag = "-".join(str(value) for value in more.values())
    keys = [(hashing, share, workers) for hashing in ("hash", "partition") for share in shares]
    runs = lab.play({f"{_name(*key)}-{tag}": _scenario(*key, **more) for key in keys}, once=once)
    return {_name(*key): runs[f"{_name(*key)}-{tag}"] for key in keys}


def _scenario(
    hashing: str,
    share: int,
    workers: int,
    *,
    aggregators: int = setting.PAPER_PTA,
    scale: float = SCALE,
    delay: str = setting.PAPER_DELAY,
    **more: Any,
) -> dict[str, Any]:
    window = WINDOW
    if delay != setting.PAPER_DELAY:
        window, aggregators = (round(n * 24 / 80) for n in (WINDOW, aggregators))
    job = ("vgg16", workers, {"hashing": hashing, "window": window, **more})
    return {
        "title": f"Figure 13: {hashing}, {share} % of {aggregators} aggregators",
        "until": setting.ms(1000 * TIME_S / scale),
        "warm_up": setting.ms(1000 * TIME_S / 4 / scale),
        "interval": setting.ms(1000 * INTERVAL_S / scale),
        "network": setting.rack(JOBS * workers + 1, delay=delay),
        "switch": {"aggregators": aggregators * share // 100},
        "job": setting.sharing([job] * JOBS, scale),
    }


def _name(hashing: str, share: int, workers: int) -> str:
    return f"sharing-{hashing}-{share}%-{workers}"


def _gains(
    runs: dict[str, Runs], shares: Sequence[int], counts: Sequence[int]
) -> dict[int, Spread]:
    few, *more = counts
    return {
        share: Spread.over([_gain(runs, share, workers) for workers in counts])
        if more and share in SHARES_SWEPT
        else _gain(runs, share, few)
        for share in shares
    }


def _gain(runs: dict[str, Runs], share: int, workers: int) -> Spread:
    pairs = zip(
        runs[_name("hash", share, workers)].reports,
        runs[_name("partition", share, workers)].reports,
        strict=True,
    )
    return Spread.of([_images(dynamic) / _images(static) for dynamic, static in pairs])


def _lost(runs: dict[str, Runs], workers: int) -> Spread:
    pairs = zip(
        runs[_name("hash", 50, workers)].reports,
        runs[_name("hash", 100, workers)].reports,
        strict=True,
    )
    return Spread.of([100 * (1 - _images(half) / _images(whole)) for half, whole in pairs])


def _images(report: Report) -> float:
    jobs = range(len(report["jobs"]))
    return sum(setting.images_per_s(report, job) for job in jobs) / len(jobs)


def _at_server(report: Report) -> list[list[int]]:
    """Return, by job and interval, what the server added beyond one sum for each fragment."""
    return [
        [
            # In an interval, a sum may have been complete at the switch and not yet at the server.
            max(0, at_server - at_switch // job["workers"])
            for at_server, at_switch in zip(
                job["series"]["server_aggregations"],
                job["series"]["switch_aggregations"],
                strict=True,
            )
        ]
        for job in report["jobs"]
    ]


def _coarse(series: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return times and sums of half a second: iterations are no longer seen."""
    several = round(0.5 / INTERVAL_S)
    sums = [sum(series[at : at + several]) for at in range(0, len(series) - several + 1, several)]
    return [0.5 * (at + 0.5) for at in range(len(sums))], sums


def _share_at_server(report: Report) -> float:
    """Return the percentage of fragments that the switch did not sum, in the last quarter."""
    apart, all_ = 0.0, 0
    for job in report["jobs"]:
        server = _last_quarter(job["series"]["server_aggregations"])
        switch = _last_quarter(job["series"]["switch_aggregations"])
        # A fragment that is summed at the server alone comes there once for each worker.
        apart += max(0.0, (server - switch / job["workers"]) / job["workers"])
        all_ += switch // job["workers"]
    return float(100 * apart / (apart + all_))


def _last_quarter(series: Sequence[int]) -> int:
    return sum(series[3 * len(series) // 4 :])


def _rise(report: Report) -> float:
    """Return how the others' aggregations in the switch grow while the job is off."""
    series = [job["series"]["switch_aggregations"] for job in report["jobs"]]
    together = [
        sum(series[job][at] for job in range(JOBS) if job != OFF_JOB)
        for at in range(len(series[OFF_JOB]))
    ]
    is_off = [count == 0 for count in series[OFF_JOB]]
    # The first second has no rhythm yet.
    first = int(1 / INTERVAL_S)
    off = [n for n, off in zip(together[first:], is_off[first:], strict=True) if off]
    on = [n for n, off in zip(together[first:], is_off[first:], strict=True) if not off]
    if not off or not on:
        return 0.0
    return float((sum(off) / len(off)) / (sum(on) / len(on)))


EXPERIMENT = Experiment(
    "sharing", "Three VGG16 jobs share a switch's aggregators (Figure 13)", run, why
)
