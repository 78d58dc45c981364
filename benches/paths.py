"""Ranks behind routers with several equal paths: `python benches/paths.py`, as root.

Between two routers are so many links, each as fast as its part of what a rank's link carries; a
router takes one by a packet's addresses and ports (ECMP). Some ranks are behind one router, the
switch and as many others behind the other one. A job with a loss bound sums again and again, with
one source port a rank and with several, by turns; each job has new ports. With ``--dead`` the last
link carries nothing after a job's first sum, and the routers go on using it. As a program with
arguments, this file is one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import fanin
import numpy as np
from fanin_lab.netlab.kernel import batch, inside, namespace_of, require_root, require_tools, run

LISTEN = "10.78.2.1:4800"
"""Of the switch, beside the far router."""
BOUND = 0.02
_NOBODY = "02:00:00:00:00:01"
_OWN_TABLE = 10


class Routed:
    """Ranks and a switch in namespaces of their own, as long as its ``with`` block lives.

    ``r0``, ``r1``, .. are the ranks, ``near`` of them behind the router ``near``, the others and
    the ``switch`` behind ``far``. ``rates`` are bits a second of a rank's link and of each of the
    ``links`` between the routers; None leaves them unshaped. TCP takes the first of these links, so
    that the others may die and the ranks still speak to the switch.
    """

    def __init__(
        self,
        near: int,
        far: int = 0,
        links: int = 2,
        rates: tuple[int, int] | None = None,
        name: str = "",
    ) -> None:
        self.ranks = [f"r{i}" for i in range(near + far)]
        self.links = links
        self._near = near
        self._rates = rates
        self._name = f"{name}routed"

    def namespace(self, member: str) -> str:
        """Return the name under which `ip netns` knows it."""
        return namespace_of(self._name, member)

    def popen(self, member: str, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command in a member; the keywords are `subprocess.Popen`'s."""
        return subprocess.Popen(inside(self.namespace(member), command), **keywords)

    def __enter__(self) -> Routed:
        require_root()
        require_tools("ip", "tc")
        self._remove()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def carried(self) -> list[tuple[int, int]]:
        """Return of each link between the routers the bytes towards the switch, and back."""
        shown = run(["ip", "-n", self.namespace("near"), "-s", "-json", "link", "show"])
        of = {link["ifname"]: link["stats64"] for link in json.loads(shown)}
        stats = [of[f"link{i}"] for i in range(self.links)]
        return [(each["tx"]["bytes"], each["rx"]["bytes"]) for each in stats]

    def set_dead(self, link: int, dead: bool) -> None:
        """Have a link lose all that is sent over it, either way, or carry it again.

        No router notices: its packets are for a machine that is not there.
        """
        for router, other in (("near", "far"), ("far", "near")):
            neighbour = f"{_between(link, other)} dev link{link}"
            namespace = ["ip", "-n", self.namespace(router), "neigh"]
            if dead:
                run([*namespace, "replace", *neighbour.split(), "lladdr", _NOBODY])
            else:
                run([*namespace, "del", *neighbour.split()])

    def _build(self) -> None:
        hosts = {"near": self.ranks[: self._near], "far": ["switch", *self.ranks[self._near :]]}
        create = [
            f"netns add {self.namespace(member)}" for member in (*hosts, "switch", *self.ranks)
        ]
        for router, members in hosts.items():
            create += [self._link(member, "eth0", router, member) for member in members]
        create += [self._link("near", f"link{i}", "far", f"link{i}") for i in range(self.links)]
        batch(["ip"], create)
        of_rank, between = self._rates or (None, None)
        for number, (router, members) in enumerate(hosts.items(), 1):
            other = "far" if router == "near" else "near"
            there = f"10.78.{3 - number}.0/24"
            commands = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
            commands.append(f"addr add 10.78.{number}.254/24 dev br0")
            for i in range(self.links):
                commands.append(f"addr add {_between(i, router)}/24 dev link{i}")
                commands.append(f"link set link{i} up")
            commands += [f"link set {member} master br0 up" for member in members]
            ways = " ".join(f"nexthop via {_between(i, other)}" for i in range(self.links))
            commands.append(f"route add {there} {ways}")
            commands.append(f"route add {there} via {_between(0, other)} table {_OWN_TABLE}")
            commands.append(f"rule add to {there} ipproto tcp table {_OWN_TABLE}")
            settings = ["ip_forward=1", "fib_multipath_hash_policy=1", "conf.all.rp_filter=0"]
            settings.append("conf.default.rp_filter=0")
            run(
                inside(
                    self.namespace(router),
                    ["sysctl", "-q", "-w", *(f"net.ipv4.{s}" for s in settings)],
                )
            )
            batch(["ip", "-n", self.namespace(router)], commands)
            for host, member in enumerate(members, 1):
                own = [
                    f"addr add 10.78.{number}.{host}/24 dev eth0",
                    "link set lo up",
                    "link set eth0 up",
                ]
                own.append(f"route add default via 10.78.{number}.254")
                batch(["ip", "-n", self.namespace(member)], own)
                if member != "switch":
                    self._shape(member, ["eth0"], of_rank)
                    self._shape(router, [member], of_rank)
            self._shape(router, [f"link{i}" for i in range(self.links)], between)

    def _link(self, below: str, end: str, above: str, port: str) -> str:
        below, above = self.namespace(below), self.namespace(above)
        return f"link add {end} netns {below} type veth peer name {port} netns {above}"

    def _shape(self, member: str, interfaces: Sequence[str], rate_bps: int | None) -> None:
        if rate_bps is None:
            return
        tbf = f"tbf rate {rate_bps}bit burst 30000 latency 50ms"
        shape = [f"qdisc add dev {interface} root {tbf}" for interface in interfaces]
        batch(["tc", "-n", self.namespace(member)], shape)

    def _remove(self) -> None:
        prefix = self.namespace("")
        with contextlib.suppress(FileNotFoundError):
            for entry in Path("/run/netns").iterdir():
                if entry.name.startswith(prefix):
                    run(["ip", "netns", "del", entry.name])


def _between(link: int, router: str) -> str:
    """Return the address of a router at one of the links."""
    return f"10.78.{100 + link}.{1 if router == 'near' else 2}"


def main() -> int:
    """Measure, and print a line for each number of paths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--near", type=int, default=1, help="ranks behind the links")
    parser.add_argument("--far", type=int, default=1, help="ranks beside the switch")
    parser.add_argument("--links", type=int, default=2, help="between the routers")
    parser.add_argument("--rate-bps", type=int, default=100_000_000, help="of a rank's link")
    parser.add_argument("--paths", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--bytes", type=int, default=2_000_000, help="a rank's array")
    parser.add_argument("--jobs", type=int, default=9, help="of each number of paths")
    parser.add_argument("--sums", type=int, default=8, help="of each job; the first warms up")
    parser.add_argument("--dead", action="store_true", help="the last link dies after that")
    args = parser.parse_args()
    rates = (args.rate_bps, args.near * args.rate_bps // args.links)
    times: dict[int, list[list[float]]] = {paths: [] for paths in args.paths}
    lost: dict[int, list[float]] = {paths: [] for paths in args.paths}
    with Routed(args.near, args.far, args.links, rates, name=f"b{os.getpid()}") as lab:
        # Each shard would have ports of its own.
        command = [sys.executable, "-m", "fanin", "switch", "--listen", LISTEN, "--shards", "1"]
        command += ["--json", "--log", "warn"]
        switch = lab.popen("switch", command, stdout=subprocess.PIPE, text=True)
        assert switch.stdout is not None
        switch.stdout.readline()
        try:
            for job in range(args.jobs):
                for paths in args.paths:
                    found = _played(lab, f"job{job}", paths, args)
                    slowest = [
                        max(each) for each in zip(*(of["times"] for of in found), strict=True)
                    ]
                    times[paths].append(slowest)
                    lost[paths].append(found[0]["lost"])
        finally:
            switch.terminate()
            switch.communicate()
    for paths in args.paths:
        every = [each for job in times[paths] for each in job]
        in_order = [statistics.median(sums) for sums in zip(*times[paths], strict=True)]
        print(
            f"paths {paths:2}: median {1000 * statistics.median(every):.1f} ms, "
            f"most {1000 * max(every):.1f} ms, {100 * statistics.mean(lost[paths]):.2f} % lost; "
            f"in their order: {[round(1000 * each) for each in in_order]} ms"
        )
    return 0


def _played(lab: Routed, job: str, paths: int, args: argparse.Namespace) -> list[Any]:
    """Return what each rank says of a job."""
    common = [
        job,
        str(len(lab.ranks)),
        str(paths),
        str(args.rate_bps),
        str(args.bytes),
        str(args.sums),
    ]
    ranks = [
        lab.popen(
            member,
            [sys.executable, __file__, "rank", str(rank), *common],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, member in enumerate(lab.ranks)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    if args.dead:
        lab.set_dead(lab.links - 1, True)
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go on\n")
        rank.stdin.flush()
    said = [rank.communicate()[0] for rank in ranks]
    if args.dead:
        lab.set_dead(lab.links - 1, False)
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def rank_of(
    rank: int, job: str, world_size: int, paths: int, rate: int, size: int, sums: int
) -> None:
    """Sum as one rank, and print how long each time took."""
    said: dict[str, Any] = {"loss_bound": BOUND, "paths": paths, "rate": rate, "plan": "switch"}
    array = np.ones(size // 4, dtype=np.float32)
    times = []
    with fanin.connect(LISTEN, job=job, rank=rank, world_size=world_size, **said) as group:
        group.all_reduce(array)
        print("warm", flush=True)
        sys.stdin.readline()
        for _ in range(1, sums):
            begin = time.monotonic()
            group.all_reduce(array)
            times.append(time.monotonic() - begin)
        told = group.statistics()
    print(json.dumps({"times": times, "lost": told["lost"] / max(1, told["contributions"])}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        numbers = [int(number) for number in sys.argv[4:]]
        rank_of(int(sys.argv[2]), sys.argv[3], *numbers)
    else:
        sys.exit(main())
