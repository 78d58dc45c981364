"""§D.1, Figure 19: what hosts move in packets of one and of two passes through the switch.

What the figure says of packets' lengths is two points, and hosts are a line through them. What
follows from the line is compared with what the paper says elsewhere.
"""

from __future__ import annotations

from fanin_lab.papers.atp import setting
from fanin_lab.papers.lab import Scenario, Spread
from fanin_lab.papers.plot import Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Row, Simulated, by, computed, ratio

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


def scenario(system: str, elements: int) -> Scenario:
    """Return tensors that are summed continuously in packets of one length."""
    return {
        "title": f"Figure 19: {NAMES[system]}, {elements} elements a packet",
        "until": "2ms",
        "warm_up": "0.5ms",
        "network": setting.rack(9, HOSTS[system]),
        "switch": setting.switch(),
        "job": [setting.job(system, elements=elements, tensor="250kB", in_flight=8)],
    }


def frame(system: str, elements: int) -> int:
    """Return the bytes of a frame of the paper's."""
    return FRAME_BYTES[system] + 4 * elements


def moved(at: At, system: str, elements: int) -> list[float]:
    """Return what hosts move of the paper's frames, in Gbit/s."""
    share = 4 * elements / frame(system, elements)
    found = at.samples(setting.goodput_gbps, system=system, elements=elements)
    return [goodput / share for goodput in found]


def picture(at: At) -> Picture:
    """Show the line, what was played, and the paper's two points."""
    lengths = range(64, 1501, 4)
    line = [8 * length / (17.5 + 0.076 * length) for length in lengths]

    def dots(number: int, system: str) -> Line:
        frames = [frame(system, elements) for elements in LENGTHS[system]]
        rates = [Spread.of(moved(at, system, elements)).median for elements in LENGTHS[system]]
        return Line(frames, rates, f"C{number}o", NAMES[system])

    marks = [
        Line(lengths, line, "k:", "17.5 ns a packet and 0.076 ns a byte"),
        *(dots(number, system) for number, system in enumerate(LENGTHS)),
        Line([180, 306], [PAPER_GBPS / PAPER_TWO_PASSES, PAPER_GBPS], "kx", "paper"),
    ]
    y = "moved by a host in each direction (Gbit/s)"
    return Picture([Panel(marks, "bytes of a frame", y, least_y=0)])


EXPERIMENT = Simulated(
    "packets",
    "What hosts move by the length of packets (Figure 19)",
    scenario,
    # Nothing in it is random: every seed would give the same.
    [Cases({"system": one, "elements": lengths}, seeds=1) for one, lengths in LENGTHS.items()],
    [
        Row(
            "§5.5, Fig. 19",
            "frames of 306 bytes (two passes): what a host moves",
            PAPER_GBPS,
            computed(moved, "atp", 64),
            "Gbit/s",
            cannot_fail=FITTED,
        ),
        Row(
            "§D.1, Fig. 19",
            "throughput, two passes (306 bytes) by one (180 bytes)",
            PAPER_TWO_PASSES,
            lambda at: by(moved(at, "atp", 64), moved(at, "switchml", 32)),
            "x",
            cannot_fail=FITTED,
        ),
        Row(
            "§5.2.1 by §D.1",
            "elements a second, two passes by one: what ATP can be faster than SwitchML in any "
            "model",
            PAPER_MOST,
            ratio(
                setting.goodput_gbps,
                {"system": "atp", "elements": 64},
                {"system": "switchml", "elements": 32},
            ),
            "x",
            cannot_fail=FITTED,
        ),
    ],
    picture,
).experiment()
