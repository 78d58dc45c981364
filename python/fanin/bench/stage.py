"""The stage of a benchmark: a switch and ranks as processes, in a laboratory or on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from fanin import netlab
from fanin._settings import Settings
from fanin.bench import BenchError
from fanin.bench.rank import Failed, Place, Round, Timing, Verdict, play
from fanin.netlab import INTERFACE, MTU_DEFAULT, SERVER, SWITCH, Netlab, address

SWITCH_PORT = 4800
SERVER_PORT = 4801
# From the moment that all ranks are ready to the one at which they begin: they must have heard it.
_NOTICE_S = 0.01
_NOTICE_A_RANK_S = 0.001
# Beyond the collectives' own timeout, for filling, checking, and a busy machine.
_GRACE_S = 60.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Links:
    """The links of the laboratory."""

    rate_bps: int | None = None
    loss: float | None = None
    mtu: int = MTU_DEFAULT
    racks: int = 1


@dataclass(frozen=True)
class Sample:
    """One round, over all ranks."""

    time_s: float
    """From the first rank's beginning to the last one's completion, for one call."""
    rank_times_s: tuple[float, ...]
    ranks_cpu_s: float
    switch_cpu_s: float
    retransmissions: int
    error_max: float
    digest: str
    """Of the sums, equal on all ranks. What a round's inputs are depends on its number alone."""


class Stage:
    """Ranks and switch, ready for rounds."""

    def __init__(
        self,
        ranks: list[Any],
        pipes: list[Connection],
        switch_pids: Sequence[int],
        timeout_s: float,
        shared: bool,
    ) -> None:
        self._ranks = ranks
        self._pipes = pipes
        self._switch_clocks = [_cpu_clock(pid) for pid in switch_pids]
        self._timeout_s = timeout_s + _GRACE_S
        self._shared = shared
        self._number = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._pipes)

    def round(self, wanted: Round) -> Sample:
        """Do one round on all ranks, and check that all have the same bits.

        Raises `BenchError`.
        """
        self._number += 1
        self._tell((wanted, self._number))
        self._hear(str)
        switch_cpu = self._switch_cpu_s()
        self._tell(time.monotonic() + _NOTICE_S + _NOTICE_A_RANK_S * self.world_size)
        timings = self._hear(Timing)
        switch_cpu = self._switch_cpu_s() - switch_cpu
        verdicts = self._hear(Verdict)
        if len({verdict.digest for verdict in verdicts}) > 1:
            raise BenchError(f"the ranks have different sums: {wanted}")
        began = min(timing.began for timing in timings)
        resent = [timing.retransmissions for timing in timings]
        return Sample(
            time_s=(max(timing.ended for timing in timings) - began) / wanted.calls,
            rank_times_s=tuple((t.ended - began) / wanted.calls for t in timings),
            ranks_cpu_s=sum(timing.cpu_s for timing in timings),
            switch_cpu_s=switch_cpu,
            # On loopback the ranks all read one counter of TCP's.
            retransmissions=max(resent)
            if self._shared and wanted.backend == "gloo"
            else sum(resent),
            error_max=max(verdict.error_max for verdict in verdicts),
            digest=verdicts[0].digest,
        )

    def _switch_cpu_s(self) -> float:
        return sum(map(time.clock_gettime, self._switch_clocks))

    def wait_joined(self) -> None:
        """Wait until all ranks are in both groups."""
        self._hear(str)

    def _tell(self, what: object) -> None:
        for pipe in self._pipes:
            # OSError: it has ended, and its last words say why, to `_hear`.
            with contextlib.suppress(OSError):
                pipe.send(what)

    def _hear(self, kind: type[_T]) -> list[_T]:
        deadline = time.monotonic() + self._timeout_s
        heard: dict[int, _T] = {}
        while len(heard) < self.world_size:
            silent = {p: i for i, p in enumerate(self._pipes) if i not in heard}
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, sorted(silent.values())))
                raise BenchError(f"ranks {ranks} were silent for {self._timeout_s:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = silent[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    self._ranks[rank].join(1)
                    code = self._ranks[rank].exitcode
                    raise BenchError(f"rank {rank} died, exit code {code}") from None
                if isinstance(said, Failed):
                    raise BenchError(f"rank {rank} failed:\n{said.text}")
                assert isinstance(said, kind), said
                heard[rank] = said
        return [heard[rank] for rank in range(self.world_size)]


@contextlib.contextmanager
def stage(
    workers: int,
    links: Links | None,
    backends: tuple[str, ...],
    timeout_s: float,
    settings: Settings,
) -> Iterator[Stage]:
    """Set the stage and clear it afterwards; without links, on loopback.

    Raises `BenchError`, and `fanin.netlab.NetlabError`.
    """
    with contextlib.ExitStack() as stack:
        lab: Netlab | None = None
        if links is not None:
            _sweep()
            # A name of its own: somebody may be at work in the laboratory of `fanin netlab`.
            lab = Netlab(
                workers,
                rate_bps=links.rate_bps,
                loss=links.loss,
                mtu=links.mtu,
                racks=links.racks,
                name=f"bench{os.getpid()}",
            )
            stack.enter_context(lab)
        pids, addresses = stack.enter_context(_switches(lab, settings))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fanin-bench-")))
        ranks, pipes = stack.enter_context(
            _ranks(
                [
                    Place(
                        rank=rank,
                        world_size=workers,
                        namespace=lab.namespace(f"w{rank}") if lab else None,
                        interface=INTERFACE if lab else "lo",
                        rendezvous=str(directory / "rendezvous"),
                        switch=addresses[lab.switch_of(rank) if lab else SWITCH],
                        timeout_s=timeout_s,
                        backends=backends,
                        settings=settings,
                    )
                    for rank in range(workers)
                ]
            )
        )
        ready = Stage(ranks, pipes, pids, timeout_s, shared=lab is None)
        ready.wait_joined()
        yield ready


def _sweep() -> None:
    """Remove the laboratories of benchmarks that were killed before they could."""
    for name in netlab.names():
        match = re.fullmatch(r"bench(\d+)", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            netlab.down(name)


@contextlib.contextmanager
def _switches(lab: Netlab | None, settings: Settings) -> Iterator[tuple[list[int], dict[str, str]]]:
    """Start what sums: its processes, and the address that each rack's ranks are told.

    Above several racks stands SwitchML's only switch, or ATP's server.
    """
    racks = list(dict.fromkeys(map(lab.switch_of, range(lab.workers)))) if lab else [SWITCH]
    top = SERVER if len(racks) > 1 else SWITCH
    with contextlib.ExitStack() as stack:
        pids: list[int] = []

        def serve(member: str, what: str, port: int, *options: str) -> str:
            listen = f"{address(member)}:{port}" if lab else "127.0.0.1:0"
            pid, told = stack.enter_context(_serve(lab, member, what, listen, *options))
            pids.append(pid)
            return told

        if settings.protocol == "switchml":
            yield pids, dict.fromkeys(racks, serve(top, "switch", SWITCH_PORT))
            return
        upstream = ["--protocol", "atp", "--upstream", serve(top, "server", SERVER_PORT)]
        yield pids, {rack: serve(rack, "switch", SWITCH_PORT, *upstream) for rack in racks}


@contextlib.contextmanager
def _serve(
    lab: Netlab | None, member: str, what: str, listen: str, *options: str
) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "fanin", what, "--listen", listen, *options]
    command += ["--json", "--log", "error"]
    pipe: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "text": True,
        "preexec_fn": _end_with_parent,
    }
    process = lab.popen(member, command, **pipe) if lab else subprocess.Popen(command, **pipe)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchError(f"the {what} ended with status {process.wait()}: {' '.join(command)}")
        yield process.pid, json.loads(line)["address"]
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _ranks(places: list[Place]) -> Iterator[tuple[list[Any], list[Connection]]]:
    # Forked from a server that has torch loaded: N imports would take longer than the measurement.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fanin.bench.rank", "fanin.torch.backend"])
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(target=play, args=(place, theirs), name=f"rank {place.rank}")
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


def _end_with_parent() -> None:
    # Should we be killed before we can stop it: PR_SET_PDEATHSIG, which survives exec.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _cpu_clock(pid: int) -> int:
    """Return Linux's clock of the CPU time of a process, in nanoseconds where /proc has ticks."""
    return (~pid << 3) | 2
