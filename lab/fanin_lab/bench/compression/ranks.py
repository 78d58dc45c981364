"""Processes that are the ranks of a job, each the service of a part: here, or in a laboratory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fanin._settings import WireDtype, variable

from fanin_lab.bench import BenchError
from fanin_lab.bench.stage import Links, laboratory
from fanin_lab.netlab import INTERFACE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# How long a step's collective may take, and how often the processes are looked at, in seconds.
TIMEOUT_S = 120.0
_PAUSE_S = 0.05


def run(
    program: str, task: Mapping[str, Any], world_size: int, rate_bps: int | None = None
) -> list[Any]:
    """Run `python PROGRAM FILE` as each rank, and return what each says in the end.

    The task is in the file, as JSON. With a rate each rank is a machine of a laboratory, whose
    links have it.

    Raises `BenchError`, and `fanin_lab.netlab.NetlabError`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fanin-bench-")))
        file = folder / "task.json"
        file.write_text(json.dumps({**task, "rendezvous": str(folder / "rendezvous")}))
        command = [sys.executable, program, str(file)]
        links = Links(rate_bps=rate_bps)
        lab = stack.enter_context(laboratory(world_size, links)) if rate_bps else None
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                # Each by itself: ranks that share a machine send each other nothing.
                variable("machine"): f"w{rank}",
                "GLOO_SOCKET_IFNAME": INTERFACE if lab else "lo",
                **({variable("rate"): f"{rate_bps}bit"} if lab else {}),
            }
            environment.pop(variable("switch"), None)  # the ranks' own services sum
            words = stack.enter_context((folder / f"{rank}.words").open("w"))
            said = stack.enter_context((folder / f"{rank}.json").open("w"))
            keywords: dict[str, Any] = {"env": environment, "stdout": said, "stderr": words}
            member = f"w{rank}"
            process = (
                lab.popen(member, command, **keywords)
                if lab
                else subprocess.Popen(command, **keywords)
            )
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[Any]], folder: Path) -> None:
    while any(process.poll() is None for process in processes):
        _check(processes, folder)
        time.sleep(_PAUSE_S)  # there is no waiting for the first of several processes to end
    _check(processes, folder)


def _check(processes: list[subprocess.Popen[Any]], folder: Path) -> None:
    """Raise as soon as one has failed: the others would wait for it."""
    for rank, process in enumerate(processes):
        if process.poll():
            last = (folder / f"{rank}.words").read_text()[-2000:]
            raise BenchError(f"rank {rank} ended with status {process.returncode}:\n{last}")


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


class Groups:
    """A rank's groups on fanin, one for each wire dtype, beside Gloo's of all."""

    def __init__(self, rendezvous: str) -> None:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._made: dict[WireDtype, ProcessGroup] = {}
        self._timeout = timedelta(seconds=TIMEOUT_S)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=self.rank,
            world_size=self.size,
            timeout=self._timeout,
        )

    def on_fanin(self, wire_dtype: WireDtype) -> ProcessGroup:
        """Return the group; all ranks ask for it at the same place."""
        from fanin.torch import Options
        from torch import distributed

        if wire_dtype not in self._made:
            made = distributed.new_group(
                backend="fanin", timeout=self._timeout, pg_options=Options(wire_dtype=wire_dtype)
            )
            self._made[wire_dtype] = cast("ProcessGroup", made)
        return self._made[wire_dtype]


def play(body: Callable[[Groups, Any], Any]) -> None:
    """Be a rank: do what the file says that the command line names, and say what came of it."""
    task = json.loads(Path(sys.argv[1]).read_text())
    groups = Groups(task["rendezvous"])
    said = body(groups, task)
    from torch import distributed

    distributed.barrier()
    print(json.dumps(said), flush=True)
    # No orderly farewell: no rank is needed any more.
    os._exit(0)
