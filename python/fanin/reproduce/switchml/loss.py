"""§6.3, Figure 6: how much longer a tensor takes when every link loses packets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanin.reproduce.finding import Experiment, Finding, Outcome, Reason, at_least, at_most
from fanin.reproduce.lab import Lab, Report, Runs, Spread
from fanin.reproduce.plot import finish
from fanin.reproduce.switchml import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
RATE_GBPS = 10
LOSSES = [1e-4, 1e-3, 1e-2]
SYSTEMS = {"switchml": "SwitchML", "ring": "ring over TCP"}
PIECES, PIECES_QUICK = 200, 32
PIECE = "250kB"
"""A tensor is submitted in pieces, all at once, so that it is seen how it goes on."""
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

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, (system, name) in enumerate(SYSTEMS.items()):
            spreads = [Spread.of(samples) for samples in inflation[system].values()]
            shown = [100 * loss for loss in LOSSES]
            axes.plot(shown, [s.median for s in spreads], f"C{at}o-", label=name)
            low, high = [s.least for s in spreads], [s.most for s in spreads]
            axes.fill_between(shown, low, high, color=f"C{at}", alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        finish(axes, "packets that every link loses (%)", "times as long as without loss")

    def faster(loss: float) -> Spread:
        pairs = zip(inflation["ring"][loss], inflation["switchml"][loss], strict=True)
        return Spread.of([ring / switchml for ring, switchml in pairs])

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
            faster(loss),
            holds=at_least(1.2),
            unit="x",
        )
        for loss in (1e-3, 1e-2)
    ]
    return Outcome(findings, draw, {"inflation": inflation})


def why(lab: Lab) -> Sequence[Reason]:
    """Let a shorter timeout, or four times as many slots, change what a lost packet holds up."""
    pieces = PIECES_QUICK if lab.quick else PIECES
    changes: dict[str, dict[str, Any]] = {
        "timeouts of 0.25 ms": {"timeout": "0.25ms"},
        "512 slots instead of 128": {"slots": 512},
        "losses that a worker notices by what overtakes them, too": {"timeouts_only": False},
    }
    reasons = []
    for change, more in changes.items():
        tag = f"-{next(iter(more))}"
        runs = lab.play(
            {_name("switchml", at) + tag: scenario("switchml", at, pieces, **more) for at in AT}
            | {_name("ring", at) + tag: scenario("ring", at, pieces) for at in AT},
            once=True,
            throughputs=False,
        )
        little = Spread.of(_inflation(runs, "switchml", 1e-4, tag))
        name = SYSTEMS["switchml"]
        reasons.append(Reason(LITTLE.format(name), change, little))
        for loss in (1e-3, 1e-2):
            [ring] = _inflation(runs, "ring", loss, tag)
            [ours] = _inflation(runs, "switchml", loss, tag)
            ratio = ring / ours
            what = FASTER.format(100 * loss)
            reasons.append(Reason(what, change, Spread.of([ratio])))
    return reasons


AT = [0.0, *LOSSES]


def scenario(system: str, loss: float, pieces: int, **more: Any) -> dict[str, Any]:
    """Return one tensor's sum, in pieces."""
    work = {"tensor": PIECE, "tensors": pieces, "in_flight": pieces}
    return {
        "title": f"Figures 6 and 7: {SYSTEMS[system]}, loss {loss:.2%}",
        "until": "20s",
        "interval": "1ms",
        "network": setting.rack(WORKERS, RATE_GBPS),
        "job": [setting.job(system, WORKERS, RATE_GBPS, **work, **more)],
        "loss": [{"loss": loss}] if loss else [],
    }


def _name(system: str, loss: float) -> str:
    return f"inflation-{system}-{loss:g}"


def _inflation(runs: dict[str, Runs], system: str, loss: float, tag: str = "") -> list[float]:
    lossy, lossless = (runs[_name(system, at) + tag].samples(_time) for at in (loss, 0.0))
    return [one / other for one, other in zip(lossy, lossless, strict=True)]


def _time(report: Report) -> float:
    return float(report["jobs"][0]["finished_s"])


EXPERIMENT = Experiment(
    "inflation", "Times as long when every link loses packets, 10 Gbit/s (Figure 6)", run, why
)
