"""Ranks on several machines, as horovodrun starts them: `fanin run` on each, over ssh."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fanin import _fanin, _signals
from fanin._settings import variable

LOOPBACK = ("localhost", "127.0.0.1")
PORTS = range(20_000, 30_000)
"""The ports at which rank 0's store may listen: below those that connections begin at."""
LOOK_S = 0.1
END_S = 15.0
"""How long a machine's `fanin run` may take to end, once it has ended its ranks."""
NO_LOGIN = 255
"""ssh's own status: whatever it started, `fanin run` does not end with that."""
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
# Not what is true of one machine alone.
_FORWARDED = re.compile(
    r"(?!FANIN_(MACHINE|RATE)$)(FANIN|HOROVOD|TORCH|GLOO|NCCL|CUDA|OMP|MKL)_\w+"
    r"|(PYTHON|LD_LIBRARY_)?PATH|VIRTUAL_ENV"
)
# Nothing tells the command that whoever started it is gone, but the end of its input.
_WATCHED = (
    "exec 3<&0; {command} </dev/null 3<&- & ranks=$!; "
    "(cat <&3; kill -TERM $ranks) >/dev/null 2>&1 & watch=$!; exec 3<&-; "
    "wait $ranks; status=$?; kill $watch 2>/dev/null; exit $status"
)


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes: none if it only sums."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, by one of its names."""
        return self.name in (*LOOPBACK, socket.gethostname()) or self.name == _full_name()

    @property
    def address(self) -> str:
        """Return where other machines find it: its name, without the user that ssh logs in as."""
        return socket.gethostname() if self.name in LOOPBACK else self.name.rpartition("@")[2]


def hosts(text: str, source: str = "-H") -> list[Host]:
    """Parse "HOST:SLOTS,..." of a source; raises `ValueError` for what is no such list."""
    found: list[Host] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        # ssh would take a name that begins with a dash for an option.
        if not count.isdecimal() or not name or name.startswith("-"):
            raise ValueError(f"{source} has {part!r}: HOST:SLOTS, with commas between")
        if ":" in name or name.startswith("["):
            raise ValueError(
                f"{source} has {part!r}, an IPv6 address: give the machine's name (HOST:SLOTS), "
                "which ~/.ssh/config or /etc/hosts may have for it"
            )
        if name in {host.name for host in found}:
            raise ValueError(f"{source} has {name!r} twice: give its slots at once")
        found.append(Host(name, int(count)))
    return found


def of_file(text: str, source: str) -> str:
    """Return a host file's machines as `hosts` takes them.

    A line has HOST, HOST:SLOTS or "HOST slots=SLOTS"; what follows a # is a comment. Raises
    `ValueError` for another one.
    """
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *more = words
        if len(more) > 1 or (more and not more[0].startswith("slots=")):
            raise ValueError(f'{source} has the line {line.strip()!r}: "HOST slots=SLOTS"')
        found.append(":".join([name, *(word.removeprefix("slots=") for word in more)]))
    if not found:
        raise ValueError(f"{source} names no machine")
    return ",".join(found)


def taken(named: Sequence[Host], ranks: int) -> list[Host]:
    """Return the machines that so many ranks are on, the first ones full."""
    found: list[Host] = []
    for host in named:
        if ranks > 0 and host.slots > 0:
            found.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return found


def run(
    machines: Sequence[Host],
    arguments: Sequence[str],
    ranks_end_s: float,
    spares: Sequence[Host] = (),
    protocol: str = "switchml",
) -> int:
    """Run `fanin run` with these arguments on each machine; returns the first failure's status.

    Where one ends before all others have, with an error or by a signal here, all are ended. Each
    `fanin run` gives its ranks `ranks_end_s` seconds for that before it kills them. On `spares` a
    `fanin switch` of the protocol runs meanwhile, which the ranks are told of.
    """
    first = machines[0]
    port = _port(first)
    running: dict[str, subprocess.Popen[bytes]] = {}
    with _signals.as_exit():
        try:
            switches = []
            for host in spares:
                switches.append(f"{host.address}:{_port(host)}")
                listen = f"0.0.0.0:{switches[-1].rpartition(':')[2]}"
                command = [sys.executable, "-m", "fanin", "switch", "--listen", listen]
                running[host.name] = _start(host, [*command, "--protocol", protocol])
            if switches:
                os.environ[variable("switch")] = ",".join(switches)
                print(f"fanin run: switches are at {', '.join(switches)}", file=sys.stderr)
            for number, host in enumerate(machines):
                node = ["--nnodes", str(len(machines)), "--node-rank", str(number)]
                node += ["--nproc-per-node", str(host.slots)]
                node += ["--master-addr", first.address, "--master-port", str(port)]
                command = [sys.executable, "-m", "fanin", "run", *node, *arguments]
                running[host.name] = _start(host, command)
            return _first_failure(running, {host.name for host in machines})
        except FileNotFoundError:
            print("fanin run: there is no ssh here, which -H needs", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            with _signals.ignored():
                left = [process for process in running.values() if process.poll() is None]
                end(left, ranks_end_s + END_S)


def _port(host: Host) -> int:
    return free_port() if host.is_here else random.choice(PORTS)


def _start(host: Host, command: Sequence[str]) -> subprocess.Popen[bytes]:
    # Ctrl-C is for this process, which ends the others.
    line = line_for(host, command)
    return subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)


def _first_failure(running: Mapping[str, subprocess.Popen[bytes]], machines: set[str]) -> int:
    """Wait until all machines' ranks have ended, or something has failed; returns its status."""
    left = dict(running)
    while machines & left.keys():
        for name, process in list(left.items()):
            status = process.poll()
            if status is None:
                continue
            del left[name]
            if status == NO_LOGIN:
                print(
                    f"fanin run: ssh to {name} could not log in, or lost the connection, as it "
                    "says above: it must log in without a password "
                    f"(try: ssh -o BatchMode=yes {name} true)",
                    file=sys.stderr,
                )
            if status:
                return status if status > 0 else 128 - status
        time.sleep(LOOK_S)  # there is no waiting for the first of several processes to end
    return 0


def end(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Let what watches its input end, and kill what has not after so many seconds."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    last = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def line_for(host: Host, command: Sequence[str]) -> list[str]:
    """Return what runs a command on a machine, until its input ends."""
    return _here(command) if host.is_here else _there(host.name, command, os.environ)


def _here(command: Sequence[str]) -> list[str]:
    return ["sh", "-c", _WATCHED.format(command=shlex.join(command))]


def _there(host: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    said = [f"{name}={value}" for name, value in environment.items() if _FORWARDED.fullmatch(name)]
    watched = _WATCHED.format(command=shlex.join(["env", *said, *command]))
    line = f"cd {shlex.quote(str(Path.cwd()))} && {{ {watched}; }}"
    # By a shell of its own, as the user's may be none of POSIX's.
    return [*SSH, host, shlex.join(["sh", "-c", line])]


def own_address(others: Sequence[str]) -> str:
    """Return where other machines find this one: the address that leads to one of them."""
    for other in others:
        with contextlib.suppress(OSError):
            route = _fanin.route_to(f"{socket.gethostbyname(other)}:9")
            if route is not None:
                return route[0]
    return socket.gethostname()


def free_port() -> int:
    """Return one of `PORTS` on which nobody listens here."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"all ports from {PORTS[0]} to {PORTS[-1]} are taken")


@functools.cache
def _full_name() -> str:
    return socket.getfqdn()  # which may ask a name server
