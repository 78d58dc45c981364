"""How long ranks take to agree on ResNet-50's 161 gradients: `benches/horovod_agreement.py`.

One process plays the words of all ranks, and rank 0's decisions. The words are made and read as on
connections, and there is no network. In the first two steps ranks ask in full, later by numbers.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from dataclasses import replace

import torch
from fanin.horovod.coordinator import Coordinator
from fanin.horovod.execution import reduces
from fanin.horovod.requests import Batch, Form, Kind, Request
from horovod_steps import shapes


def main() -> int:
    """Measure, and print two lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="by numbers")
    args = parser.parse_args()
    asked = [
        Request(0, Kind.ALLREDUCE, f"{index}", tensors=(Form(shape, torch.float32, "cpu"),))
        for index, shape in enumerate(shapes())
    ]
    coordinator = Coordinator(args.ranks, reduces)
    took = []
    for step in range(args.steps + 2):
        began = time.perf_counter()
        for rank in range(args.ranks):
            # They have numbers once they have come twice.
            in_full = [replace(each, rank=rank) for each in asked] if step < 2 else []
            words = 0 if step < 2 else (1 << len(asked)) - 1, in_full
            mask, requests = pickle.loads(pickle.dumps(words))
            if mask:
                coordinator.hear_again(rank, mask)
            for request in requests:
                coordinator.hear(request)
        decided = coordinator.decide()
        pickle.dumps(coordinator.shortened)
        took.append(1000 * (time.perf_counter() - began))
        batches = [each for each in decided if isinstance(each, Batch)]
        assert sum(len(each.operations) for each in batches) == len(asked)
    median = statistics.median(took[2:])
    print(f"{args.ranks} ranks agree on {len(asked)} tensors in {median:.1f} ms", end=" ")
    print(f"({min(took[2:]):.1f} to {max(took[2:]):.1f}), the first time in {took[0]:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
