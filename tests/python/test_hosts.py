"""`fanin run -H`: ranks on several machines over ssh, all of which end together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fanin import _hosts, launch
from fanin._hosts import PORTS, Host
from ranks import DEADLINE, wait_until
from test_run import clean_environment, fanin


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["-np", "2", "-H", "a:1,a:1"], "-H has 'a' twice"),
        (["-np", "2", "-H", "-oProxyCommand=x:2"], "-H: expected one argument"),
        (["-np", "2", "-H", "a:x,b:2"], "HOST:SLOTS"),
        (["-np", "2", "-H", "a:0,b:2"], "all ranks are on one"),
        (["-np", "2", "-H", "a:1,b:1,c:0", "--switch", "d:4800"], "--switch names others"),
        (["-np", "2", "-H", "a:1,b:1,c:0", "--min-np", "1"], "elastic jobs do not start"),
        (["-np", "2", "-H", "a:1,b:1,c:0,d:0", "--protocol", "atp"], "has one root"),
        (["-np", "2", "-H", "::1"], "give the machine's name"),
        (["-np", "2", "-H", "[::1]:2"], "give the machine's name"),
        (["-np", "2", "-H", "a:2", "--protocol", "atp"], "the ranks need a switch"),
        (["-np", "2", "-H", "a:2", "--heartbeat-timeout", "3"], "it has none here"),
        (["-np", "2", "-H", "a:1,b:1", "--machine", "x"], "leave it out"),
        (["-np", "3", "-H", "localhost:2"], "from 1 to the 2 slots"),
        (["-np", "0"], "-np is 0"),
        (["-np", "1", "-H", "localhost:x"], "HOST:SLOTS"),
        (["-H", "localhost:2"], "-H is for -np"),
    ],
)
def test_hosts_and_slots_that_cannot_be_are_told(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.run([*flags, "train.py"])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_a_host_file_says_what_a_list_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "# machines", "a slots=2", "me@b:4  # two cores", "", "c", "d slots=0"
    assert _hosts.of_file("\n".join(lines), "hosts") == "a:2,me@b:4,c,d:0"
    for wrong, error in (("a max_slots=2", "HOST slots=SLOTS"), ("# none", "names no machine")):
        with pytest.raises(ValueError, match=error):
            _hosts.of_file(wrong, "hosts")
    (tmp_path / "hosts").write_text("a slots=x")
    there, none = (["--hostfile", str(tmp_path / name)] for name in ("hosts", "none"))
    for flags, error in (
        (there, "HOST:SLOTS"),
        ([*there, "-H", "a:1"], "leave one of them out"),
        (none, "cannot be read"),
    ):
        with pytest.raises(SystemExit):
            launch.run(["-np", "1", *flags, "train.py"])
        assert error in capsys.readouterr().err


class Started:
    """What is started in the place of `fanin run`: it ends at once."""

    lines: list[Sequence[str]]

    def __init__(self, line: Sequence[str], **_: Any) -> None:
        self.lines.append(line)
        self.pid = 0

    def poll(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("first", "address"),
    [
        ("localhost", socket.gethostname()),
        (socket.gethostname(), socket.gethostname()),
        ("a", "a"),
        ("me@a", "a"),
    ],
)
def test_the_first_machine_has_the_store_under_a_name_that_others_know(
    first: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Started, "lines", [], raising=False)
    monkeypatch.setattr(subprocess, "Popen", Started)
    assert _hosts.run([Host(first, 1), Host("b", 1)], ["train.py"], 30.0) == 0
    for line in Started.lines:
        words = line[-1].replace("'", "").split()
        assert words[words.index("--master-addr") + 1] == address
        assert int(words[words.index("--master-port") + 1]) in PORTS


def test_names_are_not_looked_up_before_they_are_asked_for() -> None:
    program = """
import socket
socket.getfqdn = None
from fanin import launch
from fanin._hosts import Host
assert Host("localhost", 1).is_here
"""
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE, check=True)


class Wedged:
    """A process that nothing ends but a kill; time passes while it is waited for."""

    def __init__(self, pid: int, seconds: list[float]) -> None:
        self.pid = pid
        self.stdin = open("/dev/null")  # noqa: SIM115 - it is closed by what is tried
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self._seconds.append(self._seconds[-1] + timeout)
            raise subprocess.TimeoutExpired("ssh", timeout)


def test_all_machines_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = [100.0]
    killed: list[int] = []
    monkeypatch.setattr(time, "monotonic", lambda: seconds[-1])
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    wedged: list[Any] = [Wedged(pid, seconds) for pid in range(3)]
    _hosts.end(wedged, 45.0)
    assert all(each.stdin.closed for each in wedged)
    assert (seconds[-1], killed) == (145.0, [0, 1, 2])


# In the place of ssh: runs the command here, in a session of its own and with an environment of its
# own, as sshd does, by a shell that knows words and quotes alone, as the user's may be any.
SSH = """\
#!/bin/sh
options=
while [ "${1#-}" != "$1" ]; do options="$options $2"; shift 2; done
echo "$1$options" >> "$SSH_LOG"
[ "$1" = nowhere ] && exit 255
shift
exec env -i setsid --wait PYTHON -c '
import os, shlex, sys
words = shlex.split(sys.argv[1])
os.execvp(words[0], words)
' "$*"
"""

ON_TWO = """
import os, pathlib, signal, sys, time
import torch
import fanin.horovod as hvd

hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
where = hvd.local_rank(), hvd.local_size(), hvd.cross_size()
assert where == [(0, 2, 2), (1, 2, 1), (0, 1, 2)][hvd.rank()], where
assert (hvd.size(), total) == (3, 3.0)
assert os.environ.get("FANIN_RATE") == ("1gbit" if len(sys.argv) > 2 and hvd.rank() < 2 else None)
assert os.environ["FANIN_WIRE_DTYPE"] == "native"
said = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
assert said == [hvd.rank(), 3, hvd.local_rank(), hvd.local_size()], said
assert os.environ["HOROVOD_CROSS_SIZE"] == "2"
if len(sys.argv) > 2 and sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], f"{hvd.rank()}").write_text(f"{os.getpid()} {os.getppid()}")
if len(sys.argv) > 2:
    if hvd.rank() == 2 and sys.argv[2] == "fail":
        sys.exit(3)
    time.sleep(600)  # until it is ended: what is tried is that it is
"""


def over_ssh(
    tmp_path: Path,
    hosts: str,
    *arguments: str,
    flags: Sequence[str] = (),
    ranks: int = 3,
    source: str = ON_TWO,
) -> subprocess.Popen[str]:
    """`fanin run -H`, with what takes ssh's place."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.replace("PYTHON", sys.executable))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "train.py").write_text(source)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**clean_environment(), "PATH": path, "SSH_LOG": str(tmp_path / "log")}
    environment |= {"FANIN_RATE": "1gbit", "FANIN_WIRE_DTYPE": "native"}
    program = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), *arguments]
    command = fanin("run", "-np", f"{ranks}", "-H", hosts, *flags, *program)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_ranks_are_started_on_several_machines_as_by_horovodrun(tmp_path: Path) -> None:
    with over_ssh(tmp_path, "me@127.0.0.2:2,127.0.0.3:4") as launched:
        _, said = launched.communicate(timeout=DEADLINE)
    assert launched.returncode == 0, said
    options = "BatchMode=yes ConnectTimeout=10 ServerAliveInterval=10 ServerAliveCountMax=3"
    # In no order: both are started at once.
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == [f"127.0.0.3 {options}", f"me@127.0.0.2 {options}"]


ON_A_SWITCH = """
import sys, torch
import torch.distributed as dist
from fanin.torch import plan

dist.init_process_group("fanin")
tensor = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
assert (tensor == 3.0).all()
hosts = {service["host"] for service in plan()["services"]}
assert None in hosts, hosts  # the switch has a share
"""


def test_machines_without_slots_sum(tmp_path: Path) -> None:
    flags = ("--plan", "switch")
    with over_ssh(
        tmp_path, "127.0.0.2:1,127.0.0.3:1,127.0.0.1:0", flags=flags, ranks=2, source=ON_A_SWITCH
    ) as launched:
        _, said = launched.communicate(timeout=DEADLINE)
    assert launched.returncode == 0, said
    assert f"switches are at {socket.gethostname()}:" in said
    mine = [each for each in psutil.process_iter() if str(tmp_path) in " ".join(_words(each))]
    assert not mine, "the switch ends with the ranks"


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [*process.cmdline(), *process.environ().values()]
    return []


# Longer than the launcher once gave all that it had started.
STUBBORN = ("--shutdown-timeout", "12")


@pytest.mark.parametrize("how", ["fail", "stop", "kill", "stubborn"])
def test_ranks_of_all_machines_end_together(tmp_path: Path, how: str) -> None:
    flags = STUBBORN if how == "stubborn" else ()
    with over_ssh(tmp_path, "localhost:2,127.0.0.3:1", how, flags=flags) as launched:
        files = [tmp_path / str(rank) for rank in range(3)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "all run")
        # The ranks, and torchrun of each machine.
        started = {int(pid) for file in files for pid in file.read_text().split()}
        if how != "fail":
            launched.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        _, said = launched.communicate(timeout=DEADLINE)
    expected = {"fail": 1, "stop": 143, "kill": -signal.SIGKILL, "stubborn": 143}
    assert launched.returncode == expected[how], said
    assert len(started) == 5
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in started), "none is left")


def test_a_machine_that_ssh_does_not_reach_is_named(tmp_path: Path) -> None:
    with over_ssh(tmp_path, "nowhere:2,127.0.0.3:1") as launched:
        _, said = launched.communicate(timeout=DEADLINE)
    assert launched.returncode == 255
    assert "ssh to nowhere could not log in, or lost the connection" in said
