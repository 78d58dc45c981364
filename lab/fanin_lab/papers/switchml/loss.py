"""§6.3, Figures 6 and 7: how much longer a tensor takes when every link loses packets.

Figure 7 is what a worker sends over time, in Figure 6's runs.
"""

from __future__ import annotations

from typing import Any

from fanin_lab.papers.finding import LESS, at_least, at_most
from fanin_lab.papers.lab import Report, Scenario, Spread
from fanin_lab.papers.plot import Band, Line, Mark, Panel, Picture
from fanin_lab.papers.simulated import (
    At,
    Cases,
    Change,
    Either,
    Row,
    Simulated,
    by,
    computed,
    figure,
)
from fanin_lab.papers.switchml import setting

WORKERS = 8
RATE_GBPS = 10
LITTLE, SOME, MUCH = LOSSES = [1e-4, 1e-3, 1e-2]
LOSSES_OF_TIMELINE = [0.0, LITTLE, MUCH]
SYSTEMS = {"switchml": "SwitchML", "ring": "ring over TCP"}
PIECES = Either(400, quick=32)
PIECE = "250kB"
"""The paper's 100 MB (§6.1), in pieces, all submitted at once."""
WORKER = ("h0", "s0")
"""The link of the worker that is looked at."""


def scenario(
    system: str,
    loss: float,
    pieces: int,
    delay: str | None = None,
    receive_window: str | None = None,
) -> Scenario:
    """Return one tensor's sum, in pieces; `delay` is a link's."""
    network = setting.rack(WORKERS, RATE_GBPS)
    work: dict[str, Any] = {"tensor": PIECE, "tensors": pieces, "in_flight": pieces}
    if receive_window:
        work["receive_window"] = receive_window
    return {
        "title": f"Figures 6 and 7: {SYSTEMS[system]}, loss {loss:.2%}",
        "until": "20s",
        "interval": "1ms",
        # At the same times; a ring can be played so, SwitchML not.
        "payload": "sample" if system == "ring" else "full",
        "network": network if delay is None else {**network, "delay": delay},
        "job": [setting.job(system, WORKERS, RATE_GBPS, **work)],
        "loss": [{"loss": loss}] if loss else [],
    }


def _time_s(report: Report) -> float:
    return float(report["jobs"][0]["finished_s"])


def inflation(at: At, system: str, loss: float) -> list[float]:
    """Return how many times as long as without loss the tensor takes."""
    return at.by(_time_s, {"system": system, "loss": loss}, {"system": system, "loss": 0.0})


def faster(at: At, loss: float) -> list[float]:
    """Return what a loss costs a ring by what it costs SwitchML."""
    return by(inflation(at, "ring", loss), inflation(at, "switchml", loss))


def _sent(report: Report) -> list[float]:
    """Return how many packets the worker sent in each interval, but for the last, cut short one."""
    [link] = [one for one in report["links"] if (one["from"], one["to"]) == WORKER]
    packets = 1e9 * link["rate_gbps"] * report["interval_s"] / 8 / setting.WIRE_BYTES
    until = int(report["jobs"][0]["finished_s"] / report["interval_s"])
    return [load * packets for load in link["loads"][:until]]


def _sent_mean(report: Report) -> float:
    return _mean(_sent(report))


def _slows(report: Report) -> float:
    sent = _sent(report)
    fifth = max(1, len(sent) // 5)
    return _mean(sent[-fifth:]) / _mean(sent[: len(sent) - fifth])


def _slow_from_ms(report: Report) -> float:
    sent = _sent(report)
    usual = _mean(sent[: len(sent) // 2])
    last = max(at for at, packets in enumerate(sent) if packets >= usual)
    return float(1e3 * report["interval_s"] * (last + 1))


def _mean(series: list[float]) -> float:
    return sum(series) / len(series)


def close(at: At) -> list[float]:
    """Return what is sent in a second with little loss, by that without loss."""
    ideal = at.spread(_sent_mean, system="switchml", loss=0.0).median
    found = at.samples(_sent_mean, system="switchml", loss=LITTLE)
    return [sent / ideal for sent in found]


def picture(at: At) -> Picture:
    """Show Figure 6, and Figure 7 of the first seed."""
    curves: list[Mark] = []
    shown = [100 * loss for loss in LOSSES]
    for number, (system, name) in enumerate(SYSTEMS.items()):
        spreads = [Spread.of(inflation(at, system, loss)) for loss in LOSSES]
        look = {"color": f"C{number}", "alpha": 0.15, "linewidth": 0}
        curves += [
            Line(shown, [s.median for s in spreads], f"C{number}o-", name),
            Band(shown, [s.least for s in spreads], [s.most for s in spreads], look),
        ]
    over_time = []
    for loss in LOSSES_OF_TIMELINE:
        report = at.runs(system="switchml", loss=loss).reports[0]
        sent = _sent(report)
        times = [1000 * report["interval_s"] * (n + 0.5) for n in range(len(sent))]
        # Few losses hardly change it, and would hide it.
        look = {} if loss else {"linewidth": 6, "alpha": 0.4}
        over_time.append(Line(times, sent, label=f"loss {100 * loss:g} %", look=look))
    x, y = "packets that every link loses (%)", "times as long as without loss"
    sent_y = "packets that a worker sends in a millisecond"
    return Picture(
        [
            Panel(curves, x, y, "Figure 6", log_x=10, log_y=10),
            Panel(over_time, "time (ms)", sent_y, "Figure 7", least_y=0),
        ]
    )


LITTLE_MORE = {
    system: Row(
        "§6.3, Fig. 6",
        f"{name}: times as long with 0.01 % loss on every link",
        "minimally more: 1.1 at most",
        computed(inflation, system, LITTLE),
        "x",
        at_most(1.1),
    )
    for system, name in SYSTEMS.items()
}
FASTER = [
    Row(
        "§6.3, Fig. 6",
        f"{100 * loss:g} % loss: what it costs a ring by what it costs SwitchML",
        "significantly more: 1.2 at least",
        computed(faster, loss),
        "x",
        at_least(1.2),
    )
    for loss in (SOME, MUCH)
]
OVER_TIME = [
    Row(
        "§6.3, Fig. 7",
        "0.01 % loss: packets sent in a second by that without loss",
        "relatively close to the ideal: 0.8 at least",
        close,
        "x",
        at_least(0.8),
    ),
    Row(
        "§6.3, Fig. 7",
        "1 % loss: packets sent in a second in the last fifth of the time by before",
        "less than 1: some slots are behind, and none takes work from them",
        figure(_slows, system="switchml", loss=MUCH),
        "x",
        LESS,
    ),
]
WHOLE = Row(
    "§6.3, Fig. 7",
    "1 % loss: the last moment at which as much is sent as in the first half",
    150.0,
    figure(_slow_from_ms, system="switchml", loss=MUCH),
    "ms",
)
"""Of the whole tensor alone, which is not played quickly."""
ROWS = [*LITTLE_MORE.values(), *FASTER, *OVER_TIME]


def _of_ring(words: str, **keys: str) -> Change:
    rows = [LITTLE_MORE["ring"], *FASTER]
    return Change(words, keys, of=rows, where={"system": ["ring"]})


EXPERIMENT = Simulated(
    "loss",
    "Every link loses packets, 10 Gbit/s (Figures 6 and 7)",
    scenario,
    [Cases({"system": SYSTEMS, "loss": [0.0, *LOSSES]}, throughputs=False)],
    Either([*ROWS, WHOLE], quick=ROWS),
    picture,
    usual={"pieces": PIECES},
    # Less of the ring waits behind a lost packet, which its TCP, without SACK, sends again.
    changes=[
        # 160 us are what SwitchML's 128 slots fill the links with, here: a ring need not take it.
        _of_ring("links of 5 us, a round trip of 20 us", delay="5us"),
        _of_ring("connections with 128 kB on the way at most", receive_window="128kB"),
        _of_ring(
            "both: a round trip of 20 us, and 128 kB on the way at most",
            delay="5us",
            receive_window="128kB",
        ),
    ],
).experiment()
