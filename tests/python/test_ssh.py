"""`fanin run -H` over OpenSSH: two machines with an sshd each, and a third that launches.

`test_hosts` and `test_elastic` have something else in ssh's place. Here ssh logs in, a rank is
killed, and a machine's link is cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from fanin_lab.netlab import INTERFACE, Netlab, address
from laboratory import NAME, needs_lab
from programs import Program
from ranks import DEADLINE, wait_until
from test_elastic import TRAIN
from test_run import clean_environment, fanin

LAUNCHER, FIRST, SECOND = "w0", "w1", "w2"
PORT = 4822
LOADING = 2 * DEADLINE
"""How long a rank may take to start, as four load torch at once while other tests run."""
# Debian has sshd where only root's PATH looks. It starts itself anew by its full path.
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin")
MISSING = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
MISSING += [] if SSHD else ["sshd"]


def is_locked() -> bool:
    """Whether sshd refuses root even with a key."""
    with contextlib.suppress(OSError):
        lines = Path("/etc/shadow").read_text().splitlines()
        return any(line.startswith("root:!") for line in lines)
    return False


# Namespaces and logins need root. What else is missing is named, with the cure; CI installs sshd.
pytestmark = [
    needs_lab,
    pytest.mark.skipif(
        bool(MISSING), reason=f"missing: {', '.join(MISSING)} (apt-get install openssh-server)"
    ),
    pytest.mark.skipif(is_locked(), reason="root's account is locked, so sshd lets nobody in"),
    pytest.mark.usefixtures("laboratory_cleared"),
]

# Without the user's configuration, keys and known hosts. ssh gives a silent machine up after 9 s:
# `fanin run` would have it wait for 30 s.
SSH = """\
#!/bin/sh
exec {ssh} -F {folder}/ssh_config -o ServerAliveInterval=3 "$@"
"""
SSH_CONFIG = """\
Port {port}
User root
IdentityFile {folder}/key
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""
# The links have no rate, and a busy machine would be measured in their place.
SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/{machine}_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
PrintMotd no
PrintLastLog no
SetEnv FANIN_RATE=assumed XDG_CACHE_HOME={folder} XDG_STATE_HOME={folder}
"""
# sshd needs /run/sshd, which is missing where the system runs no sshd. A command in a namespace has
# mounts of its own: nobody else sees this /run, and it goes with the command.
IN_A_RUN_OF_ITS_OWN = 'mount -t tmpfs none /run && mkdir /run/sshd && exec "$@"'


@dataclass
class Machines:
    """Machines that take logins, and the folder with their keys, configurations and logs."""

    lab: Netlab
    folder: Path
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start sshd on both machines; `folder/bin` then has an ssh that may log in."""
        self._key("key")
        for machine in (FIRST, SECOND):
            self._start_sshd(machine)
        known = [
            f"[{address(machine)}]:{PORT} {(self.folder / f'{machine}_key.pub').read_text()}"
            for machine in (FIRST, SECOND)
        ]
        (self.folder / "known_hosts").write_text("".join(known))
        said = SSH_CONFIG.format(port=PORT, folder=self.folder)
        (self.folder / "ssh_config").write_text(said)
        ssh = self.folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(SSH.format(ssh=shutil.which("ssh"), folder=self.folder))
        ssh.chmod(0o755)

    def _key(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name]
        subprocess.run(command, cwd=self.folder, check=True)

    def _start_sshd(self, machine: str) -> None:
        self._key(f"{machine}_key")
        at = address(machine)
        said = SSHD_CONFIG.format(address=at, port=PORT, folder=self.folder, machine=machine)
        config = self.folder / f"{machine}_config"
        config.write_text(said)
        sshd = [str(SSHD), "-D", "-f", str(config), "-E", str(self._log(machine))]
        command = ["sh", "-c", IN_A_RUN_OF_ITS_OWN, "sh", *sshd]
        server = self.lab.popen(machine, command, start_new_session=True)
        self.servers.append(server)

        def listens() -> bool:
            log = self._log(machine)
            text = log.read_text() if log.exists() else ""
            assert server.poll() is None, f"sshd ended:\n{text}"
            return "Server listening on" in text

        wait_until(listens, f"sshd listens on {machine}")

    def _log(self, machine: str) -> Path:
        return self.folder / f"{machine}_log"

    def logins(self) -> list[int]:
        """How often the launcher has logged in on each machine."""
        said = f"Accepted publickey for root from {address(LAUNCHER)} "
        return [self._log(machine).read_text().count(said) for machine in (FIRST, SECOND)]

    def cut(self, machine: str) -> None:
        """Take the machine's link away. TCP there gives up after seconds, and not 15 minutes."""
        namespace = self.lab.namespace(machine)
        retries = ["sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2"]
        subprocess.run(["ip", "netns", "exec", namespace, *retries], check=True)
        command = ["ip", "-n", namespace, "link", "set", INTERFACE, "down"]
        subprocess.run(command, check=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Netlab(3, name=NAME) as lab:
        there = Machines(lab, tmp_path)
        try:
            there.start()
            yield there
        finally:
            lab.down()  # with all that came by ssh
            for server in there.servers:
                server.wait(DEADLINE)


@pytest.fixture
def launched(machines: Machines) -> Iterator[Program]:
    """An elastic training of two ranks on each machine, to the end once `enough` is there."""
    folder = machines.folder
    (folder / "train.py").write_text(TRAIN)
    hosts = ",".join(f"{address(machine)}:2" for machine in (FIRST, SECOND))
    words = ["-np", "4", "--min-np", "2", "-H", hosts]
    program = [sys.executable, "train.py", "", str(folder / "enough")]
    inside = ["ip", "netns", "exec", machines.lab.namespace(LAUNCHER)]
    environment = {**clean_environment(), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    started = Program([*inside, *fanin("run", *words, *program)], environment, str(folder))
    yield started
    started.end()


def met(launched: Program, size: int) -> set[tuple[str, ...]]:
    """The processes of a job of this size, and the rank of each."""
    line = rf"process (\d) pid \d+ is rank (\d) of {size}"
    return {launched.line(line, LOADING).groups() for _ in range(size)}


def test_a_training_outlives_a_rank_that_is_killed_and_a_machine_that_is_cut_off(
    machines: Machines, launched: Program
) -> None:
    pids = {}
    for _ in range(4):
        found = launched.line(r"process (\d) pid (\d+) is rank \d of 4", LOADING)
        pids[found[1]] = int(found[2])
    assert machines.logins() == [2, 2]

    os.kill(pids["1"], signal.SIGKILL)
    launched.line(rf"process 1 on {address(FIRST)} ended by signal 9")
    assert met(launched, 3) == {("0", "0"), ("2", "1"), ("3", "2")}
    assert met(launched, 4) == {("0", "0"), ("2", "1"), ("3", "2"), ("4", "3")}
    assert machines.logins() == [3, 2]

    machines.cut(SECOND)
    launched.line(rf"no more ranks are started on {address(SECOND)}: ssh cannot log in there")
    assert met(launched, 2) == {("0", "0"), ("4", "1")}
    (machines.folder / "enough").touch()
    # After each step the program has compared weights and sums with what they must be.
    steps = {launched.line(r"process [04] is through after (\d+) steps")[1] for _ in range(2)}
    assert len(steps) == 1
    assert launched.wait() == 0
    cut_off = [pids["2"], pids["3"]]
    wait_until(lambda: not any(map(psutil.pid_exists, cut_off)), "those that are cut off end, too")
