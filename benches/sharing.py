"""Two jobs on a switch of ATP with too few aggregators for both (ATP §5.4.1), on real sockets.

Every rank is a process in a namespace of its own, and so are the switch and the server: what the
switch does not sum crosses the server's link, which is as fast as a worker's. Or each job has a
static part of the aggregators: a process of the switch with half of them. Or there are several
servers (§A.5), one on each worker's machine, and the switch runs a process for each of them.

    sudo python benches/sharing.py --calls 60 --ecn-bytes 30000

prints by how much one job is faster than the other. With `rank` as its first argument,
this file is one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fanin
import numpy as np
from fanin.errors import FaninError
from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab, address

JOBS = ("A", "B")
WORKERS = 2
"""Of each job."""
SHARES = (100, 67, 33, 0)
"""Aggregators, in per cent of what the windows of both jobs hold."""
PORT = 4800
SERVER = len(JOBS) * WORKERS
"""The host of the laboratory that is no worker's."""
ALONE = (SERVER,)
"""One server for both jobs, with a link of its own."""
SPREAD = tuple(range(SERVER))
"""A server on each worker's machine, behind the worker's link."""
# From the telling to the beginning, which all ranks must have heard of by then.
_NOTICE_S = 0.02
_PERIOD = 97


class SharingError(FaninError):
    """A process of the experiment failed, or a sum is wrong."""


@dataclass(frozen=True)
class Load:
    """What a job does in a round."""

    rate_bps: int
    elements: int
    """Of each tensor, int32."""
    calls: int
    ecn_bytes: int | None = None
    """The bytes at a switch's port from which it marks; None: it does not."""
    servers: tuple[int, ...] = ALONE
    """The hosts of both jobs' servers, which share the tensors of each."""
    parts: bool = False
    """Whether each job has a part of the aggregators for itself."""

    @property
    def switches(self) -> dict[str, list[str]]:
        """The processes of the switch that each job asks: one for each of its servers."""
        count = len(self.servers)
        firsts = {job: count * number if self.parts else 0 for number, job in enumerate(JOBS)}
        return {
            job: [f"{SWITCH_ADDRESS}:{PORT + first + number}" for number in range(count)]
            for job, first in firsts.items()
        }


@dataclass(frozen=True)
class Figures:
    """One job in one round."""

    bytes_per_s: float
    """Of a rank's tensors, while all jobs of the round were at it."""
    at_switch: float
    """Packets that the switch added, by fragments: as many as workers where it sums everything."""
    at_server: float
    """The same at the server: one, or as many as workers where it sums everything."""
    collisions: int


@dataclass(frozen=True)
class Round:
    """The jobs that ran, with one number of aggregators."""

    aggregators: int
    jobs: dict[str, Figures]


@dataclass(frozen=True)
class Counters:
    """Of a job: what `fanin status` says."""

    window: int
    elements: int
    """Of a fragment."""
    at_switch: int
    at_server: int
    collisions: int

    def plus(self, other: Counters) -> Counters:
        """Return what both servers counted."""
        return Counters(
            window=self.window + other.window,
            elements=self.elements,
            at_switch=self.at_switch + other.at_switch,
            at_server=self.at_server + other.at_server,
            collisions=self.collisions + other.collisions,
        )


def measure(load: Load, aggregators: int) -> list[Round]:
    """Run job A alone, job B alone, and both, on a switch with so many aggregators.

    Raises `SharingError`, and `fanin_lab.netlab.NetlabError`.
    """
    with _jobs(load, aggregators) as (lab, ranks):
        everybody = [[job] for job in JOBS] + [list(JOBS)]
        return [_round(lab, ranks, load, aggregators, jobs) for jobs in everybody]


def windows(load: Load) -> int:
    """Return how many fragments both jobs may have on the way: what they need of aggregators.

    Raises as `measure` does.
    """
    with _jobs(load, 0) as (lab, _):
        return sum(counters.window for counters in _counters(lab, load).values())


def throughput(ends: Sequence[Sequence[float]], began: float, until: float) -> float:
    """Return how many calls a second a job completed up to a moment: parts of a call count.

    ``ends`` are the times at which each rank had its sums; a call ends with the last rank's.
    """
    calls = 0.0
    begin = began
    for end in map(max, zip(*ends, strict=True)):
        calls += min(1.0, (until - begin) / (end - begin))
        if end >= until:
            break
        begin = end
    return calls / (until - began)


def _round(
    lab: Netlab, ranks: dict[str, list[Rank]], load: Load, aggregators: int, jobs: list[str]
) -> Round:
    before = _counters(lab, load)
    began = time.monotonic() + _NOTICE_S
    for job in jobs:
        for rank in ranks[job]:
            rank.tell({"begin": began, "elements": load.elements, "calls": load.calls})
    ends = {job: [rank.hear()["ends"] for rank in ranks[job]] for job in jobs}
    after = _counters(lab, load)
    until = min(max(of_rank[-1] for of_rank in of_job) for of_job in ends.values())
    figures = {}
    for job in jobs:
        fragments = load.calls * -(-load.elements // after[job].elements)
        calls_per_s = throughput(ends[job], began, until)
        figures[job] = Figures(
            bytes_per_s=calls_per_s * 4 * load.elements,
            at_switch=(after[job].at_switch - before[job].at_switch) / fragments,
            at_server=(after[job].at_server - before[job].at_server) / fragments,
            collisions=after[job].collisions - before[job].collisions,
        )
    return Round(aggregators, figures)


def _counters(lab: Netlab, load: Load) -> dict[str, Counters]:
    """Return what was counted of each job, at all servers and at their switches."""
    counted = {at: _counters_at(lab, at) for at in {*itertools.chain(*load.switches.values())}}
    return {
        job: functools.reduce(Counters.plus, [counted[at][job] for at in of_job])
        for job, of_job in load.switches.items()
    }


def _counters_at(lab: Netlab, at: str) -> dict[str, Counters]:
    command = [sys.executable, "-m", "fanin", "status", "--json", "--switch", at]
    asked = lab.popen("w0", command, stdout=subprocess.PIPE, text=True)
    shown, _ = asked.communicate()
    if asked.returncode != 0:
        raise SharingError("fanin status failed")
    status = json.loads(shown)
    (switch,) = status["switches"]
    there = {job["id"]: job for job in switch["jobs"]}
    return {
        job["job"]: Counters(
            window=job["in_flight"],
            elements=job["elements"],
            at_switch=there[job["id"]]["aggregations"],
            at_server=job["aggregations"],
            collisions=there[job["id"]]["collisions"],
        )
        for job in status["jobs"]
        if job["id"] in there
    }


class Rank:
    """A rank's process, and what is said to it: a line of JSON each."""

    def __init__(self, lab: Netlab, switches: str, job: str, rank: int) -> None:
        self._name = f"rank {rank} of job {job}"
        member = f"w{JOBS.index(job) * WORKERS + rank}"
        command = [sys.executable, __file__, "rank", switches, job, str(rank)]
        self._process = lab.popen(
            member, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, what: dict[str, Any]) -> None:
        """Say it."""
        with contextlib.suppress(BrokenPipeError):  # `hear` says so
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """Wait for its answer."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SharingError(f"{self._name} ended with status {self._process.wait()}")
        said = json.loads(line)
        if said.get("wrong"):
            raise SharingError(f"{self._name}: {said['wrong']} elements are not the exact sum")
        return said

    def close(self) -> None:
        """End it; it hears that nobody speaks to it any more."""
        self._process.communicate()


@contextlib.contextmanager
def _jobs(load: Load, aggregators: int) -> Iterator[tuple[Netlab, dict[str, list[Rank]]]]:
    with contextlib.ExitStack() as stack:
        name = f"share{os.getpid()}"
        lab = Netlab(SERVER + 1, rate_bps=load.rate_bps, ecn_bytes=load.ecn_bytes, name=name)
        stack.enter_context(lab)
        servers = [address(f"w{host}") + f":{PORT}" for host in load.servers]
        for host, server in zip(load.servers, servers, strict=True):
            _serve(lab, stack, f"w{host}", "switch", "--protocol", "atp", "--listen", server)
        # Of processes that both jobs ask there is one.
        upstreams = dict(
            each for of_job in load.switches.values() for each in zip(of_job, servers, strict=True)
        )
        for switch, server in upstreams.items():
            options = ["--protocol", "atp", "--upstream", server, "--shards", "1"]
            options += ["--aggregators", str(aggregators // len(upstreams))]
            _serve(lab, stack, SWITCH, "switch", "--listen", switch, *options)
        ranks: dict[str, list[Rank]] = {job: [] for job in JOBS}
        for job, of_job in ranks.items():
            for number in range(WORKERS):
                of_job.append(Rank(lab, ",".join(load.switches[job]), job, number))
                stack.callback(of_job[-1].close)
        for of_job in ranks.values():
            for rank in of_job:
                rank.hear()
        yield lab, ranks


def _serve(lab: Netlab, stack: contextlib.ExitStack, member: str, *command: str) -> None:
    line = [sys.executable, "-m", "fanin", *command, "--json", "--log", "error"]
    process = lab.popen(member, line, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.terminate)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise SharingError(f"fanin {command[0]} ended with status {process.wait()}")


def _be_rank(switch: str, job: str, rank: int) -> None:
    with fanin.connect(
        switch, job=job, rank=rank, world_size=WORKERS, protocol="atp", timeout=60
    ) as group:
        print("{}", flush=True)
        for line in sys.stdin:
            told = json.loads(line)
            calls = range(told["calls"])
            ramp = np.arange(told["elements"], dtype=np.int32) % _PERIOD
            # All ranks' inputs are multiples of one pattern, another one for each call.
            arrays = [(ramp + call) * (rank + 1) for call in calls]
            # The moment at which all ranks of both jobs begin.
            time.sleep(max(0.0, told["begin"] - time.monotonic()))
            ends = []
            for array in arrays:
                group.all_reduce(array)
                ends.append(time.monotonic())
            times = WORKERS * (WORKERS + 1) // 2
            wrong = sum(int((arrays[call] != (ramp + call) * times).sum()) for call in calls)
            print(json.dumps({"ends": ends, "wrong": wrong}), flush=True)


def main() -> int:
    """Measure rounds of both jobs, and print a line for each share of the aggregators."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=12, help="all-reduces of 2 MB in a round")
    parser.add_argument("--ecn-bytes", type=int, help="a port's queue from which it marks")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shares", type=int, nargs="+", default=[100, 0], help="in per cent")
    args = parser.parse_args()
    load = Load(250_000_000, elements=500_000, calls=args.calls, ecn_bytes=args.ecn_bytes)
    whole = windows(load)
    for share in args.shares:
        shown = []
        for _ in range(args.rounds):
            *_, both = measure(load, whole * share // 100)
            rates = sorted(figures.bytes_per_s for figures in both.jobs.values())
            shown.append(f"{rates[1] / rates[0]:.2f} ({sum(rates) / 1e6:.1f} MB/s)")
        print(f"{share} %: {', '.join(shown)}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] != ["rank"]:
        sys.exit(main())
    _be_rank(sys.argv[2], sys.argv[3], int(sys.argv[4]))
