"""Ranks that fill a switch's one link: `benches/one_link.py`, as root.

Each rank's link is as fast as the switch's, and all send at once, so the switch's link carries a
part of what they could send. A loss bound is set. In each round a rank submits two tensors. As a
program with arguments, this file is one rank.
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
from one_switch import LISTEN, answers

BOUND = 0.02
AT_ONCE = 2


def main() -> int:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--rate-bps", type=int, default=20_000_000, help="of each link")
    parser.add_argument("--queue", type=int, default=100_000, help="bytes of a port's queue")
    parser.add_argument("--elements", type=int, default=200_000, help="of a tensor")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    lab = Netlab(
        args.ranks,
        spares=1,
        rate_bps=args.rate_bps,
        queue_bytes=args.queue,
        loss=0.0,  # none, and no trains
        name=f"b{os.getpid()}",
    )
    with lab:
        told = [args.ranks, args.rate_bps, args.elements, args.rounds]
        said = answers(lab, args.ranks, __file__, told)
    seconds = [each for answer in said for each in answer[0]]
    sent, again = (sum(answer[i] for answer in said) for i in (1, 2))
    least = AT_ONCE * 4 * args.elements * args.ranks * 8 / args.rate_bps
    print(
        f"a round {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}; "
        f"the tensors' bytes alone take {least:.2f} s), sent again: {again} of {sent} packets"
    )
    return 0


def be_rank(rank: int, ranks: int, rate_bps: int, elements: int, rounds: int) -> Any:
    """Play one rank; returns its rounds' seconds, and packets sent and sent again."""
    said: dict[str, Any] = {"loss_bound": BOUND, "plan": "switch", "rate": f"{rate_bps}bit"}
    gradient = np.random.default_rng(rank).standard_normal(elements).astype(np.float32)
    found = []
    with fanin.connect(LISTEN, job="one link", rank=rank, world_size=ranks, **said) as group:
        for _ in range(rounds):
            began = time.monotonic()
            sums = [group.all_reduce_async(gradient.copy()) for _ in range(AT_ONCE)]
            for each in sums:
                each.wait()
            found.append(time.monotonic() - began)
        counted = group.statistics()
    return found, counted["packets_sent"], counted["retransmissions"]


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        print(json.dumps(be_rank(*json.loads(sys.argv[1]))))
        sys.exit(0)
    sys.exit(main())
