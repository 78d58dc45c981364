"""Appendix C, Figure 9: how many slots a tensor needs."""

from __future__ import annotations

from collections.abc import Callable

from fanin_lab.papers.finding import at_least
from fanin_lab.papers.lab import Scenario
from fanin_lab.papers.plot import Level, Line, Panel, Picture
from fanin_lab.papers.simulated import At, Cases, Either, Row, Simulated
from fanin_lab.papers.switchml import setting
from fanin_lab.sweep import words

RATE_GBPS = 100
WORKERS = 8
POOLS = Either([32, 64, 128, 256, 512, 1024, 2048], quick=[128, 256, 512, 1024])
DELAYS = Either([{"delay": "24us"}, {"delay": "6us"}, {"delay": "15us"}], quick=[{"delay": "18us"}])
"""Of a link; the paper does not give it. Rows that have it in words are of the first one."""
FLAT = 1.05
"""Times the least time of all pools: what counts as no longer."""
PAPER_POOL = 512.0
BYTES = 100e6
"""Of the tensor whose time is shown, as in the paper."""


def scenario(slots: int, delay: str) -> Scenario:
    """Return tensors that are summed continuously with a pool."""
    job = setting.job(
        "switchml",
        WORKERS,
        RATE_GBPS,
        slots=slots,
        tensor="250kB",
        # As of one long tensor, each slot's next chunk is known when it sends.
        in_flight=max(8, slots // 100),
    )
    return {
        "title": f"Figure 9: {slots} slots, {delay} a link",
        # With few slots as many tensors take longer.
        "until": "3ms" if slots > 128 else "12ms",
        "warm_up": "1ms",
        "interval": "1ms",
        "network": setting.rack(WORKERS, RATE_GBPS) | {"delay": delay},
        "switch": {"aggregators": 2 * max(POOLS.full)},
        "job": [job],
    }


def times_ms(at: At) -> dict[int, float]:
    """Return the time of the tensor by the slots."""
    return {
        slots: 8e-6 * BYTES / at.spread(setting.goodput_gbps, slots=slots).median
        for slots in at.values("slots")
    }


def round_trips_us(at: At) -> dict[int, float]:
    """Return a packet's round trip by the slots.

    All slots are in flight: as long as it takes to send one packet for each (Little's law).
    """
    return {
        slots: 1e3 * ms * slots * setting.PAYLOAD_BYTES / BYTES
        for slots, ms in times_ms(at).items()
    }


def needed(at: At) -> list[float]:
    """Return the smallest pool that is as fast as any."""
    found = times_ms(at)
    flat = FLAT * min(found.values())
    return [float(min(slots for slots, ms in found.items() if ms <= flat))]


def by_most(found: dict[int, float], slots: int) -> float:
    """Return what is found with so many slots by what is with the most."""
    return found[slots] / found[max(found)]


def picture(at: At) -> Picture:
    """Show a tensor's times, and packets' round trips, by the slots."""
    longest, *others = at.settings
    shown = [*others, longest]

    def panel(found: Callable[[At], dict[int, float]], y: str) -> Panel:
        lines = [
            Line(
                list(found(of)),
                list(found(of).values()),
                f"C{number}o-",
                words.setting("delay", of.setting["delay"]),
            )
            for number, of in enumerate(shown)
        ]
        look = {"color": "black", "linestyle": "--"}
        paper = Level(PAPER_POOL, "paper: 512", look, along="y")
        return Panel([*lines, paper], "slots", y, log_x=2, log_y=10)

    y = "round trip of a packet (us)"
    return Picture([panel(times_ms, "time of 100 MB (ms)"), panel(round_trips_us, y)])


def _rows(pools: list[int], delay: str) -> list[Row]:
    least, most = pools[0], pools[-1]
    return [
        Row(
            "App. C, Fig. 9",
            "100 Gbit/s: the smallest pool, a power of two, that is as fast as any",
            PAPER_POOL,
            needed,
            "slots",
        ),
        Row(
            "Fig. 9",
            f"{delay} a link: time with {least} slots by that with {most}",
            "more than 1",
            lambda at: [by_most(times_ms(at), least)],
            "x",
            at_least(1.2),
            "so few slots cannot fill a link: arithmetic",
            usual_only=True,
        ),
        Row(
            "App. C, Fig. 9",
            f"{delay} a link: a packet's round trip with {most} slots by that with 512 (slots by "
            "the rate of packets, by Little's law)",
            "more than 1.2: more slots than needed queue",
            lambda at: [1 / by_most(round_trips_us(at), 512)],
            "x",
            at_least(1.2),
            "where 512 slots fill the link, more of them queue: arithmetic",
            usual_only=True,
        ),
    ]


EXPERIMENT = Simulated(
    "pool",
    "Time of a tensor by the slots, 100 Gbit/s (Figure 9)",
    scenario,
    # Nothing in it is random: every seed would give the same.
    [Cases({"slots": POOLS}, DELAYS, seeds=1)],
    Either(_rows(POOLS.full, "24us"), quick=_rows(POOLS.quick, "18us")),
    picture,
    over="links of 6us to 24us",
).experiment()
