"""§D.1, Figure 19: what hosts move in packets of one and of two passes through the switch.

What the figure says of packets' lengths is two points, and hosts are a line through them. What
follows from the line is compared with what the paper says elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fanin_lab.papers.atp import setting
from fanin_lab.papers.finding import Experiment, Finding, Outcome
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {"switchml": [32, 64, 256, 352], "atp": [64, 256, 336]}
"""In elements. The first of each is the paper's."""
FRAME_BYTES = {"switchml": 180 - 4 * 32, "atp": 306 - 4 * 64}
"""Of the paper's frames, what is no element."""
NAMES = {"switchml": "SwitchML (one pass: 32)", "atp": "ATP (two passes: 64)"}
HOSTS = {"switchml": setting.HOSTS_OF_SWITCHML, "atp": setting.HOSTS}
PAPER_GBPS = 60.0
PAPER_TWO_PASSES = 1.3
PAPER_MOST = 1.5
FITTED = "hosts are a line through this point and another"


def run(lab: Lab) -> Outcome:
    """Sum continuously on each system with packets of each length."""
    runs = lab.play(
        {
            _name(system, elements): _scenario(system, elements)
            for system, lengths in LENGTHS.items()
            for elements in lengths
        },
        # Nothing in it is random: every seed would give the same.
        once=True,
    )
    goodputs = {
        (system, elements): runs[_name(system, elements)].samples(setting.goodput_gbps)
        for system, lengths in LENGTHS.items()
        for elements in lengths
    }

    def moved(system: str, elements: int) -> list[float]:
        """Return what hosts move of the paper's frames, in Gbit/s."""
        share = 4 * elements / _frame(system, elements)
        return [goodput / share for goodput in goodputs[system, elements]]

    def by(ours: list[float], theirs: list[float]) -> Spread:
        return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        lengths = range(64, 1501, 4)
        line = [8 * length / (17.5 + 0.076 * length) for length in lengths]
        axes.plot(lengths, line, "k:", label="17.5 ns a packet and 0.076 ns a byte")
        for at, (system, of_system) in enumerate(LENGTHS.items()):
            frames = [_frame(system, elements) for elements in of_system]
            rates = [Spread.of(moved(system, elements)).median for elements in of_system]
            axes.plot(frames, rates, f"C{at}o", label=NAMES[system])
        axes.plot([180, 306], [PAPER_GBPS / PAPER_TWO_PASSES, PAPER_GBPS], "kx", label="paper")
        axes.set_ylim(0)
        finish(axes, "bytes of a frame", "moved by a host in each direction (Gbit/s)")

    one_pass, two_passes = moved("switchml", 32), moved("atp", 64)
    return Outcome(
        [
            Finding(
                "§5.5, Fig. 19",
                "frames of 306 bytes (two passes): what a host moves",
                PAPER_GBPS,
                Spread.of(two_passes),
                unit="Gbit/s",
                cannot_fail=FITTED,
            ),
            Finding(
                "§D.1, Fig. 19",
                "throughput, two passes (306 bytes) by one (180 bytes)",
                PAPER_TWO_PASSES,
                by(two_passes, one_pass),
                unit="x",
                cannot_fail=FITTED,
            ),
            Finding(
                "§5.2.1 by §D.1",
                "elements a second, two passes by one: what ATP can be faster than SwitchML in any "
                "model",
                PAPER_MOST,
                by(goodputs["atp", 64], goodputs["switchml", 32]),
                unit="x",
                cannot_fail=FITTED,
            ),
        ],
        draw,
        {f"{system}, {n} elements": found for (system, n), found in goodputs.items()},
    )


def _frame(system: str, elements: int) -> int:
    return FRAME_BYTES[system] + 4 * elements


def _scenario(system: str, elements: int) -> dict[str, Any]:
    return {
        "title": f"Figure 19: {NAMES[system]}, {elements} elements a packet",
        "until": "2ms",
        "warm_up": "0.5ms",
        "network": setting.rack(9, HOSTS[system]),
        "switch": setting.switch(),
        "job": [setting.job(system, elements=elements, tensor="250kB", in_flight=8)],
    }


def _name(system: str, elements: int) -> str:
    return f"packets-{system}-{elements}"


EXPERIMENT = Experiment("packets", "What hosts move by the length of packets (Figure 19)", run)
