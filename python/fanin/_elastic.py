"""The launcher of a job whose ranks come and go: `fanin run -np N --min-np A --max-np B`.

A rank that dies ends nobody else. It is started again, also on another machine, and ranks are added
when machines come. The launcher says who is in the job (`_elastic_members`); its ranks meet by that
(`fanin.horovod.elastic`).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fanin import _signals
from fanin._elastic_members import ELASTIC, Listed, Members
from fanin._hosts import LOOK_S, NO_LOGIN, Host, end, hosts, line_for, own_address

DISCOVERY_S: Final = 1.0
"""Between two runs of the script that names machines, as horovodrun has it."""
SCRIPT_S: Final = 10.0
"""How long one run of it may take."""
FAILURES_MAX: Final = 3
"""After so many failures in a row a machine gets no more ranks."""
LIVED_S: Final = 60.0
"""A rank that lived so long shows that its machine works."""
SIGNALLED: Final = 128
"""A shell adds it to the number of a signal."""
LOOPBACK: Final = "127.0.0.1"
ANYWHERE: Final = "192.0.2.1"
"""An address that nobody has (RFC 5737): the way there is that to all others."""
LEAVING_S: Final = 60.0
"""How long a rank may take to leave by itself when its slot is gone."""


@dataclass(frozen=True)
class Limits:
    """How many ranks there may be, and how long is waited for them."""

    ranks_min: int
    ranks_max: int
    seconds: float
    """How long fewer than the least may be there, and a rank may take to meet the others."""
    resets_max: int | None = None
    """How often ranks may meet anew; None without a limit."""


class Process(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Return its status, once it has ended."""

    def kill(self) -> None:
        """End it at once."""


@dataclass(frozen=True)
class Start:
    """The place of a process that is to be started, and what it is told."""

    place: int
    host: Host
    slot: int
    number: int
    """The number of its machine."""


@dataclass
class _Rank:
    start: Start
    process: Process
    began: float
    is_ready: bool = False
    has_state: bool = False
    left: float | None = None
    """When its slot went; it leaves the job with its next commit."""

    @property
    def place(self) -> int:
        return self.start.place

    @property
    def host(self) -> str:
        return self.start.host.name


class Job:
    """An elastic job: `look` is called again and again until it is over."""

    def __init__(
        self,
        start: Callable[[Start], Process],
        members: Members,
        limits: Limits,
        say: Callable[[str], None],
    ) -> None:
        self._start = start
        self._members = members
        self._limits = limits
        self._say = say
        self._ranks: dict[int, _Rank] = {}
        self._next = 0
        self._numbers: dict[str, int] = {}
        self._listed = Listed(0, [])
        # The last list of which all have come, and since when some are waited for.
        self._met = self._listed
        self._waits_since: float | None = None
        self._gone: list[int] = []
        self._failures: Counter[str] = Counter()
        self._barred: set[str] = set()
        self._short_since: float | None = None
        # Whether some rank ever had the state of the training, and whether some is through with it.
        self._has_begun = False
        self._is_finished = False
        # How a rank ended that failed last: ever, and since some rank was through.
        self._failed = self._failed_late = 0

    @property
    def processes(self) -> list[Process]:
        """Those that run."""
        return [rank.process for rank in self._ranks.values()]

    def look(self, now: float, named: Sequence[Host]) -> int | None:
        """Act on what has ended and who is there; return the job's status once it is over.

        `now` is in seconds, and `named` are the machines that there are.
        """
        self._note_ends(now)
        if self._listed.version and not set(self._listed.places) & set(self._ranks):
            return self._without_state()
        if not self._is_finished:
            self._let_leave(now, named)
            self._fill(now, named)
        if not self._ranks and (self._is_finished or self._barred):
            return self._failed_late if self._is_finished else self._failed
        for rank in self._ranks.values():
            rank.is_ready = rank.is_ready or self._members.is_ready(rank.place)
            rank.has_state = rank.has_state or self._members.has_state(rank.place)
            self._has_begun |= rank.has_state
        if self._has_begun and not any(rank.has_state for rank in self._ranks.values()):
            return self._without_state()
        if self._is_due(now):
            if self._listed.version > self._resets_max():
                self._say(f"ranks met anew {self._listed.version - 1} times (--reset-limit)")
                return self._failed or 1
            self._listed = Listed(self._listed.version + 1, self._ready())
            self._members.publish(self._listed)
        self._end_those_that_hang(now)
        return self._out_of_patience(now)

    def _resets_max(self) -> float:
        most = self._limits.resets_max
        return float("inf") if most is None else most

    def _without_state(self) -> int:
        """Return the status of a job of which nobody is left who could go on with it."""
        if self._is_finished:
            return self._failed_late  # who came too late to take part is ended with the launcher
        self._say("all ranks have ended that had the state of the training")
        return self._failed or 1

    def _staying(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if rank.left is None]

    def _ready(self) -> list[int]:
        """Return the places of the next list: those that can give the state to others first."""
        ready = [rank for rank in self._staying() if rank.is_ready]
        if self._has_begun and not any(rank.has_state for rank in ready):
            # A rank that is to leave stays until it has given the state to another.
            ready += [rank for rank in self._ranks.values() if rank.has_state][:1]
        ready.sort(key=lambda rank: (not rank.has_state, rank.place))
        return [rank.place for rank in ready]

    def _note_ends(self, now: float) -> None:
        before = len(self._gone)
        for rank in list(self._ranks.values()):
            status = rank.process.poll()
            if status is None:
                continue
            del self._ranks[rank.place]
            self._gone.append(rank.place)
            if rank.left is None and status == 0:
                self._is_finished = True
            elif rank.left is None:
                self._note_failure(rank, status, now)
        if len(self._gone) > before:
            self._members.say_gone(self._gone)

    def _note_failure(self, rank: _Rank, status: int, now: float) -> None:
        if SIGNALLED < status < NO_LOGIN:
            status = SIGNALLED - status
        self._failed = status if status > 0 else SIGNALLED - status
        if self._is_finished:
            self._failed_late = self._failed
        if now - rank.began >= LIVED_S:
            self._failures[rank.host] = 0
        self._failures[rank.host] += 1
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        self._say(f"process {rank.place} on {rank.host} ended {how}")
        if status == NO_LOGIN or self._failures[rank.host] >= FAILURES_MAX:
            why = "ssh cannot log in" if status == NO_LOGIN else f"{FAILURES_MAX} in a row failed"
            self._barred.add(rank.host)
            self._say(f"no more ranks are started on {rank.host}: {why} there")

    def _let_leave(self, now: float, named: Sequence[Host]) -> None:
        """Take ranks out whose machines are no longer named, or have fewer slots."""
        slots = {host.name: host.slots for host in named}
        given = any(rank.has_state for rank in self._staying())
        for rank in self._ranks.values():
            if rank.left is None and rank.start.slot >= slots.get(rank.host, 0):
                rank.left = now
                self._say(f"process {rank.place} leaves {rank.host}: its slot is gone")
            # Who has the state alone may give it to those that still load.
            patience = self._limits.seconds if rank.has_state and not given else LEAVING_S
            if rank.left is not None and (not rank.is_ready or now - rank.left > patience):
                rank.process.kill()

    def _fill(self, now: float, named: Sequence[Host]) -> None:
        """Start ranks on free slots."""
        taken = {(rank.host, rank.start.slot) for rank in self._ranks.values()}
        room = self._limits.ranks_max - len(self._staying())
        for host in named:
            number = self._numbers.setdefault(host.name, len(self._numbers))
            for slot in range(0 if host.name in self._barred else host.slots):
                if room <= 0 or (host.name, slot) in taken:
                    continue
                start = Start(self._next, host, slot, number)
                self._ranks[self._next] = _Rank(start, self._start(start), now)
                self._next += 1
                room -= 1

    def _is_due(self, now: float) -> bool:
        """Return whether ranks are to meet by another list."""
        ready, listed = self._ready(), self._listed
        if not ready or (len(ready) < self._limits.ranks_min and not self._is_finished):
            return False
        if listed.version == 0:
            waited = now - min(rank.began for rank in self._ranks.values())
            return len(ready) == len(self._staying()) or waited > self._limits.seconds
        # Who is through needs nobody, and the others need not know.
        changed = set(ready) != set(listed.places) and not self._is_finished
        return changed or self._members.is_asked_anew(listed.version) or self._waits_for_the_gone()

    def _waits_for_the_gone(self) -> bool:
        """Return whether somebody has ended before he came to meet the others of the list."""
        return self._met != self._listed and any(
            place not in self._ranks and not self._members.has_arrived(self._listed.version, place)
            for place in self._listed.places
        )

    def _end_those_that_hang(self, now: float) -> None:
        """End those that others wait for: these have left their job, or it never began."""
        if self._met == self._listed:
            return
        came, absent = list[_Rank](), list[_Rank]()
        for place in self._listed.places:
            rank = self._ranks.get(place)
            if rank is not None:
                there = self._members.has_arrived(self._listed.version, place)
                (came if there else absent).append(rank)
        if not absent:
            self._met = self._listed
        if not absent or not any(rank.has_state or not self._has_begun for rank in came):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > self._limits.seconds:
            self._waits_since = now
            for rank in absent:
                who = f"process {rank.place} on {rank.host}"
                self._say(f"{who} does not meet the others: it is ended")
                rank.process.kill()

    def _out_of_patience(self, now: float) -> int | None:
        """Return a status if there were too few ranks for too long."""
        if self._is_finished or len(self._ready()) >= self._limits.ranks_min:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > self._limits.seconds:
            self._say(
                f"fewer than {self._limits.ranks_min} ranks (--min-np) were there for "
                f"{self._limits.seconds:g} s (--elastic-timeout)"
            )
            return self._failed or 1
        return None


class Discovery:
    """The machines that a script names, a line each: HOST or HOST:SLOTS."""

    def __init__(self, script: str, slots: int) -> None:
        self._script = script
        self._slots = slots
        self._said = ""
        self._named = self._run() or []
        threading.Thread(target=self._repeat, name="fanin-discovery", daemon=True).start()

    def _repeat(self) -> None:
        while True:
            time.sleep(DISCOVERY_S)
            found = self._run()
            if found is not None:
                self._named = found

    def named(self) -> list[Host]:
        """Return those of the last run that did not fail."""
        return self._named

    def _run(self) -> list[Host] | None:
        """Return what it names; None if it fails: then the machines stay as they were."""
        try:
            done = subprocess.run(
                [self._script], capture_output=True, text=True, timeout=SCRIPT_S, check=True
            )
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            text = ",".join(line if ":" in line else f"{line}:{self._slots}" for line in lines)
            return hosts(text, self._script) if lines else []
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if str(error) != self._said:
                self._said = str(error)
                _say(f"--host-discovery-script: {error}; the machines stay as they were")
            return None


class _Started:
    def __init__(self, line: Sequence[str]) -> None:
        # Ctrl-C is for the launcher, which ends the others.
        self.running = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)

    def poll(self) -> int | None:
        return self.running.poll()

    def kill(self) -> None:
        end([self.running], 0.0)


def run(
    command: Sequence[str],
    named: Callable[[], Sequence[Host]],
    limits: Limits,
    ranks_end_s: float,
    of_several: bool,
) -> int:
    """Run a command's processes to the end of their job; returns its status.

    `named` returns the machines that there are now, of which some may be others if the job is
    `of_several`. Each process has `ranks_end_s` seconds to end when this one does, before it is
    killed.
    """
    from torch._C._distributed_c10d import TCPStore

    others = [host.address for host in named() if not host.is_here]
    address = own_address([*others, ANYWHERE]) if of_several else LOOPBACK
    # On one machine nobody else is to reach it.
    with socket.create_server(("" if of_several else LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def start(one: Start) -> _Started:
        said = {
            "RANK": one.place,
            "WORLD_SIZE": limits.ranks_min,
            "LOCAL_RANK": one.slot,
            "LOCAL_WORLD_SIZE": one.host.slots,
            "GROUP_RANK": one.number,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            ELASTIC: 1,
        }
        pairs = [f"{name}={value}" for name, value in said.items()]
        return _Started(line_for(one.host, ["env", *pairs, *command]))

    job = Job(start, Members(store), limits, _say)
    with _signals.as_exit():
        try:
            while (status := job.look(time.monotonic(), named())) is None:
                time.sleep(LOOK_S)  # nothing waits for processes and the store at once
            return status
        except FileNotFoundError:
            _say("there is no ssh here, which machines of -H need")
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            with _signals.ignored():
                left = [each for each in job.processes if isinstance(each, _Started)]
                end([each.running for each in left], ranks_end_s)


def _say(text: str) -> None:
    print(f"fanin run: {text}", file=sys.stderr, flush=True)
