"""How all tests start what they need: switches in this process and in others, ranks, programs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fanin import _fanin
from laboratory import MISSING, NAME
from programs import Program, Start
from ranks import Ranks

# More than a run of all tests needs, so that a port is not soon given again.
PORTS_OF_A_WORKER = 1000
PORTS_PRIVILEGED = 1024
# Files that take more than half a minute. If one of them came last, the other worker would idle.
LONG = (
    "test_restarts",
    "test_reproduce",
    "test_run",
    "test_silence",
    "test_services",
    "test_profile",
    "test_tutorial",
    "test_links",
    "test_ssh",
    "test_bench",
    "test_sweep",
    "test_atp_sockets",
    "test_layouts",
    "test_replan",
    "test_rates",
    "test_examples",
    "test_performance",
    # Last, when torch was read from the disk: its limits are a minute.
    "test_hosts",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; within a file the order stays."""
    items.sort(key=lambda item: (*LONG, item.path.stem).index(item.path.stem))


@pytest.fixture(scope="session", autouse=True)
def _keys_of_switches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have switches keep their keys where the tests end, and not at home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, as all processes of the tests see it: without fanin's files."""
    home, ours = Path.home() / ".cache", tmp_path_factory.mktemp("cache")
    # Other programs need long to make their files again.
    for entry in home.iterdir() if home.is_dir() else ():
        if entry.name != "fanin":
            (ours / entry.name).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(ours)
    return ours


@pytest.fixture(autouse=True)
def kept_rates(cache: Path) -> Path:
    """The file of measured rates, which each test finds missing."""
    file = cache / "fanin" / "rates.json"
    file.unlink(missing_ok=True)
    return file


@contextlib.contextmanager
def switch_here(**options: Any) -> Iterator[_fanin.Switch]:
    """A switch in this process, with what its options say."""
    running = _fanin.Switch(**options)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def switch() -> Iterator[str]:
    """The address of a switch that all tests share, as jobs of several users share one."""
    with switch_here() as running:
        yield running.address


@pytest.fixture
def atp() -> Iterator[str]:
    """A switch of ATP, with its server; own services do what it lacks."""
    with switch_here(protocol="atp") as running:
        yield running.address


Launch = Callable[..., Ranks]


@pytest.fixture
def launch(switch: str) -> Iterator[Launch]:
    """``launch(body, world_size, *args)``: the body in that many processes."""
    started: list[Ranks] = []

    def start(body: Callable[..., Any], world_size: int, *args: Any, at: str = switch) -> Ranks:
        started.append(Ranks(body, world_size, at, args))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


_ports = itertools.count(os.getpid())  # tests of two checkouts may run on one machine


def free_address() -> str:
    """Where nobody listens, yet: where no connection begins, and no other xdist worker looks."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    workers = max((connections - PORTS_PRIVILEGED) // PORTS_OF_A_WORKER, 1)
    last = connections - 1 - worker % workers * PORTS_OF_A_WORKER
    for _ in range(PORTS_OF_A_WORKER):
        port = last - next(_ports) % PORTS_OF_A_WORKER
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise AssertionError("all ports of this worker are taken")


class SwitchProcess:
    """`fanin switch` (or `server`) as a user runs it; it can be killed, and started again there.

    `popen` starts it elsewhere than here, `program` is another fanin than the one under test.
    """

    def __init__(
        self,
        *options: str,
        command: str = "switch",
        listen: str | None = None,
        popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
        program: Sequence[str] = (sys.executable, "-m", "fanin"),
    ) -> None:
        self.options = options
        self.command = command
        self.address = listen or free_address()
        self.process: subprocess.Popen[str] | None = None
        self._popen = popen
        self._program = program

    def start(self) -> None:
        """Returns once it listens, at `address`."""
        command = [*self._program, self.command, "--listen", self.address, "--json", *self.options]
        self.process = self._popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"fanin {self.command} ended: {self.process.wait()}"
        self.address = json.loads(line)["address"]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __enter__(self) -> SwitchProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.fixture
def switch_process() -> Iterator[SwitchProcess]:
    """A switch that runs, and that the test may kill and start again on the same port."""
    with SwitchProcess() as process:
        yield process


@pytest.fixture
def parameter_service() -> Iterator[str]:
    """The address of a service that keeps parameters."""
    with SwitchProcess(command="parameters") as process:
        yield process.address


@pytest.fixture
def laboratory_cleared() -> Iterator[None]:
    """Whatever becomes of the test, nothing of its laboratory is left."""
    from fanin_lab import netlab  # the environment of frameworks has no laboratory

    yield
    if os.geteuid() == 0 and not MISSING:
        netlab.down(NAME)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(source, rank, world_size, switch, **environment)``: a rank that runs this."""
    started: list[Program] = []

    def run(source: str, rank: int, world_size: int, switch: str, **environment: str) -> Program:
        said = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "FANIN_SWITCH": switch}
        # Not by `-c`: a traceback shows the lines.
        file = tmp_path / f"program{len(started)}.py"
        file.write_text(source)
        started.append(Program([sys.executable, "-u", str(file)], said | environment))
        return started[-1]

    yield run
    for program in started:
        program.end()
