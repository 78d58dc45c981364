"""§5.4.1, Figure 13: three VGG16 jobs that share a switch's aggregators, or have static parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import (
    MORE,
    Experiment,
    Finding,
    Outcome,
    Range,
    Reason,
    at_least,
    at_most,
)
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JOBS = 3
WINDOW = setting.PAPER_PTA // JOBS
Setting = Mapping[str, Any]
USUAL: Setting = {"workers": 2, "scale": 25.0, "ecn": setting.ECN}
"""The paper's eight GPUs hold no third worker of each of three jobs; it does not say how many. A
window that was halved grows by a frame a round trip, whatever the scale: at 200 an iteration takes
2 to 4 ms, and a window of 330 packets needs 7 to be 660 again."""
SWEPT: list[Setting] = [
    {},
    {"ecn": "300kB"},
    {"workers": 4, "scale": 50.0},
    {"workers": 8, "scale": 50.0},
]
"""More workers send more packets: they are scaled down further."""
SWEPT_QUICK: list[Setting] = [{"scale": 200.0}]
SEEDS = 3
CANDIDATES = [495, 990, 1485, 1980, 2640]
CANDIDATES_QUICK = [990, 1980]
PEAK = 0.95
"""Of the best static throughput: what counts as maximal, since seeds differ by a few percent."""
SHARES = [100, 80, 67, 50, 33]
SHARES_QUICK = [100, 33]
SHARES_SWEPT = [100, 80, 50, 33]
"""With every setting but the first."""
PAPER_GAIN = 1.38
"""Of throughput, which Figure 13 shows. The paper's last section says "in terms of training time":
38 % less time would be 1.61 times the throughput."""
TIME_S = 5.0
"""Of the unscaled time; the first quarter is warm-up."""
OFF_JOB = 2
INTERVAL_S = 0.1
OFF_PHASE = "sharing-off-phase"
WAYS_TAG = "-ways"
SERVED = 16
"""By how much more a server takes, where that is changed: more than all workers send."""
OVER = "jobs of 2, 4 or 8 workers, marks from 100 or 300 kB on"
WHAT = "3 VGG16, {} % of peak-throughput aggregators: dynamic by static"
HALF = "3 VGG16, dynamic: throughput lost with half of the aggregators"
NONE_LEFT = "100 %: fragments aggregated at the server in the last quarter, of all"


def run(lab: Lab) -> Outcome:
    """Take aggregators away from what fills the link with the paper's round trip."""
    lab = lab.with_seeds(lab.seeds[:SEEDS])
    settings = SWEPT_QUICK if lab.quick else SWEPT
    usual = settings[0]
    candidates = CANDIDATES_QUICK if lab.quick else CANDIDATES
    scenarios = _pairs(lab, settings) | {OFF_PHASE: _off_phase(usual)}
    once = {
        f"sharing-static-{n}": _scenario("partition", 100, usual, aggregators=n) for n in candidates
    }
    runs = lab.play(scenarios) | lab.play(once, once=True)

    searched = {n: runs[f"sharing-static-{n}"].spread(_images) for n in candidates}
    throughput = {
        (hashing, _label(more)): {
            share: runs[_name(hashing, share, more)].spread(_images) for share in _shares(lab, more)
        }
        for hashing in ("hash", "partition")
        for more in settings
    }

    def draw(figure: Figure) -> None:
        figure.set_size_inches(14, 4.8)
        one, two, three = figure.subplots(1, 3)
        _draw_throughput(one, throughput, settings)
        converged = runs[_name("hash", 100, usual)].reports[0]
        for job, series in enumerate(_at_server(converged)):
            two.plot(*_coarse(series), label=f"job {job + 1}")
        two.set_ylim(0)
        finish(two, "time (s, unscaled)", "aggregated at the server in 0.5 s", "13b: 100 %")
        for job, of_job in enumerate(runs[OFF_PHASE].reports[0]["jobs"]):
            counted = of_job["series"]["switch_aggregations"]
            three.plot(*_coarse(counted), label=f"job {job + 1}")
        three.set_ylim(0)
        title = "13c: 33 %, job 3 pauses now and then"
        finish(three, "time (s, unscaled)", "aggregated in the switch in 0.5 s", title)

    return Outcome(
        _findings(lab, runs, settings, searched),
        draw,
        {
            "static_images_per_s": {n: spread.median for n, spread in searched.items()},
            "shares": _shares(lab, usual),
            "images_per_s": {
                f"{hashing}, {label}": {
                    share: [s.median, s.least, s.most] for share, s in spreads.items()
                }
                for (hashing, label), spreads in throughput.items()
            },
        },
    )


def _draw_throughput(
    axes: Axes,
    throughput: Mapping[tuple[str, str], Mapping[int, Spread]],
    settings: Sequence[Setting],
) -> None:
    """Draw Figure 13a: images a second by share, for each (hashing, label of a setting)."""
    for at, more in enumerate(settings):
        for hashing, style, name in (("hash", "o-", "dynamic"), ("partition", "s:", "static")):
            found = throughput[hashing, _label(more)]
            spreads = list(found.values())
            axes.errorbar(
                list(found),
                [s.median for s in spreads],
                yerr=[
                    [s.median - s.least for s in spreads],
                    [s.most - s.median for s in spreads],
                ],
                fmt=style,
                color=f"C{at}",
                capsize=3,
                label=f"{name}, {_label(more)}",
            )
    static = throughput["partition", _label(settings[0])]
    least = min(static)
    reached = PAPER_GAIN * static[least].median
    axes.plot(least, reached, "k*", markersize=12, zorder=5, label="paper: 1.38 times static")
    axes.set_ylim(0)
    axes.invert_xaxis()
    finish(axes, f"aggregators (% of {setting.PAPER_PTA:,})", "images/s and worker", "13a")


def _findings(
    lab: Lab,
    runs: Mapping[str, Runs],
    settings: Sequence[Setting],
    searched: Mapping[int, Spread],
) -> list[Finding]:
    """Compare; ``searched`` has the static throughput by the number of aggregators."""
    usual = settings[0]
    over = OVER if len(settings) > 1 else ""
    shares = _shares(lab, usual)
    gains = {share: _gains(lab, runs, share, settings) for share in shares}
    enough = PEAK * Spread.over(list(searched.values())).most
    peak = min((n for n, spread in searched.items() if spread.median >= enough), default=math.nan)
    findings = [
        Finding(
            "§5.4.1",
            "3 VGG16: peak-throughput aggregators, static parts, with a round trip of 80 us",
            float(setting.PAPER_PTA),
            Spread.of([peak]),
            cannot_fail="the round trip follows from this number",
        ),
        Finding("Fig. 13a", WHAT.format(33), PAPER_GAIN, gains[33], unit="x", swept=over),
        Finding("Fig. 13a", WHAT.format(100), 1.0, gains[100], unit="x", swept=over),
        *(
            Finding(
                "Fig. 13a",
                WHAT.format(share),
                "at least 1",
                gains[share],
                holds=at_least(1),
                unit="x",
                swept=over if share in SHARES_SWEPT else "",
            )
            for share in shares
            if share not in (33, 100)
        ),
        Finding(
            "Fig. 13b",
            NONE_LEFT,
            "falls to none: less than 2 %",
            runs[_name("hash", 100, usual)].spread(_share_at_server),
            holds=at_most(2),
            unit="%",
        ),
        Finding(
            "Fig. 13c",
            "33 %: in-network aggregations of the others while one job pauses, by before and after",
            "more than 1",
            runs[OFF_PHASE].spread(_rise),
            holds=MORE,
            unit="x",
        ),
    ]
    if 50 in shares:
        findings.append(
            Finding(
                "abstract",
                HALF,
                "5 to 10 %",
                Spread.over([_lost(runs, more) for more in settings]),
                holds=Range(5, 10),
                unit="%",
                swept=over,
            )
        )
    return findings


def why(lab: Lab) -> Sequence[Reason]:
    """Play jobs of two workers alone; fanin's own switches; servers that take more than a link."""
    settings = SWEPT_QUICK if lab.quick else SWEPT
    shares = _shares(lab, settings[0])
    lab = lab.with_seeds(lab.seeds[:SEEDS])
    two = [more for more in settings if "workers" not in more]
    runs = lab.play(_pairs(lab, two))
    change = "jobs of 2 workers only"
    reasons = [Reason(WHAT.format(n), change, _gains(lab, runs, n, two)) for n in shares]
    if 50 in shares:
        reasons.append(Reason(HALF, change, Spread.over([_lost(runs, more) for more in two])))
        reasons.append(_served(lab, settings))
    return [*reasons, *_with_ways(lab, settings)]


def _with_ways(lab: Lab, settings: Sequence[Setting]) -> list[Reason]:
    """Let a fragment take any free aggregator of a few neighbours, as fanin's own switches do.

    With one aggregator a fragment, much of the table is free while others collide.
    """
    pairs = _pairs(lab, settings)
    own = {
        name + WAYS_TAG: setting.with_ways(scenario)
        for name, scenario in pairs.items()
        if "hash" in name
    }
    runs = lab.play(pairs | own)
    gains = {
        share: _gains(lab, runs, share, settings, WAYS_TAG) for share in _shares(lab, settings[0])
    }
    reasons = [
        Reason(WHAT.format(n), setting.WITH_WAYS, gain, setting.ONE_WAY)
        for n, gain in gains.items()
    ]
    if 50 in gains:
        lost = Spread.over([_lost(runs, more, WAYS_TAG) for more in settings])
        reasons.append(Reason(HALF, setting.WITH_WAYS, lost, setting.ONE_WAY))
    return reasons


def _served(lab: Lab, settings: Sequence[Setting]) -> Reason:
    """Let the servers take more than a link brings.

    A fragment that collides comes to the server once from each worker.
    """
    served = {
        _name(hashing, 50, more) + "-served": _with_room(_scenario(hashing, 50, more))
        for more in settings
        for hashing in ("hash", "partition")
    }
    # What contradicts the paper is no reason: once is enough.
    runs = lab.play(served, once=True)
    ours = Spread.over([_gain(runs, 50, more, "-served", "-served") for more in settings])
    change = f"a server that takes {SERVED} times as much, over a link {SERVED} times as fast"
    return Reason(WHAT.format(50), change, ours, "§5.1: links of 100 Gbit/s")


def _off_phase(usual: Setting) -> dict[str, Any]:
    """Return the scenario of Figure 13c: a job pauses now and then."""
    scenario = _scenario("hash", 33, usual)
    pause = setting.ms(1500 / {**USUAL, **usual}["scale"])
    scenario["job"][OFF_JOB].update({"pause_every": 6, "pause": pause})
    return scenario


def _with_room(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return the scenario with more room on the way to its server."""
    server = f"h{scenario['network']['hosts'] - 1}"
    costs = {
        name.removeprefix("host_"): f"{float(cost.removesuffix('ns')) / SERVED}ns"
        for name, cost in setting.HOSTS.items()
    }
    rate = f"{SERVED * int(setting.RATE.removesuffix('Gbit'))}Gbit"
    return {
        **scenario,
        "node": [{"name": server, **costs}],
        "link": [{"link": [server, "s0"], "rate": rate}],
    }


def _pairs(lab: Lab, settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    return {
        _name(hashing, share, more): _scenario(hashing, share, more)
        for more in settings
        for hashing in ("hash", "partition")
        for share in _shares(lab, more)
    }


def _gains(
    lab: Lab, runs: Mapping[str, Runs], share: int, settings: Sequence[Setting], tag: str = ""
) -> Spread:
    return Spread.over(
        [_gain(runs, share, more, tag) for more in settings if share in _shares(lab, more)]
    )


def _shares(lab: Lab, more: Setting) -> list[int]:
    if lab.quick:
        return SHARES_QUICK
    return SHARES_SWEPT if more else SHARES


def _label(more: Setting) -> str:
    of = {**USUAL, **more}
    return f"{of['workers']} workers" + (
        f", {words.setting('ecn', more['ecn'])}" if "ecn" in more else ""
    )


def _scenario(
    hashing: str, share: int, more: Setting, *, aggregators: int = setting.PAPER_PTA
) -> dict[str, Any]:
    of = {**USUAL, **more}
    workers, scale = of["workers"], of["scale"]
    job = ("vgg16", workers, {"hashing": hashing, "window": WINDOW})
    return {
        "title": f"Figure 13: {hashing}, {share} % of {aggregators} aggregators",
        "until": setting.ms(1000 * TIME_S / scale),
        "warm_up": setting.ms(1000 * TIME_S / 4 / scale),
        "interval": setting.ms(1000 * INTERVAL_S / scale),
        "payload": "sample",
        "network": setting.rack(JOBS * workers + 1, delay=setting.PAPER_DELAY, ecn=of["ecn"]),
        "switch": setting.switch(aggregators * share // 100),
        "job": setting.sharing([job] * JOBS, scale),
    }


def _name(hashing: str, share: int, more: Setting) -> str:
    tag = "-".join(f"{key}-{value}" for key, value in more.items())
    return f"sharing-{hashing}-{share}%" + (f"-{tag}" if tag else "")


def _gain(
    runs: Mapping[str, Runs], share: int, more: Setting, tag: str = "", static_tag: str = ""
) -> Spread:
    pairs = zip(
        runs[_name("hash", share, more) + tag].reports,
        runs[_name("partition", share, more) + static_tag].reports,
        strict=True,
    )
    return Spread.of([_images(dynamic) / _images(static) for dynamic, static in pairs])


def _lost(runs: Mapping[str, Runs], more: Setting, tag: str = "") -> Spread:
    pairs = zip(
        runs[_name("hash", 50, more) + tag].reports,
        runs[_name("hash", 100, more) + tag].reports,
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
