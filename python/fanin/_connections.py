"""Connections of rank 0 to all other ranks, on which words and decisions travel.

Beside the groups of collectives: here a rank speaks when it has something to
say, and rank 0 sees at once whose process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from fanin import _fanin
from fanin._handshake import Store
from fanin.errors import JoinTimeout

MEET_SECONDS = 60.0
"""How long rank 0 waits for each rank to connect, when all have joined the job already; and a rank
at the end for rank 0, which may have more to do."""
HANDSHAKE_SECONDS = 5.0
"""How long rank 0 waits for the next word of somebody who may be a stranger."""
PART_SECONDS = 10.0
"""How long rank 0 waits until all have done what was decided last."""
_PARTED = "parted"
SILENT_SECONDS = 30
"""After which a machine that answers nothing is gone, whether or not it was sent something."""
_KEPT_ALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_USER_TIMEOUT: SILENT_SECONDS * 1000,
}


class Gone(Exception):  # noqa: N818 - what happened
    """Another rank's connection is closed: its process has ended, or its engine."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class Silent(Gone):
    """Another rank has said nothing for as long as was waited: its process is stopped, or stuck."""


class Followers:
    """Rank 0's end.

    `address` returns where the other ranks reach this machine; it is called if there are any.
    """

    def __init__(self, store: Store, size: int, address: Callable[[], str]) -> None:
        self._connections: dict[Connection, int] = {}
        # Another thread of this process says that there is something to decide. It may do so while
        # this one closes: the numbers of closed files may be those of others.
        self._waking = threading.Lock()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        if size == 1:
            return
        try:
            self._meet_all(store, size, address())
        except BaseException:
            self.close()
            raise

    def _meet_all(self, store: Store, size: int, address: str) -> None:
        exchange = _fanin.Exchange()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=size) as server:
            port = server.getsockname()[1]
            store.set("words", json.dumps([int(family), address, port, exchange.public]))
            server.settimeout(MEET_SECONDS)
            while len(self._connections) < size - 1:
                self._meet(server, exchange, store, size)

    def _meet(
        self, server: socket.socket, exchange: _fanin.Exchange, store: Store, size: int
    ) -> None:
        """Take the next rank that connects; whoever is not the one that it says is let go."""
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            absent = sorted(set(range(1, size)) - set(self._connections.values()))
            raise JoinTimeout(
                f"ranks {absent} did not connect to rank 0 within {MEET_SECONDS:g} s",
                missing_ranks=absent,
                waited=MEET_SECONDS,
            ) from None
        _limit(accepted, HANDSHAKE_SECONDS)
        _tune(accepted)
        connection = Connection(accepted.detach())
        try:
            rank = int.from_bytes(connection.recv_bytes(4))
            if not store.check([_public(rank)]):
                raise AuthenticationError
            # Only this rank and that one can make this key; a reader of the store cannot.
            key = exchange.key(store.get(_public(rank)).decode())
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (OSError, EOFError, ValueError, AuthenticationError):
            connection.close()
            return
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            _limit(same, 0.0)
        self._connections[connection] = rank

    def wake(self) -> None:
        """Let `hear` return, unless all is closed."""
        with self._waking, contextlib.suppress(BlockingIOError):  # it is awake
            if self._wake >= 0:
                os.write(self._wake, b".")

    def hear(self, seconds: float) -> Iterator[Any]:
        """Yield all that ranks have said, after waiting for it; nothing if `wake` was called."""
        for ready in wait([*self._connections, self._wakes], seconds):
            if not isinstance(ready, Connection):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes, 4096)
                continue
            rank = self._connections[ready]
            try:
                while ready.poll():
                    yield pickle.loads(ready.recv_bytes())
            except (EOFError, OSError):
                raise Gone(rank) from None

    def tell(self, what: Any) -> None:
        """Tell all ranks, also if some are gone; raises `Gone` for the first of those."""
        words = pickle.dumps(what)
        gone = None
        for connection, rank in self._connections.items():
            try:
                connection.send_bytes(words)
            except OSError:
                gone = gone or Gone(rank)
        if gone is not None:
            raise gone

    def tell_one(self, rank: int, what: Any) -> None:
        """Tell one rank alone; raises `Gone`."""
        try:
            self._to(rank).send_bytes(pickle.dumps(what))
        except OSError:
            raise Gone(rank) from None

    def hear_one(self, rank: int, seconds: float | None = None) -> Any:
        """Wait for what one rank says, in a thread that alone hears it.

        Raises `Gone`, and `Silent` after some seconds, if they are given.
        """
        try:
            connection = self._to(rank)
            if not connection.poll(seconds):
                raise Silent(rank)
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise Gone(rank) from None

    def _to(self, rank: int) -> Connection:
        for connection, other in self._connections.items():
            if other == rank:
                return connection
        raise Gone(rank)

    def shut(self) -> None:
        """End all connections, so that threads which wait in `hear_one` return."""
        for connection in self._connections:
            _shut(connection)

    def part(self) -> None:
        """Wait until all ranks part, and let them: none is needed any more."""
        end = time.monotonic() + PART_SECONDS
        staying = dict(self._connections)
        while staying and (left := end - time.monotonic()) > 0:
            for ready in wait([*staying], left):
                assert isinstance(ready, Connection)
                try:
                    said = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    said = _PARTED
                if said == _PARTED:
                    del staying[ready]
        with contextlib.suppress(Gone):
            self.tell(_PARTED)

    def close(self) -> None:
        """Let go of all connections. Idempotent."""
        for connection in self._connections:
            connection.close()
        self._connections = {}
        with self._waking:
            ends = self._wakes, self._wake
            self._wakes = self._wake = -1
        for end in ends:
            if end >= 0:
                os.close(end)


class Leader:
    """The end of a rank other than 0."""

    def __init__(self, store: Store, rank: int) -> None:
        # No pickle before the key is known on both ends.
        exchange = _fanin.Exchange()
        store.set(_public(rank), exchange.public)
        family, address, port, public = json.loads(store.get("words"))
        key = exchange.key(public)
        with socket.socket(family) as connected:
            connected.settimeout(MEET_SECONDS)
            connected.connect((address, port))
            connected.settimeout(None)
            _tune(connected)
            self._connection = Connection(connected.detach())
        self._sending = threading.Lock()
        try:
            self._connection.send_bytes(rank.to_bytes(4))
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
        except BaseException:
            self.close()
            raise

    def say(self, what: Any) -> None:
        """Say something to rank 0, from any thread."""
        words = pickle.dumps(what)
        try:
            with self._sending:
                self._connection.send_bytes(words)
        except OSError:
            raise Gone(0) from None

    def hear(self, seconds: float | None = None) -> Any:
        """Wait for what rank 0 decides; raises `Silent` after some seconds, if they are given."""
        try:
            if not self._connection.poll(seconds):
                raise Silent(0)
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Gone(0) from None

    def part(self) -> None:
        """Say that this rank needs nobody any more, and wait until nobody needs it."""
        end = time.monotonic() + MEET_SECONDS
        with contextlib.suppress(Gone):
            self.say(_PARTED)
            while self.hear(max(end - time.monotonic(), 0.0)) != _PARTED:
                pass

    def shut(self) -> None:
        """End the connection, so that a thread which waits in `hear` returns."""
        _shut(self._connection)

    def close(self) -> None:
        """Let go of the connection."""
        with self._sending:
            self._connection.close()


def connect(store: Store, rank: int, size: int, address: Callable[[], str]) -> Followers | Leader:
    """Connect this rank; blocks until all others have come, too."""
    return Followers(store, size, address) if rank == 0 else Leader(store, rank)


def _public(rank: int) -> str:
    """Return the store's key of what a rank says for its connection."""
    return f"words/{rank}"


def _tune(connected: socket.socket) -> None:
    """Send each word when it is said, and end when the other's machine is gone without one."""
    # Not with the next one: who hears it may not answer.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEPT_ALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _shut(connection: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def _limit(connected: socket.socket, seconds: float) -> None:
    """Let reads end after a time; 0 is never. The sockets of `Connection` know no `settimeout`."""
    connected.setblocking(True)
    spoken = struct.pack("ll", int(seconds), 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, spoken)
