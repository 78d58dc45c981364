"""§6.3, Figures 6 and 7: how much longer a tensor takes when every link loses packets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin_lab.papers.finding import Experiment, Finding, Outcome, Reason, at_least, at_most
from fanin_lab.papers.lab import Lab, Report, Runs, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.papers.switchml import setting, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
RATE_GBPS = 10
LOSSES = [1e-4, 1e-3, 1e-2]
SYSTEMS = {"switchml": "SwitchML", "ring": "ring over TCP"}
PIECES, PIECES_QUICK = 400, 32
PIECE = "250kB"
"""The paper's 100 MB (§6.1), in pieces, all submitted at once."""
LITTLE = "{}: times as long with 0.01 % loss on every link"
FASTER = "{:g} % loss: what it costs a ring by what it costs SwitchML"


def run(lab: Lab) -> Outcome:
    """Sum one tensor at every loss."""
    pieces = PIECES_QUICK if lab.quick else PIECES
    runs = lab.play(
        {
            _name(system, loss): scenario(system, loss, pieces)
            for system in SYSTEMS
            for loss in [0.0, *LOSSES]
        },
        throughputs=False,
    )
    inflation = {
        system: {loss: _inflation(runs, system, loss) for loss in LOSSES} for system in SYSTEMS
    }

    timelines = {at: runs[_name("switchml", at)] for at in timeline.LOSSES}

    def draw(figure: Figure) -> None:
        axes, right = figure.subplots(1, 2)
        timeline.draw(right, timelines)
        for at, (system, name) in enumerate(SYSTEMS.items()):
            spreads = [Spread.of(samples) for samples in inflation[system].values()]
            shown = [100 * loss for loss in LOSSES]
            axes.plot(shown, [s.median for s in spreads], f"C{at}o-", label=name)
            low, high = [s.least for s in spreads], [s.most for s in spreads]
            axes.fill_between(shown, low, high, color=f"C{at}", alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        x, y = "packets that every link loses (%)", "times as long as without loss"
        finish(axes, x, y, "Figure 6")

    findings = [
        Finding(
            "§6.3, Fig. 6",
            LITTLE.format(name),
            "minimally more: 1.1 at most",
            Spread.of(inflation[system][1e-4]),
            holds=at_most(1.1),
            unit="x",
        )
        for system, name in SYSTEMS.items()
    ]
    findings += [
        Finding(
            "§6.3, Fig. 6",
            FASTER.format(100 * loss),
            "significantly more: 1.2 at least",
            _faster(inflation, loss),
            holds=at_least(1.2),
            unit="x",
        )
        for loss in (1e-3, 1e-2)
    ]
    findings += timeline.findings(timelines, whole=not lab.quick)
    return Outcome(findings, draw, {"inflation": inflation, **timeline.series(timelines)})


def why(lab: Lab) -> Sequence[Reason]:
    """Let less of the ring wait behind a lost packet, which its TCP, without SACK, sends again."""
    pieces = PIECES_QUICK if lab.quick else PIECES
    near, small = {"delay": "5us"}, {"receive_window": "128kB"}
    changes: dict[str, dict[str, str]] = {
        # 160 us are what SwitchML's 128 slots fill the links with, here: a ring need not take it.
        "links of 5 us, a round trip of 20 us": near,
        "connections with 128 kB on the way at most": small,
        "both: a round trip of 20 us, and 128 kB on the way at most": near | small,
    }
    usual = lab.play(
        {f"{_name('switchml', at)}-usual": scenario("switchml", at, pieces) for at in AT},
        throughputs=False,
    )
    ours = {loss: _inflation(usual, "switchml", loss, "-usual") for loss in LOSSES}
    reasons = []
    for number, (change, more) in enumerate(changes.items()):
        tag = f"-why-{number}"
        runs = lab.play(
            {_name("ring", at) + tag: scenario("ring", at, pieces, **more) for at in AT},
            throughputs=False,
        )
        ring = {loss: _inflation(runs, "ring", loss, tag) for loss in LOSSES}
        what = LITTLE.format(SYSTEMS["ring"])
        reasons.append(Reason(what, change, Spread.of(ring[1e-4])))
        reasons += [
            Reason(FASTER.format(100 * at), change, _faster({"ring": ring, "switchml": ours}, at))
            for at in (1e-3, 1e-2)
        ]
    return reasons


AT = [0.0, *LOSSES]


def scenario(
    system: str, loss: float, pieces: int, delay: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return one tensor's sum, in pieces; `delay` is a link's."""
    network = setting.rack(WORKERS, RATE_GBPS)
    work = {"tensor": PIECE, "tensors": pieces, "in_flight": pieces}
    return {
        "title": f"Figures 6 and 7: {SYSTEMS[system]}, loss {loss:.2%}",
        "until": "20s",
        "interval": "1ms",
        # At the same times; a ring can be played so, SwitchML not.
        "payload": "sample" if system == "ring" else "full",
        "network": network if delay is None else {**network, "delay": delay},
        "job": [setting.job(system, WORKERS, RATE_GBPS, **work, **more)],
        "loss": [{"loss": loss}] if loss else [],
    }


def _name(system: str, loss: float) -> str:
    return f"loss-{system}-{loss:g}"


def _inflation(runs: dict[str, Runs], system: str, loss: float, tag: str = "") -> list[float]:
    lossy, lossless = (runs[_name(system, at) + tag].samples(_time) for at in (loss, 0.0))
    return [one / other for one, other in zip(lossy, lossless, strict=True)]


def _faster(inflation: dict[str, dict[float, list[float]]], loss: float) -> Spread:
    pairs = zip(inflation["ring"][loss], inflation["switchml"][loss], strict=True)
    return Spread.of([ring / switchml for ring, switchml in pairs])


def _time(report: Report) -> float:
    return float(report["jobs"][0]["finished_s"])


EXPERIMENT = Experiment("loss", "Every link loses packets, 10 Gbit/s (Figures 6 and 7)", run, why)
