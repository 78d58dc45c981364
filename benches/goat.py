"""GOAT, ATP and Gloo where ranks are late: `python benches/goat.py`, as root.

Two racks, each with a switch, below a third one, the spine; every link is as fast. The server (or
GOAT's root) stands where the spine is, or with `--own-link` on a machine of its own beside it.
Each switch has so many aggregators. In every step each rank is late by a time of its own, drawn at
random, and then all sum an array. GOAT, ATP and Gloo take turns, and the same steps are as late
for each. With `--jobs`, so many jobs share the machines, links and aggregators.
As a program with arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fanin_lab.netlab import SERVER, Netlab, address

PORT = {"atp": 4800, "goat": 4900}
"""Of the server; the switches have the next one."""
SYSTEMS = ("goat", "atp", "gloo")


def main() -> int:
    """Measure, and print a line for each system."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="in two racks")
    parser.add_argument("--rate-bps", type=int, default=500_000_000, help="of each link")
    parser.add_argument("--aggregators", type=int, default=64, help="of each switch")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="a rank's array")
    parser.add_argument("--late-ms", type=float, default=50.0, help="at most")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system")
    parser.add_argument("--steps", type=int, default=12, help="of a turn; the first warms up")
    parser.add_argument("--jobs", type=int, default=1, help="a rank of each on every machine")
    parser.add_argument("--own-link", action="store_true", help="the server has a link of its own")
    args = parser.parse_args()
    links: dict[str, Any] = {"racks": 2, "rate_bps": args.rate_bps, "spares": int(args.own_link)}
    with (
        Netlab(args.workers, **links, name=f"g{os.getpid()}") as lab,
        contextlib.ExitStack() as stack,
        tempfile.TemporaryDirectory() as folder,
    ):
        root = "s0" if args.own_link else SERVER
        for protocol, port in PORT.items():
            spoken = ["--protocol", protocol]
            what = ["switch", *spoken]
            above = stack.enter_context(_served(lab, root, what, port))
            few = ["--shards", "1", "--aggregators", str(args.aggregators)]
            below = ["switch", *spoken, *few, "--upstream"]
            # These interfaces do not tell it. There is no link to a server on the same machine.
            rate = ["--rate", f"{args.rate_bps}bit"]
            spine = [*below, above, *(rate if args.own_link else [])]
            above = stack.enter_context(_served(lab, SERVER, spine, port + 1))
            for rack in ("sw0", "sw1"):
                stack.enter_context(_served(lab, rack, [*below, above, *rate], port + 1))
        told = _played(lab, Path(folder) / "store", args)
    for system in SYSTEMS:
        times = told[system]
        print(
            f"{system}: median {1000 * statistics.median(times):.1f} ms a step, "
            f"from {1000 * min(times):.1f} to {1000 * max(times):.1f}"
        )
    for other in SYSTEMS[1:]:
        ratio = statistics.median(told["goat"]) / statistics.median(told[other])
        print(f"goat takes {ratio:.2f} of {other}'s time")
    return 0


@contextlib.contextmanager
def _served(lab: Netlab, member: str, what: list[str], port: int) -> Iterator[str]:
    listen = f"{address(member)}:{port}"
    command = [sys.executable, "-m", "fanin", *what, "--listen", listen, "--json", "--log", "error"]
    process = lab.popen(member, command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield listen
    finally:
        process.terminate()
        process.communicate()


def _played(lab: Netlab, store: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return how long the steps of each system took: a median a turn, of a job's slowest rank."""
    ranks = []
    for rank in range(args.jobs * args.workers):
        worker = rank % args.workers
        switch = address(lab.switch_of(worker))
        numbers = [rank, args.workers, args.jobs, args.rounds, args.steps, args.bytes, args.late_ms]
        command = [sys.executable, __file__, "rank", switch, str(store), *map(str, numbers)]
        told = {**os.environ, "FANIN_RATE": f"{args.rate_bps}bit"}
        ranks.append(lab.popen(f"w{worker}", command, stdout=subprocess.PIPE, text=True, env=told))
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    jobs = [found[at : at + args.workers] for at in range(0, len(found), args.workers)]
    return {
        system: [
            max(turn) for job in jobs for turn in zip(*(of[system] for of in job), strict=True)
        ]
        for system in SYSTEMS
    }


def rank_of(switch: str, store: str, numbers: Sequence[int], late: float) -> None:
    """Sum as one rank, and print how long the steps of each turn took."""
    rank, workers, jobs, rounds, steps, size = numbers
    import fanin.torch
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    alike: dict[str, Any] = {"timeout": timedelta(seconds=60)}
    world = workers * jobs
    method = f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, **alike)
    groups: dict[str, Any] = {}
    for job in range(jobs):
        members = list(range(job * workers, (job + 1) * workers))
        created = {"gloo": dist.new_group(members, backend="gloo", **alike)}
        for protocol, port in PORT.items():
            said: Any = {"protocol": protocol, "switch": f"{switch}:{port + 1}"}
            options = fanin.torch.Options(**said)
            created[protocol] = dist.new_group(
                members, backend="fanin", pg_options=options, **alike
            )
        if rank in members:
            groups = created
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(rounds):
        for system in SYSTEMS:
            # As late with each system.
            dice = random.Random(f"{rank} {turn}")
            array = torch.empty(size // 4)
            dist.barrier()
            took = []
            for _ in range(steps):
                begin = time.monotonic()
                time.sleep(dice.random() * late / 1000)
                array.fill_(1.0)
                dist.all_reduce(array, group=groups[system])
                took.append(time.monotonic() - begin)
                assert array[0] == array[-1] == workers
            times[system].append(statistics.median(took[1:]))
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        *counts, late_ms = sys.argv[4:]
        rank_of(sys.argv[2], sys.argv[3], [int(number) for number in counts], float(late_ms))
    else:
        sys.exit(main())
