"""Ranks on several machines, as horovodrun starts them: `fanin run` on each, over ssh."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fanin import _signals

HERE = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()})
PORTS = range(20_000, 30_000)
"""Where rank 0's store may listen on another machine: below those that connections begin at."""
LOOK_S = 0.1
END_S = 10.0
"""How long a machine's ranks may take to end, once one machine's have."""
NO_LOGIN = 255
"""ssh's status where it did not come so far as to start the command."""
_FORWARDED = re.compile(
    r"(FANIN|HOROVOD|TORCH|GLOO|NCCL|CUDA|OMP|MKL)_\w+|(PYTHON|LD_LIBRARY_)?PATH|VIRTUAL_ENV"
)
# Over ssh nothing tells the command that whoever started it is gone, but the end of its input.
_WATCHED = (
    "exec 3<&0; {command} </dev/null 3<&- & ranks=$!; "
    "(cat <&3 >/dev/null; kill -TERM $ranks 2>/dev/null) & watch=$!; exec 3<&-; "
    "wait $ranks; status=$?; kill $watch 2>/dev/null; exit $status"
)


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, by one of its names."""
        return self.name in HERE


def hosts(text: str) -> list[Host]:
    """Parse "HOST:SLOTS,..."; raises `ValueError` for what is no such list."""
    found: list[Host] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        # What begins with a dash ssh would take for an option.
        if not count.isdecimal() or not int(count) or not name or name.startswith("-"):
            raise ValueError(f"-H has {part!r}: HOST:SLOTS, with commas between")
        if name in {host.name for host in found}:
            raise ValueError(f"-H has {name!r} twice: give its slots at once")
        found.append(Host(name, int(count)))
    return found


def taken(named: Sequence[Host], ranks: int) -> list[Host]:
    """Return the machines that so many ranks are on, the first ones full."""
    found: list[Host] = []
    for host in named:
        if ranks > 0:
            found.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return found


def run(machines: Sequence[Host], arguments: Sequence[str]) -> int:
    """Run `fanin run` with these arguments on each machine; returns the first failure's status.

    Where one ends before all others have, with an error or by a signal here, all are ended.
    """
    first = machines[0]
    master = socket.gethostname() if first.is_here else first.name
    port = _free_port() if first.is_here else random.choice(PORTS)
    running: dict[str, subprocess.Popen[bytes]] = {}
    with _signals.as_exit():
        try:
            for number, host in enumerate(machines):
                node = ["--nnodes", str(len(machines)), "--node-rank", str(number)]
                node += ["--nproc-per-node", str(host.slots)]
                node += ["--master-addr", master, "--master-port", str(port)]
                command = [sys.executable, "-m", "fanin", "run", *node, *arguments]
                if host.is_here:
                    running[host.name] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                else:
                    line = _ssh(host.name, command, os.environ)
                    running[host.name] = subprocess.Popen(line, stdin=subprocess.PIPE)
            return _first_failure(running)
        except FileNotFoundError:
            print("fanin run: there is no ssh here, which -H needs", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            with _signals.ignored():
                _end([process for process in running.values() if process.poll() is None])


def _first_failure(running: Mapping[str, subprocess.Popen[bytes]]) -> int:
    left = dict(running)
    while left:
        for name, process in list(left.items()):
            status = process.poll()
            if status is None:
                continue
            del left[name]
            if status == NO_LOGIN:
                print(
                    f"fanin run: ssh to {name} failed: it must log in without a password "
                    f"(try: ssh -o BatchMode=yes {name} true)",
                    file=sys.stderr,
                )
            if status:
                return status if status > 0 else 128 - status
        time.sleep(LOOK_S)  # there is no waiting for the first of several processes to end
    return 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is None:
            process.terminate()
        else:  # ssh, which ends when what it started has
            process.stdin.close()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ssh(host: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    said = [f"{name}={value}" for name, value in environment.items() if _FORWARDED.fullmatch(name)]
    line = shlex.join(["env", *said, *command])
    watched = f"cd {shlex.quote(str(Path.cwd()))} && {{ {_WATCHED.format(command=line)}; }}"
    return ["ssh", "-o", "BatchMode=yes", host, watched]


def _free_port() -> int:
    with socket.create_server(("", 0)) as found:
        port: int = found.getsockname()[1]
        return port
