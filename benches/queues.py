"""Front layers before a shared link, in DLCP's queues and in one: `benches/queues.py`, as root.

Some ranks send to a switch whose link is as fast as each of theirs, and each at a rate at which
together they fill it or more. In each round a rank submits a long tensor of the last layer, and at
once a shorter one of the first layer. Laboratories with one queue a port and with those that DLCP
asks for take turns; packets travel singly in both. As a program with arguments, this file is one
rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import fanin
import numpy as np
from fanin_lab.netlab import Netlab
from fanin_lab.netlab.queues import KINDS
from one_switch import LISTEN, answers

BOUND = 0.02
BACK, FRONT = 6, 0
Round = tuple[float, float, float]
"""Seconds until the sum of the first layer is there and until both are, and what they lost."""


def main() -> int:
    """Measure, and print a line for each kind of queues."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rate-bps", type=int, default=20_000_000, help="of each link")
    parser.add_argument("--sends-bps", type=int, default=8_000_000, help="the rate of each rank")
    parser.add_argument("--queue", type=int, default=100_000, help="bytes of a port's queue")
    parser.add_argument("--back", type=int, default=400_000, help="elements of the last layer")
    parser.add_argument("--front", type=int, default=100_000, help="elements of the first layer")
    parser.add_argument("--jobs", type=int, default=3, help="in queues of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="of each job")
    args = parser.parse_args()
    found: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    for _ in range(args.jobs):
        for kind in KINDS:
            found[kind] += _played(kind, args)
    for kind, rounds in found.items():
        front, both, lost = zip(*rounds, strict=True)
        print(
            f"{kind}: first layer {1e3 * statistics.median(front):.0f} ms "
            f"({1e3 * min(front):.0f} to {1e3 * max(front):.0f}), "
            f"both {1e3 * statistics.median(both):.0f} ms, lost {100 * statistics.mean(lost):.2f} %"
        )
    return 0


def _played(kind: str, args: argparse.Namespace) -> list[Round]:
    lab = Netlab(
        args.ranks,
        spares=1,
        rate_bps=args.rate_bps,
        queue_bytes=args.queue,
        queues=kind,
        loss=0.0,  # none, and no trains
        name=f"b{os.getpid()}",
    )
    with lab:
        told = [args.ranks, args.sends_bps, args.back, args.front, args.rounds]
        said = answers(lab, args.ranks, __file__, told)
    return [tuple(each) for rounds in said for each in rounds]


def be_rank(rank: int, ranks: int, sends_bps: int, back: int, front: int, rounds: int) -> Any:
    """Play one rank; returns its rounds."""
    said: dict[str, Any] = {"loss_bound": BOUND, "plan": "switch", "rate": f"{sends_bps}bit"}
    dice = np.random.default_rng(rank)
    gradients = [dice.standard_normal(length).astype(np.float32) for length in (back, front)]
    found = []
    with fanin.connect(LISTEN, job="queues", rank=rank, world_size=ranks, **said) as group:
        for _ in range(rounds):
            last, first = (each.copy() for each in gradients)
            group.all_reduce(np.zeros(1, np.int32))  # all begin together
            began = time.monotonic()
            of_last = group.all_reduce_async(last, priority=BACK)
            of_first = group.all_reduce_async(first, priority=FRONT)
            of_first.wait()
            seconds = time.monotonic() - began
            of_last.wait()
            lost = (of_last.loss() * back + of_first.loss() * front) / (back + front)
            found.append((seconds, time.monotonic() - began, lost))
    return found


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        print(json.dumps(be_rank(*json.loads(sys.argv[1]))))
        sys.exit(0)
    sys.exit(main())
