"""Real processes that play the ranks of a job, for the suites here.

A suite names a module-level function ``body(me, *args)``; `launch` runs it once a rank. Processes
are forked from a server that has torch loaded, so that a test costs milliseconds, not an import.
Everything waits for a condition with a deadline; nothing sleeps and hopes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

DEADLINE = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        # Each rank would import what its suite imports: a third of a second, in most of the tests.
        "pytest",
        "_pytest.pytester",
        "fanin.horovod",
        "numpy",
        "torch._dynamo",  # DistributedDataParallel imports it when one is made
        "torch.distributed.fsdp",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "fanin.torch.backend",
        "fanin.torch.hooks.all_reduce",
    ]
)


def wait_until(condition: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
    """Returns once the condition holds; fails the test, naming it, after the deadline."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what}")
        time.sleep(0.01)


@dataclass
class Me:
    """What a rank's body is given."""

    rank: int
    world_size: int
    switch: str
    parent: Connection

    def init(self, backend: str = "fanin", **keywords: Any) -> None:
        """Makes the default process group as a program under torchrun does."""
        dist.init_process_group(backend, **keywords)

    def say(self, what: Any) -> None:
        """Tells the test; `Ranks.hear` returns it."""
        _send(self.parent, ("said", what))

    def hear(self) -> Any:
        """Waits for the test's `Ranks.tell`."""
        assert self.parent.poll(DEADLINE), "the test said nothing"
        return self.parent.recv()

    def on_both(self, program: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """What `program(me, *args)` returns on Gloo and on fanin, one after the other."""
        results = []
        for backend in ("gloo", "fanin"):
            self.init(backend)
            results.append(program(self, *args))
            # No rank tears its connections down while another still works.
            dist.barrier()
            dist.destroy_process_group()
        gloo, fanin = results
        return gloo, fanin


def sums_on_switch(group: Any = None) -> int:
    """How many all-reduces of this rank the switch has summed for the group: 0 on Gloo.

    Shows that a result that is right did not come about behind the switch's back.
    """
    chosen: Any = group or dist.group.WORLD
    backend: Any = chosen._get_backend(torch.device("cpu"))
    if isinstance(backend, dist.ProcessGroupGloo):
        return 0
    # Collectives that callbacks begin have a backend of their own.
    lanes = [lane for lane in (backend, backend._of_callbacks.made) if lane]
    # What a protocol lacks, the ranks' own services beside it have.
    channels = [channel for lane in lanes for channel in (lane._channel, lane._own.made) if channel]
    return sum(int(channel._client.statistics()["completed"]) for channel in channels)


@dataclass
class Failure:
    """How a body ended that raised."""

    kind: str
    message: str
    fields: dict[str, Any]
    text: str


class Ranks:
    """The processes of one launch."""

    def __init__(
        self, body: Callable[..., Any], world_size: int, switch: str, args: tuple[Any, ...]
    ) -> None:
        # As torchrun does: the launcher has the store, the ranks are its clients.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "FANIN_SWITCH": switch,
            }
            me = Me(rank, world_size, switch, theirs)
            process = _context.Process(target=_play, args=(body, me, environment, args))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int, deadline: float = DEADLINE) -> Any:
        """The next thing that the rank said."""
        kind, value = self.next(rank, deadline)
        assert kind == "said", f"rank {rank} ended in place of speaking: {value}"
        return value

    def tell(self, rank: int, what: Any) -> None:
        self._pipes[rank].send(what)

    def kill(self, rank: int) -> None:
        """SIGKILL, and waits until the process is gone."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join(DEADLINE)

    def result(self, rank: int, deadline: float = DEADLINE) -> Any:
        """What the rank's body returned; an assertion with its traceback if it raised."""
        outcome = self.outcome(rank, deadline)
        assert not isinstance(outcome, Failure), f"rank {rank}:\n{outcome.text}"
        return outcome

    def outcome(self, rank: int, deadline: float = DEADLINE) -> Any:
        """What the rank's body returned, or a `Failure`."""
        kind, value = self.next(rank, deadline)
        assert kind == "ended", f"rank {rank} said {value!r} and nobody listened"
        return value

    def results(self, deadline: float = DEADLINE) -> list[Any]:
        return [self.result(rank, deadline) for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe in self._pipes:
            pipe.close()

    def next(self, rank: int, deadline: float = DEADLINE) -> tuple[str, Any]:
        """The next message of the rank: ("said", what) or ("ended", outcome)."""
        pipe = self._pipes[rank]
        assert pipe.poll(deadline), f"rank {rank} was silent for {deadline} s"
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self.processes[rank].join(5)
            raise AssertionError(
                f"rank {rank} died, exit code {self.processes[rank].exitcode}"
            ) from None
        return kind, value


def _send(pipe: Connection, what: tuple[str, Any]) -> None:
    # Pickled by hand: the pipe's own pickler would send tensors as files of a process that has
    # gone.
    pipe.send_bytes(pickle.dumps(what))


def _play(
    body: Callable[..., Any], me: Me, environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        outcome: Any = body(me, *args)
    except BaseException as error:
        outcome = Failure(
            type(error).__name__, str(error), dict(vars(error)), traceback.format_exc()
        )
    _send(me.parent, ("ended", outcome))
    if dist.is_initialized():
        dist.destroy_process_group()
