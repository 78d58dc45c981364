"""The stage of a benchmark: a switch and ranks as processes, in a laboratory or on loopback."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fanin import _settings
from fanin._settings import Settings

from fanin_lab import netlab
from fanin_lab.bench import BenchError, openmpi
from fanin_lab.bench.bulk import Bulk, bulk
from fanin_lab.bench.crew import Crew
from fanin_lab.bench.message import ALONE, OPENMPI, OVER_TCP, Place, Round, Timing, Verdict
from fanin_lab.bench.plan import Machine, Plan, planned
from fanin_lab.bench.processes import end_with_parent, ended
from fanin_lab.netlab import MTU_DEFAULT, SERVER, SWITCH, Netlab, address, interface
from fanin_lab.netlab.queues import FIFO
from fanin_lab.units import shown_links

SWITCH_PORT = 4800
SERVER_PORT = 4801
# What the kernel says of a veth pair that nobody shaped.
UNSHAPED_BPS = 10**10
# From the moment that all ranks are ready to the one at which they begin: they must have heard it.
_NOTICE_S = 0.01
_NOTICE_A_RANK_S = 0.001
# Beyond the collectives' own timeout, for filling, checking, and a busy machine.
_GRACE_S = 60.0


@dataclass(frozen=True)
class Links:
    """The links of the laboratory."""

    rate_bps: int | None = None
    loss: float | None = None
    mtu: int = MTU_DEFAULT
    racks: int = 1
    spares: int = 0
    """Machines more, which only sum, each with one link."""
    spare_rate_bps: int | None = None
    """None: as the others'."""
    rates: Mapping[str, int] = field(default_factory=dict)
    """The rates of machines whose link has another one, in bits a second."""
    queue_bytes: int | None = None
    """The bytes that may wait at each end of a link; None: 50 ms of its rate."""
    background_bps: int | None = None
    """The rate at which others send to `w0` all the time, through the switch's end of its link."""
    burst_bytes: int | None = None
    """The bytes that a link carries as fast as the machine after a pause; None: by its rate."""
    udp_offload: bool = True
    """Whether the interfaces cut UDP's trains."""
    bulk: bool = False
    """Whether TCP sends all it can from `w0` to `w1` and back."""
    untold: bool = False
    """Whether nobody tells fanin the rates."""
    nics: int = 1
    """The links of each worker."""
    ecn_bytes: int | None = None
    """The bytes at a switch's port from which it marks; None: it does not."""
    queues: str = FIFO
    """Those of a switch's port (`fanin_lab.netlab.queues`)."""
    loss_burst: int | None = None
    """The packets that a link loses in a row; None: each is lost by itself."""

    def shown(self) -> str:
        """Return them in words."""
        return shown_links(*astuple(self))


@dataclass(frozen=True)
class Sample:
    """A round, over all ranks."""

    time_s: float
    """From the first rank's beginning to the last one's completion, for one call."""
    rank_times_s: tuple[float, ...]
    ranks_cpu_s: float
    switch_cpu_s: float
    retransmissions: int
    error_max: float
    digest: str
    """The sums' digest, equal on all ranks. A round's inputs depend on its number alone."""
    lost_share: float = 0.0
    """Which part of the contributions is not in the sums, by fanin's own account."""
    bulk_bps: float | None = None
    """The bits a second that TCP brought meanwhile, in its slower direction; None: it sent none."""


class Stage:
    """Ranks and switch, ready for rounds."""

    def __init__(
        self,
        torch: Crew,
        switch_pids: Sequence[int],
        counters: Sequence[str | None],
        machines: Sequence[Machine] | None,
        mpi: Crew | None = None,
        flows: Bulk | None = None,
    ) -> None:
        self._torch = torch
        self._mpi = mpi
        self._switch_pids = switch_pids
        self._switch_clocks = [_cpu_clock(pid) for pid in switch_pids]
        self._counters = counters
        self._machines = machines
        self._flows = flows
        self._number = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._counters)

    def round(self, wanted: Round) -> Sample:
        """Do one round on all ranks, and check that all have the same bits.

        Raises `BenchError`.
        """
        self._number += 1
        crew = self._mpi if wanted.backend == OPENMPI else self._torch
        assert crew is not None
        flows = None if wanted.backend == ALONE else self._flows
        crew.tell(
            (replace(wanted, backend="fanin") if wanted.backend == ALONE else wanted, self._number)
        )
        crew.hear(str)
        if flows:
            flows.start()
        switch_cpu = self._switch_cpu_s()
        begin = time.monotonic() + _NOTICE_S + _NOTICE_A_RANK_S * self.world_size
        crew.tell(begin)
        if flows:
            # TCP counts from the moment at which the ranks begin.
            time.sleep(max(0.0, begin - time.monotonic()))
            flows.mark()
        timings = crew.hear(Timing)
        bulk_bps = flows.stop() if flows else None
        switch_cpu = self._switch_cpu_s() - switch_cpu
        verdicts = crew.hear(Verdict)
        if len({verdict.digest for verdict in verdicts}) > 1:
            raise BenchError(f"the ranks have different sums: {wanted}")
        began = min(timing.began for timing in timings)
        resent = [timing.retransmissions for timing in timings]
        return Sample(
            time_s=(max(timing.ended for timing in timings) - began) / wanted.calls,
            rank_times_s=tuple((t.ended - began) / wanted.calls for t in timings),
            ranks_cpu_s=sum(timing.cpu_s for timing in timings),
            switch_cpu_s=switch_cpu,
            retransmissions=self._tcp_s(resent) if wanted.backend in OVER_TCP else sum(resent),
            error_max=max(verdict.error_max for verdict in verdicts),
            digest=verdicts[0].digest,
            lost_share=timings[0].lost / max(1, timings[0].contributions),
            bulk_bps=bulk_bps,
        )

    def bulk_alone_bps(self) -> float | None:
        """Return what TCP brings while nobody sums, in bits a second; None: there is no such flow.

        Raises `BenchError`.
        """
        return None if self._flows is None else self._flows.alone_bps()

    def plan(self, size_bytes: int, asked: _settings.Plan) -> Plan | None:
        """Return what the planner says; None where it does not know the links."""
        return None if self._machines is None else planned(self._machines, size_bytes, asked)

    def switch_peak_bytes(self) -> int | None:
        """Return the most memory that a switch or server has held, of those that have the most."""
        return max(map(_peak_bytes, self._switch_pids), default=None)

    def _tcp_s(self, resent: Sequence[int]) -> int:
        """Ranks of one network all read the same counter of TCP's."""
        of_network: dict[str | None, int] = {}
        for network, count in zip(self._counters, resent, strict=True):
            of_network[network] = max(of_network.get(network, 0), count)
        return sum(of_network.values())

    def _switch_cpu_s(self) -> float:
        return sum(map(time.clock_gettime, self._switch_clocks))


@contextlib.contextmanager
def stage(
    workers: int,
    links: Links | None,
    backends: tuple[str, ...],
    timeout_s: float,
    settings: Settings,
    ranks_per_machine: int,
    with_switch: bool,
) -> Iterator[Stage]:
    """Set the stage and clear it afterwards; without links, on loopback.

    With ``with_switch`` there is one at `sw`, else spare machines and the ranks' own sum.

    Raises `BenchError`, and `fanin_lab.netlab.NetlabError`.
    """
    told = links is None or not links.untold
    if (
        with_switch
        and settings.protocol == "switchml"
        and (links is None or links.rate_bps is None or links.untold)
    ):
        # No rate tells the plan that its link is a multiple of the others'.
        settings = replace(settings, plan="switch")
    with contextlib.ExitStack() as stack:
        lab: Netlab | None = None
        if links is not None:
            _sweep()
            lab = stack.enter_context(laboratory(workers // ranks_per_machine, links))
        services = stack.enter_context(_services(lab, settings, with_switch, told))
        if lab and links and links.background_bps:
            stack.enter_context(background(lab, links.background_bps))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fanin-bench-")))
        places = []
        for rank in range(workers):
            machine = rank // ranks_per_machine
            places.append(
                Place(
                    rank=rank,
                    world_size=workers,
                    namespace=lab.namespace(f"w{machine}") if lab else None,
                    interface=",".join(map(interface, range(lab.nics))) if lab else "lo",
                    rendezvous=str(directory / "rendezvous"),
                    switch=services.named(lab.switch_of(machine) if lab else SWITCH),
                    rate_bps=_told_bps(lab, f"w{machine}") if lab and told else None,
                    timeout_s=timeout_s,
                    backends=backends,
                    settings=settings,
                )
            )
        ranks, pipes = stack.enter_context(_ranks(places))
        silence_s = timeout_s + _GRACE_S
        torch = Crew(pipes, silence_s, lambda rank: _exit_code(ranks[rank]))
        torch.hear(str)  # all ranks are in all groups
        mpi = None
        if OPENMPI in backends:
            started = openmpi.crew(workers, ranks_per_machine, lab, directory, silence_s)
            mpi = stack.enter_context(started)
        flows = stack.enter_context(bulk(lab, directory)) if lab and links and links.bulk else None
        yield Stage(
            torch,
            services.pids,
            counters=[place.namespace for place in places],
            machines=cluster(lab, settings, with_switch) if lab else None,
            mpi=mpi,
            flows=flows,
        )


def laboratory(machines: int, links: Links) -> Netlab:
    """Return the laboratory with these links, not yet built.

    Raises `fanin_lab.netlab.NetlabError` where there can be none.
    """
    return Netlab(
        machines,
        spares=links.spares,
        rate_bps=links.rate_bps,
        spare_rate_bps=links.spare_rate_bps,
        rates=links.rates,
        queue_bytes=links.queue_bytes,
        queues=links.queues,
        burst_bytes=links.burst_bytes,
        ecn_bytes=links.ecn_bytes,
        udp_offload=links.udp_offload,
        loss=links.loss,
        loss_burst=links.loss_burst,
        mtu=links.mtu,
        racks=links.racks,
        nics=links.nics,
        # Of its own: somebody may be at work in the laboratory of `fanin netlab`.
        name=f"bench{os.getpid()}",
    )


def cluster(lab: Netlab, settings: Settings, with_switch: bool) -> list[Machine] | None:
    """Return what the planner is told; None where it knows too little, or has no choice."""
    rates = {name: bps for name, bps in lab.rates.items() if bps is not None}
    if rates.keys() != lab.rates.keys() or lab.racks > 1 or settings.protocol != "switchml":
        return None
    for worker, bps in [each for of in lab.further.values() for each in of.items()]:
        # The planes are planned one by one, and only the first has spare machines.
        if bps is None or lab.spares:
            return None
        rates[worker] += bps
    machines = [
        Machine(name, bps, trains=name.startswith("w"), sums=True) for name, bps in rates.items()
    ]
    if with_switch:
        machines.append(Machine(SWITCH, _switch_bps(lab), trains=False, sums=True))
    return machines


def _told_bps(lab: Netlab, worker: str) -> int | None:
    """Return the rate that ranks are told of each of their links; None if these differ."""
    rates = {lab.rates[worker], *(of[worker] for of in lab.further.values())}
    return rates.pop() if len(rates) == 1 else None


def _sweep() -> None:
    """Remove the laboratories of benchmarks that were killed before they could."""
    for name in netlab.names():
        match = re.fullmatch(r"bench(\d+)", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            netlab.down(name)


@dataclass(frozen=True)
class _Services:
    """The services beside the ranks' own."""

    pids: Sequence[int]
    addresses: Mapping[str, str]
    """The addresses that the ranks below each rack's switch are told."""

    def named(self, rack: str) -> str | None:
        """Return FANIN_SWITCH of the ranks there; None: there is nothing but their own."""
        return self.addresses.get(rack)


@contextlib.contextmanager
def _services(
    lab: Netlab | None, settings: Settings, with_switch: bool, told: bool
) -> Iterator[_Services]:
    """Start what sums, with its rate if that is told.

    Above several racks stands a switch of SwitchML, or the root of ATP or GOAT.
    """
    machines = lab.workers if lab else 1
    racks = list(dict.fromkeys(map(lab.switch_of, range(machines)))) if lab else [SWITCH]
    top = SERVER if len(racks) > 1 else SWITCH
    with contextlib.ExitStack() as stack:
        pids: list[int] = []

        def serve(member: str, what: str, port: int, *options: str) -> str:
            listen = f"{address(member)}:{port}" if lab else "127.0.0.1:0"
            pid, at = stack.enter_context(_serve(lab, member, what, listen, *options))
            pids.append(pid)
            return at

        def switch(member: str, rate_bps: int | None) -> str:
            rate = ["--rate", f"{rate_bps}bit"] if told and rate_bps is not None else []
            return serve(member, "switch", SWITCH_PORT, *rate)

        addresses: Mapping[str, str] = {}
        if settings.protocol in ("atp", "goat"):
            spoken = ["--protocol", settings.protocol]
            root = serve(top, "switch", SERVER_PORT, *spoken)
            upstream = [*spoken, "--upstream", root]
            addresses = {rack: serve(rack, "switch", SWITCH_PORT, *upstream) for rack in racks}
        elif with_switch:
            root = switch(top, _switch_bps(lab) if lab else None)
            addresses = dict.fromkeys(racks, root)
            if len(racks) > 1:
                upstream = ["--upstream", root]
                addresses = {rack: serve(rack, "switch", SWITCH_PORT, *upstream) for rack in racks}
        elif lab and lab.spares:
            spares = [f"s{i}" for i in range(lab.spares)]
            named = ",".join(switch(spare, lab.rates[spare]) for spare in spares)
            addresses = dict.fromkeys(racks, named)
        yield _Services(pids, addresses)


def _switch_bps(lab: Netlab) -> int:
    """Return what reaches `sw`, which has a link for every worker."""
    rates = [lab.rates[f"w{i}"] for i in range(lab.workers)]
    return sum(UNSHAPED_BPS if bps is None else bps for bps in rates)


@contextlib.contextmanager
def _serve(
    lab: Netlab | None, member: str, what: str, listen: str, *options: str
) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "fanin", what, "--listen", listen, *options]
    command += ["--json", "--log", "error"]
    pipe: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "text": True,
        "preexec_fn": end_with_parent,
    }
    with ended(
        lab.popen(member, command, **pipe) if lab else subprocess.Popen(command, **pipe)
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError(f"the {what} ended with status {process.wait()}: {' '.join(command)}")
        yield process.pid, json.loads(line)["address"]


@contextlib.contextmanager
def background(lab: Netlab, rate_bps: int) -> Iterator[None]:
    """Let others send to ``w0`` at a constant rate, from its switch.

    Raises `BenchError`.
    """
    module = [sys.executable, "-m", "fanin_lab.bench.background"]
    worker = "w0"
    keywords: dict[str, Any] = {"preexec_fn": end_with_parent}
    holds = [*module, "sink", address(worker)]
    with ended(lab.popen(worker, holds, stdout=subprocess.PIPE, **keywords)) as sink:
        assert sink.stdout is not None
        if not sink.stdout.readline():
            raise BenchError(f"background traffic found no port at {worker}")
        sends = [*module, "send", address(worker), str(rate_bps), str(lab.mtu)]
        with ended(lab.popen(lab.switch_of(0), sends, **keywords)):
            yield


@contextlib.contextmanager
def _ranks(places: list[Place]) -> Iterator[tuple[list[Any], list[Connection]]]:
    # Forked from a server that has torch loaded: N imports would take longer than the measurement.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fanin_lab.bench.rank", "fanin.torch.backend"])
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(target=_be, args=(place, theirs), name=f"rank {place.rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield processes, pipes
    finally:
        for pipe in pipes:
            pipe.close()  # a rank that waits for us hears it, and ends
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _be(place: Place, parent: Connection) -> None:
    from fanin_lab.bench.rank import play  # and torch, in the ranks alone

    play(place, parent)


def _exit_code(process: Any) -> str:
    process.join(1)
    return f"exit code {process.exitcode}"


def _cpu_clock(pid: int) -> int:
    """Return Linux's clock of the CPU time of a process, in nanoseconds where /proc has ticks."""
    return (~pid << 3) | 2


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
