"""Appendix C, Figure 9: how many slots a tensor needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin_lab.papers.finding import Experiment, Finding, Outcome, at_least
from fanin_lab.papers.lab import Lab, Spread
from fanin_lab.papers.plot import finish
from fanin_lab.papers.switchml import setting
from fanin_lab.sweep import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE_GBPS = 100
WORKERS = 8
POOLS = [32, 64, 128, 256, 512, 1024, 2048]
POOLS_QUICK = [128, 256, 512, 1024]
DELAYS = ["6us", "15us", "24us"]
DELAYS_QUICK = ["18us"]
FLAT = 1.05
"""Times the least time of all pools: what counts as no longer."""
PAPER_POOL = 512.0
BYTES = 100e6
"""Of the tensor whose time is shown, as in the paper."""


def run(lab: Lab) -> Outcome:
    """Sum continuously with each pool, and with each delay, which the paper does not give."""
    pools = POOLS_QUICK if lab.quick else POOLS
    delays = DELAYS_QUICK if lab.quick else DELAYS
    runs = lab.play(
        {
            f"pool-{slots}-{delay}": {
                "title": f"Figure 9: {slots} slots, {delay} a link",
                # With few slots as many tensors take longer.
                "until": "3ms" if slots > 128 else "12ms",
                "warm_up": "1ms",
                "interval": "1ms",
                "network": setting.rack(WORKERS, RATE_GBPS) | {"delay": delay},
                "switch": {"aggregators": 2 * max(POOLS)},
                "job": [
                    setting.job(
                        "switchml",
                        WORKERS,
                        RATE_GBPS,
                        slots=slots,
                        tensor="250kB",
                        # As of one long tensor, each slot's next chunk is known when it sends.
                        in_flight=max(8, slots // 100),
                    )
                ],
            }
            for slots in pools
            for delay in delays
        },
        # Nothing in it is random: every seed would give the same.
        once=True,
    )
    # Milliseconds.
    times = {
        delay: [
            8e-6 * BYTES / runs[f"pool-{slots}-{delay}"].spread(setting.goodput_gbps).median
            for slots in pools
        ]
        for delay in delays
    }
    # All slots are in flight: as long as it takes to send one packet for each (Little's law).
    round_trips = {
        delay: [
            1e3 * ms * n * setting.PAYLOAD_BYTES / BYTES
            for n, ms in zip(pools, of_delay, strict=True)
        ]
        for delay, of_delay in times.items()
    }
    needed = {
        delay: min(n for n, ms in zip(pools, of_delay, strict=True) if ms <= FLAT * min(of_delay))
        for delay, of_delay in times.items()
    }

    def draw(figure: Figure) -> None:
        for axes, found, what in zip(
            figure.subplots(1, 2),
            (times, round_trips),
            ("time of 100 MB (ms)", "round trip of a packet (us)"),
            strict=True,
        ):
            for at, (delay, of_delay) in enumerate(found.items()):
                axes.plot(pools, of_delay, f"C{at}o-", label=words.setting("delay", delay))
            axes.axvline(PAPER_POOL, color="black", linestyle="--", label="paper: 512")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            finish(axes, "slots", what)

    longest, waits = list(times.values())[-1], list(round_trips.values())[-1]
    shorter, longer = (waits[pools.index(slots)] for slots in (512, pools[-1]))
    return Outcome(
        [
            Finding(
                "App. C, Fig. 9",
                "100 Gbit/s: the smallest pool, a power of two, that is as fast as any",
                PAPER_POOL,
                Spread.over([Spread.of([float(n)]) for n in needed.values()]),
                unit="slots",
                swept=f"links of {delays[0]} to {delays[-1]}" if len(delays) > 1 else "",
            ),
            Finding(
                "Fig. 9",
                f"{delays[-1]} a link: time with {pools[0]} slots by that with {pools[-1]}",
                "more than 1",
                Spread.of([longest[0] / longest[-1]]),
                holds=at_least(1.2),
                unit="x",
                cannot_fail="so few slots cannot fill a link: arithmetic",
            ),
            Finding(
                "App. C, Fig. 9",
                f"{delays[-1]} a link: a packet's round trip with {pools[-1]} slots by that with "
                "512 (slots by the rate of packets, by Little's law)",
                "more than 1.2: more slots than needed queue",
                Spread.of([longer / shorter]),
                holds=at_least(1.2),
                unit="x",
                cannot_fail="where 512 slots fill the link, more of them queue: arithmetic",
            ),
        ],
        draw,
        {"pools": pools, "ms_of_100_mb": times, "round_trip_us": round_trips},
    )


EXPERIMENT = Experiment("pool", "Time of a tensor by the slots, 100 Gbit/s (Figure 9)", run)
