"""Late workers in two racks, GOAT beside ATP and Gloo: `python benches/goat.py`, as root.

Each worker sleeps for up to so long, at random and the same for all three, before it gives its
array; a step is over when all have the sum, and the next one begins then. The switches of both
racks and of the spine have as many aggregators each, and the links one rate. As a program with
arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fanin.netlab import INTERFACE, SERVER, Netlab, address

SYSTEMS = ("goat", "atp", "gloo")
PORT = 4800
PARAMETERS = "s0"
"""The machine of the server: behind the spine, with a link such as a worker's."""


def main() -> int:
    """Measure, and print a line for each system."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate-bps", type=int, default=500_000_000, help="of each link")
    parser.add_argument("--aggregators", type=int, default=64, help="of each of three switches")
    parser.add_argument("--late-ms", type=float, default=50.0, help="at most")
    parser.add_argument("--bytes", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each")
    parser.add_argument("--steps", type=int, default=12, help="of each job; the first two warm up")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    args = parser.parse_args()
    for size in args.bytes:
        of_each: dict[str, list[float]] = {system: [] for system in args.systems}
        for number in range(args.rounds):
            for system in args.systems:
                of_each[system] += played(system, size, number, args)
        middle = {system: statistics.median(times) for system, times in of_each.items()}
        for system, times in of_each.items():
            ratio = middle[system] / middle[args.systems[0]]
            print(
                f"{size / 1e6:g} MB, {system:4}: median {1e3 * middle[system]:.1f} ms, "
                f"quartiles {_quartiles(times)} ms; {args.systems[0]} takes {1 / ratio:.2f} of it",
                flush=True,
            )
    return 0


def _quartiles(times: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{1e3 * low:.1f} to {1e3 * high:.1f}"


def played(system: str, size: int, number: int, args: argparse.Namespace) -> list[float]:
    """Return how long each step of a job took."""
    with contextlib.ExitStack() as stack:
        lab = Netlab(args.workers, spares=1, racks=2, rate_bps=args.rate_bps, name="late")
        stack.enter_context(lab)
        meeting = stack.enter_context(tempfile.TemporaryDirectory()) + "/ranks"
        if system != "gloo":
            stack.enter_context(summing(lab, system, args.aggregators))
        ranks = []
        for rank in range(args.workers):
            switch = f"{address(lab.switch_of(rank))}:{PORT}"
            said = [system, switch, meeting, rank, args.workers, size, args.steps, args.late_ms]
            command = [sys.executable, __file__, "rank", *map(str, said), str(number)]
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "FANIN_RATE": f"{args.rate_bps}bit",
            }
            ranks.append(
                lab.popen(f"w{rank}", command, stdout=subprocess.PIPE, text=True, env=environment)
            )
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank of {system} failed")
        ends: list[list[float]] = [json.loads(text.splitlines()[-1]) for text in said]
    over = [max(each) for each in zip(*ends, strict=True)]
    return [after - before for before, after in itertools.pairwise(over[1:])]


@contextlib.contextmanager
def summing(lab: Netlab, protocol: str, aggregators: int) -> Iterator[None]:
    """Have a switch in each rack and one above them, and behind that a server."""
    memory = ["--protocol", protocol, "--aggregators", str(aggregators)]
    places = [(PARAMETERS, None), (SERVER, PARAMETERS), ("sw0", SERVER), ("sw1", SERVER)]
    started: list[subprocess.Popen[str]] = []
    try:
        for member, above in places:
            command = [sys.executable, "-m", "fanin", "server" if above is None else "switch"]
            command += ["--listen", f"{address(member)}:{PORT}", "--json", "--log", "warn"]
            command += [] if above is None else ["--upstream", f"{address(above)}:{PORT}", *memory]
            started.append(lab.popen(member, command, stdout=subprocess.PIPE, text=True))
            out = started[-1].stdout
            assert out is not None
            out.readline()  # it listens
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            process.communicate()


def be_rank(
    system: str,
    switch: str,
    meeting: str,
    rank: int,
    workers: int,
    size: int,
    steps: int,
    late_ms: float,
    number: int,
) -> None:
    """Sum as one rank, and print when each step was over."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    drawn = random.Random(1000 * number + rank)
    own: dict[str, Any] = {}
    if system != "gloo":
        import fanin.torch

        said: Any = {"protocol": system}
        own["pg_options"] = fanin.torch.Options(switch=switch, **said)
    backend = "gloo" if system == "gloo" else "fanin"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=workers, **own
    )
    tensor = torch.ones(size // 4)
    ends = []
    for _ in range(steps):
        tensor.fill_(1.0)
        time.sleep(drawn.uniform(0, late_ms) / 1e3)
        dist.all_reduce(tensor)
        ends.append(time.monotonic())
        assert bool((tensor == workers).all())
        dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(ends))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        of, at, meet = sys.argv[2:5]
        rank, workers, size, steps = map(int, sys.argv[5:9])
        be_rank(of, at, meet, rank, workers, size, steps, float(sys.argv[9]), int(sys.argv[10]))
    else:
        sys.exit(main())
