"""§VII-B, Exp 2, Figures 8 and 9: which of the testbed's times follow from bytes at the server.

What its GPUs and hosts cost is not known. If it is so much for each byte at the server, and what is
the same for all schemes, a line through GOAT's and Geryon's time has ATP's and ESA's on it.
"""

from __future__ import annotations

from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.goat.drawn import COLOURS, SCHEMES
from fanin_lab.papers.goat.testbed import OVER, RATE_BPS, counts, median_mb, settings
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import Line, Panel, Picture, outcome

EPOCH_S = {"goat": 2.2, "esa": 3.5, "atp": 4.0, "geryon": 4.65}
"""Of ResNet-18 with 16 workers."""
COMMUNICATION_S = {"goat": 0.36, "esa": 1.34, "atp": 1.64, "geryon": 1.95}
REST_S = {scheme: EPOCH_S[scheme] - COMMUNICATION_S[scheme] for scheme in EPOCH_S}
KINDS = {
    "communication time": COMMUNICATION_S,
    "rest of an epoch (training and global aggregation)": REST_S,
}


def run(lab: Lab) -> Outcome:
    """Count what reaches the server, and draw the lines."""
    asked = settings("ResNet-18", 16)
    found = counts(lab, asked)

    def on_the_line(scheme: str, times: dict[str, float]) -> Spread:
        def predicted(each: dict[str, int]) -> float:
            part = (each[scheme] - each["goat"]) / (each["geryon"] - each["goat"])
            return times["goat"] + part * (times["geryon"] - times["goat"])

        return Spread.of_each(
            [predicted(dict(each)) for each in found[setting]] for setting in asked
        )

    links_s = Spread.of([8 * each["geryon"] / RATE_BPS for each in found[asked[0]]])
    findings = [
        Finding(
            "Fig. 9",
            "ResNet-18, 16 workers: Geryon's communication time, if links of 100 Gbit/s are all "
            "that takes time",
            COMMUNICATION_S["geryon"],
            links_s,
            unit="s",
        )
    ]
    findings += [
        Finding(
            "Fig. 9" if times is COMMUNICATION_S else "Figs. 8 and 9",
            f"ResNet-18, 16 workers: {SCHEMES[scheme]}'s {kind}, if it grows with bytes at the "
            "server from GOAT's to Geryon's",
            round(times[scheme], 2),
            on_the_line(scheme, times),
            unit="s",
            swept=OVER,
            cannot_fail="most of the line agrees" if times is REST_S else "",
        )
        for kind, times in KINDS.items()
        for scheme in ("esa", "atp")
    ]

    def panel(kind: str, times: dict[str, float]) -> Panel:
        lines = []
        for scheme, name in SCHEMES.items():
            reach = [median_mb(found[setting], scheme) for setting in asked]
            look = {"color": COLOURS[scheme], "linewidth": 5}
            lines.append(Line([min(reach), max(reach)], [times[scheme]] * 2, "o-", name, look))
        lines.append(Line([44, 704], [times["goat"], times["geryon"]], "k--", "the line"))
        x = "bytes at the server, ours, least to most (MB)"
        return Panel(lines, x, "the paper's time (s)", kind, least_y=0)

    return outcome(findings, Picture([panel(*of) for of in KINDS.items()]))


EXPERIMENT = Experiment("times", "The testbed's times, by bytes at the server (Figures 8, 9)", run)
