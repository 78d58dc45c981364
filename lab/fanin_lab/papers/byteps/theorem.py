"""§4.1.1, Theorem 1: the least time, and the shares with which it is reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fanin_lab.papers.byteps import equations
from fanin_lab.papers.byteps.plans import UNIT_S, plans
from fanin_lab.papers.finding import Experiment, Finding, Outcome, Range, at_most
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Level, Line, Panel, Picture, outcome

MACHINES = [4, 8, 16, 32]
MACHINES_QUICK = [4, 8]
SHOWN = 8
"""Machines that train, in the plot of shares: as many as in the paper's Figures 12 and 13."""
ROUNDING = 1e-9
"""What two ways to compute the same may differ by, relatively."""
SAME = Range(1 - ROUNDING, 1 + ROUNDING)


def run(lab: Lab) -> Outcome:
    """Plan for every k from none to n, and beyond, and compare with the equations."""
    counts = MACHINES_QUICK if lab.quick else MACHINES
    within = [(n, k) for n in counts for k in range(n + 1)]
    beyond = [(n, n + n // 4) for n in counts]
    found = plans(lab, within + beyond)
    times = {cluster: plan.time_s / UNIT_S for cluster, plan in found.items()}
    shares = {c: (p.shares["w0"], p.shares.get("s0", 0.0)) for c, p in found.items()}
    off_time = max(abs(times[c] / equations.optimal(*c) - 1) for c in within)
    off_share = max(
        max(abs(gpu - equations.gpu_share(*c)), abs(cpu - equations.cpu_share(*c)) if c[1] else 0.0)
        for c, (gpu, cpu) in ((c, shares[c]) for c in within)
    )
    off_whole = max(abs(sum(plan.shares.values()) - 1) for plan in found.values())
    # What the link of a machine that only sums carries, by what one that trains does.
    links = [n * shares[n, k][1] / (1 + (n - 2) * shares[n, k][0]) for n, k in within if 0 < k < n]
    more = [times[cluster] / times[cluster[0], cluster[0]] for cluster in beyond]
    rings = [found[n, 0].time_s / found[n, 0].ring_s for n in counts]

    def times_of(at: int, n: int) -> list[Line]:
        ks = range(n + 1)
        parts = [k / n for k in ks]
        optimal = [equations.optimal(n, k) for k in ks]
        return [
            Line(parts, optimal, look={"color": f"C{at}"}),
            Line(parts, [times[n, k] for k in ks], f"C{at}.", f"n = {n}"),
            Line([1.25], [times[n, n + n // 4]], f"C{at}."),
        ]

    def shares_of(at: int, name: str, of: Callable[[int, int], float]) -> list[Line]:
        ks = range(1 if at else 0, SHOWN + 1)
        planned = [100 * shares[SHOWN, k][at] for k in ks]
        return [
            Line(ks, [100 * of(SHOWN, k) for k in ks], look={"color": f"C{at}"}),
            Line(ks, planned, f"C{at}o", f"a machine that {name}"),
        ]

    once = Level(1, "M / B: every byte once", {"color": "grey", "linestyle": ":"})
    lines = [line for at, n in enumerate(counts) for line in times_of(at, n)]
    title = "Eq. 6 (lines) and fanin plan (dots)"
    split = [
        *shares_of(0, "trains (Eq. 2)", equations.gpu_share),
        *shares_of(1, "only sums (Eq. 1)", equations.cpu_share),
    ]
    picture = Picture(
        [
            Panel([*lines, once], "k / n", "time (M / B)", title, least_y=0.9),
            Panel(split, "k", "share of each tensor (%)", f"n = {SHOWN}", least_y=0),
        ]
    )
    most = partial(Finding, paper="none", holds=at_most(ROUNDING))
    findings = [
        most(
            "Eq. 6, Theorem 1",
            f"the plan's time, n = {_listed(counts)}, k = 0 to n: largest difference",
            ours=Spread.of([off_time]),
        ),
        most(
            "Eqs. 1 and 2",
            "the plan's shares, the same: largest difference",
            ours=Spread.of([off_share]),
        ),
        most(
            "Eq. 5", "the sum of all shares: largest difference from 1", ours=Spread.of([off_whole])
        ),
        most(
            "Theorem 1",
            "t_c by t_g, 0 < k < n, where t_c = n M_SSCPU / B (Eq. 4 as printed lacks the n): "
            "largest difference from 1",
            ours=Spread.of([max(abs(link - 1) for link in links)]),
        ),
        Finding("Table 1", "k = 0: the plan's time by a ring's", "1", Spread.of(rings), SAME),
        Finding(
            "§4.1.1",
            "k = 5n/4: the plan's time by that of k = n",
            "1: more machines do not help",
            Spread.of(more),
            SAME,
        ),
    ]
    return outcome(findings, picture)


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


EXPERIMENT = Experiment("theorem", "The optimal split of the load (Theorem 1, §4.1.1)", run)
