"""Training where one rank has a quarter of the rate: `python benches/slow_link.py`, as root.

All ranks are below one switch of GOAT. They train digits with DDP, which waits for the slow link in
each step, and with `AsynchronousOptimizer`, whose switches are told who takes part. Both go on
until as many gradients are in the model. The loss is that of held-back images, at equal gradients,
over some seeds. As a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from fanin_lab.netlab import SWITCH, Netlab, address

PORT = 4900
MODES = ("synchronous", "asynchronous")
TRAINED = 1437
"""Of 1797 images; the loss is that of the rest."""
BATCH = 32
MARKS = 10
"""How often the loss is taken."""

Curve = list[tuple[float, float]]
"""Seconds and loss, at as many gradients each."""


def main() -> int:
    """Measure, and print what each training took and where it ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate-bps", type=int, default=200_000_000, help="of each other link")
    parser.add_argument("--hidden", type=int, default=1024, help="neurons of each hidden layer")
    parser.add_argument("--gradients", type=int, default=800, help="of all ranks")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    slow = {f"w{args.workers - 1}": args.rate_bps // 4}
    with (
        Netlab(args.workers, rate_bps=args.rate_bps, rates=slow, name=f"l{os.getpid()}") as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        listen = f"{address(SWITCH)}:{PORT}"
        command = [sys.executable, "-m", "fanin", "switch", "--protocol", "goat"]
        options = ["--listen", listen, "--json", "--log", "error"]
        switch = lab.popen(SWITCH, [*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            assert switch.stdout is not None
            if not switch.stdout.readline():
                raise SystemExit("the switch ended")
            told = _played(lab, Path(folder) / "store", listen, args)
        finally:
            switch.terminate()
            switch.communicate()
    steps = {}
    for mode in MODES:
        curves: list[Curve] = told[mode]
        # As many gradients as a step of all ranks has.
        steps[mode] = [curve[-1][0] * args.workers / args.gradients for curve in curves]
        losses = [statistics.mean(curve[mark][1] for curve in curves) for mark in range(MARKS)]
        print(
            f"{mode}: {1000 * statistics.median(steps[mode]):.1f} ms for {args.workers} gradients; "
            f"loss {' '.join(f'{loss:.3f}' for loss in losses)}"
        )
    ratio = statistics.median(steps["asynchronous"]) / statistics.median(steps["synchronous"])
    print(f"asynchronous takes {ratio:.2f} of the time, changes counted by their gradients")
    return 0


def _played(lab: Netlab, store: Path, switch: str, args: argparse.Namespace) -> Any:
    ranks = []
    for rank in range(args.workers):
        numbers = [rank, args.workers, args.hidden, args.gradients, args.seeds]
        command = [sys.executable, __file__, "rank", switch, str(store), *map(str, numbers)]
        ranks.append(lab.popen(f"w{rank}", command, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return json.loads(said[0].splitlines()[-1])


def rank_of(switch: str, store: str, numbers: list[int]) -> None:
    """Train as one rank; rank 0 prints the curves."""
    rank, world, hidden, gradients, seeds = numbers
    import fanin.torch
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    options = fanin.torch.Options(protocol="goat", switch=switch)
    alike: dict[str, Any] = {"timeout": timedelta(seconds=300), "pg_options": options}
    method = f"file://{store}"
    dist.init_process_group("fanin", init_method=method, rank=rank, world_size=world, **alike)
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)

    def train(mode: str, seed: int) -> Curve:
        torch.manual_seed(seed)
        order = torch.randperm(len(digits))
        mine = order[:TRAINED][rank::world]
        layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Linear(hidden, 10))
        drawing = torch.Generator().manual_seed(1000 * seed + rank)
        inner = torch.optim.SGD(network.parameters(), lr=0.05)
        is_async = mode == "asynchronous"
        model = network if is_async else DistributedDataParallel(network)
        optimizer: Any = fanin.torch.AsynchronousOptimizer(inner) if is_async else inner
        begun, curve, steps = time.monotonic(), Curve(), 0
        while len(curve) < MARKS:
            batch = mine[torch.randint(len(mine), (BATCH,), generator=drawing)]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            done = optimizer.gradients if is_async else steps * world
            with torch.no_grad():
                held = order[TRAINED:]
                while len(curve) < MARKS and done * MARKS >= gradients * (len(curve) + 1):
                    left = nn.functional.cross_entropy(network(pixels[held]), digits[held])
                    curve.append((time.monotonic() - begun, float(left)))
        if is_async:
            optimizer.close()
        dist.barrier()
        return curve

    curves: dict[str, list[Curve]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        for mode in MODES:
            curves[mode].append(train(mode, seed))
    if rank == 0:
        print(json.dumps(curves))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_of(sys.argv[2], sys.argv[3], [int(number) for number in sys.argv[4:9]])
    else:
        sys.exit(main())
