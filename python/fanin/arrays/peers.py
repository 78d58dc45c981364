"""Ways from rank to rank, for what no service does: TCP connections, each made when first used.

A rank connects to whom it sends to, so there is one connection for each direction of a pair, and
one more for each where the program sends by itself. All are one thread's work. A connection begins
with the key that its other end told the ranks when they met. An array has a header before it: which
call it belongs to, its dtype, its shape. So ranks that do different things are told so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from fanin import _fanin, errors
from fanin.arrays.operators import Array
from fanin.errors import (
    AllReduceTimeout,
    Closed,
    CollectiveMismatch,
    FaninError,
    RankLeft,
    RankLost,
)

# Between two looks whether the job is over, in seconds.
PAUSE: Final = 0.1
# How long the services may take to notice that a rank is gone, in seconds.
LOSS_TIMEOUT: Final = 6.0
# How long whoever connects may take to say who it is, in seconds, and how many may at once.
HELLO_TIMEOUT: Final = 5.0
STRANGERS_MAX: Final = 64
CLOSE_TIMEOUT: Final = 5.0

_KEY_BYTES: Final = 16
# Its rank, and which of its connections it is.
_HELLO: Final = struct.Struct("!IB")
_LENGTH: Final = struct.Struct("!I")
_HEADER_MAX: Final = 1 << 16
# In place of a call: why its rank sends nothing more, as an error's type and text.
_OVER: Final = "over"

COLLECTIVE: Final = 0
"""The connections of collectives, which all ranks do in one order."""
DIRECT: Final = 1
"""Those of `send` and `receive`."""

Body: TypeAlias = Callable[["Exchange"], Awaitable[Any]]


class _Peer(NamedTuple):
    host: str
    port: int
    key: bytes


class Transfer:
    """What is under way among the ranks."""

    def __init__(self, future: concurrent.futures.Future[Any], what: str) -> None:
        self._future = future
        self._what = what

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is over. Raises the errors of `fanin.errors`."""
        try:
            self._future.result(timeout)
        except TimeoutError:
            raise AllReduceTimeout(
                f"{self._what} is not over after {timeout:g} s; it is still under way",
                waited=timeout,
            ) from None
        except concurrent.futures.CancelledError:
            raise Closed(f"{self._what}: the group was closed before it was over") from None

    def result(self) -> Any:
        """Return what came of it, once it is over."""
        return self._future.result()

    def done(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def loss(self) -> tuple[int, int, int, int] | None:
        """As of what the services sum: TCP loses nothing."""
        over = self._future.done() and not self._future.cancelled()
        return (0, 0, 0, 0) if over and self._future.exception() is None else None


class Peers:
    """A rank's ways to the others, which it has told where it listens, and has heard it of."""

    def __init__(self, rank: int, world_size: int, address: str, client: _fanin.Client) -> None:
        self.rank = rank
        self.world_size = world_size
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._listener = _listening(address, world_size)
        host, port = self._listener.getsockname()[:2]
        self.said = json.dumps([host, port, self._key.hex()])
        """What the others are to be told."""
        self._client = client
        self._peers: list[_Peer] = []
        self._lanes: _Lanes | None = None
        self._lock = threading.Lock()
        self._close: weakref.finalize[..., Any] = weakref.finalize(self, self._listener.close)
        self._pid = os.getpid()

    def heard(self, told: Sequence[str]) -> None:
        """Take what all ranks said, in their order."""
        for text in told:
            host, port, key = json.loads(text)
            self._peers.append(_Peer(host, port, bytes.fromhex(key)))

    def collective(self, what: str, body: Body) -> Transfer:
        """Begin what all ranks do, one such after the other."""
        return self._begin(what, lambda lanes: lanes.collective(what, body))

    def send(self, to: int, array: Array) -> Transfer:
        """Begin to send to one rank, after what was sent to it before."""

        async def body(exchange: Exchange) -> None:
            await exchange.send(to, array)

        return self._begin(f"send to rank {to}", lambda lanes: lanes.direct(("to", to), body))

    def receive(self, source: int, into: Array | None) -> Transfer:
        """Begin to receive from one rank, after what was to come from it before."""

        async def body(exchange: Exchange) -> Array:
            return await exchange.receive(source, into)

        what = f"receive from rank {source}"
        return self._begin(what, lambda lanes: lanes.direct(("from", source), body))

    def close(self) -> None:
        """End what is under way, and hang up. Idempotent."""
        with self._lock:
            self._close()

    def _begin(self, what: str, work: Callable[[_Lanes], Coroutine[Any, Any, Any]]) -> Transfer:
        if os.getpid() != self._pid:
            raise Closed(f"{what}: the group is the parent's, and this process was forked")
        with self._lock:
            if not self._close.alive:
                raise Closed(f"{what}: the group is closed")
            if self._lanes is None:
                self._lanes = _Lanes(
                    self.rank, self._key, self._listener, self._peers, self._client
                )
                # The thread must not keep this object alive.
                self._close.detach()
                self._close = weakref.finalize(self, _Lanes.stop, self._lanes, self._pid)
            future = asyncio.run_coroutine_threadsafe(work(self._lanes), self._lanes.loop)
        return Transfer(future, what)


class Exchange:
    """One call on the connections of its kind: what it sends and receives is named by it."""

    def __init__(self, lanes: _Lanes, kind: int, what: str) -> None:
        self._lanes = lanes
        self._kind = kind
        self._what = what
        self.awaited: set[int] = set()
        """The ranks of which something is to come."""

    async def send(self, to: int, array: Array) -> None:
        """Send an array that lies in one piece, and has no Python objects."""
        with self._lanes.naming(to):
            link = await self._lanes.to(to, self._kind)
            self._lanes.sending.add(link)
            await self._lanes.loop.sock_sendall(
                link, _header(self._what, _name(array.dtype), array.shape)
            )
            if array.nbytes:
                await self._lanes.loop.sock_sendall(link, _bytes(array))
            self._lanes.sending.discard(link)

    async def receive(self, source: int, into: Array | None = None) -> Array:
        """Receive an array, into one that lies in one piece if that is given.

        Raises `CollectiveMismatch` if what comes is of another call, or does not fit.
        """
        self.awaited.add(source)
        with self._lanes.naming(source):
            link = await self._lanes.from_(source, self._kind)
            (length,) = _LENGTH.unpack(await self._exactly(link, _LENGTH.size))
            if length > _HEADER_MAX:
                raise ConnectionError(f"a header of {length} bytes")
            what, dtype, shape = json.loads(await self._exactly(link, length))
            if what == _OVER:
                raise getattr(errors, dtype)(f"rank {source}: {shape}")
            if what != self._what:
                raise CollectiveMismatch(
                    f"this rank does {self._what!r} where rank {source} does {what!r}: every rank "
                    "makes the same calls, in the same order"
                )
            if into is None:
                into = np.empty(shape, np.dtype(dtype))
            elif (_name(into.dtype), list(into.shape)) != (dtype, shape):
                raise CollectiveMismatch(
                    f"{self._what}: rank {source} sent shape {tuple(shape)} of {dtype}, and this "
                    f"rank expects {into.shape} of {_name(into.dtype)}"
                )
            if into.nbytes:
                await self._fill(link, _bytes(into))
        self.awaited.discard(source)
        return into

    async def swap(
        self, parts: Sequence[Array], likes: Sequence[Array] | None = None
    ) -> list[Array]:
        """Send a part to each rank, and return what each sends to this one, in their order.

        This rank's own part is returned as it is. `likes` have the shapes and dtypes that have to
        come; without them, anything may.
        """
        own, count = self._lanes.rank, len(parts)
        places = [None if likes is None else np.empty_like(likes[rank]) for rank in range(count)]
        others = [(own + step) % count for step in range(1, count)]
        came = await _all(
            *(self.receive(other, places[other]) for other in others),
            *(self.send(other, parts[other]) for other in others),
        )
        found = dict(zip(others, came, strict=False))
        return [parts[own] if rank == own else found[rank] for rank in range(count)]

    async def swap_among(self, ranks: Sequence[int], array: Array) -> list[Array]:
        """Send an array to each of some ranks, and return what each of them sends."""
        own = self._lanes.rank
        others = [rank for rank in ranks if rank != own]
        came = await _all(
            *(self.receive(other) for other in others),
            *(self.send(other, array) for other in others),
        )
        found = dict(zip(others, came, strict=False))
        return [array if rank == own else found[rank] for rank in ranks]

    async def receive_all(self, own: Array, like: Array | None = None) -> list[Array]:
        """Return what each rank sends, in their order; `own` is this rank's."""
        ranks = [rank for rank in range(self._lanes.world_size) if rank != self._lanes.rank]
        places = [None if like is None else np.empty(like.shape, like.dtype) for _ in ranks]
        came = await _all(*map(self.receive, ranks, places))
        came.insert(self._lanes.rank, own)
        return came

    async def send_all(self, parts: Sequence[Array]) -> None:
        """Send each other rank its part."""
        await _all(
            *(self.send(rank, part) for rank, part in enumerate(parts) if rank != self._lanes.rank)
        )

    async def _exactly(self, link: socket.socket, count: int) -> bytes:
        memory = bytearray(count)
        await self._fill(link, memoryview(memory))
        return bytes(memory)

    async def _fill(self, link: socket.socket, memory: memoryview) -> None:
        await _fill(self._lanes.loop, link, memory)


class _Lanes:
    """The connections, and the thread that serves them. All but `stop` runs on that thread."""

    def __init__(
        self,
        rank: int,
        key: bytes,
        listener: socket.socket,
        peers: Sequence[_Peer],
        client: _fanin.Client,
    ) -> None:
        self.rank = rank
        self.world_size = len(peers)
        self.loop = asyncio.new_event_loop()
        self._key = key
        self._listener = listener
        self._peers = peers
        self._client = client
        self._out: dict[tuple[int, int], asyncio.Task[socket.socket]] = {}
        self._in: defaultdict[tuple[int, int], asyncio.Future[socket.socket]]
        self._in = defaultdict(self.loop.create_future)
        self._turns: defaultdict[Any, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.sending: set[socket.socket] = set()
        """Connections on which an array is on its way, in part."""
        # Why nothing can be exchanged any more.
        self._over: FaninError | None = None
        self._accepting = self.loop.create_task(self._accept())
        self._strangers: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="fanin-peers", daemon=True)
        self._thread.start()

    async def collective(self, what: str, body: Body) -> Any:
        async with self._turns["collective"]:
            return await self._held(Exchange(self, COLLECTIVE, what), what, body)

    async def direct(self, way: tuple[str, int], body: Body) -> Any:
        async with self._turns[way]:
            what = f"{'send to' if way[0] == 'to' else 'receive from'} rank {way[1]}"
            # Its k-th array to a rank meets the k-th that this one receives: nothing else to name.
            return await self._held(Exchange(self, DIRECT, "send"), what, body)

    @contextlib.contextmanager
    def naming(self, peer: int) -> Any:
        """Tell which rank an end of a connection was of."""
        try:
            yield
        except (OSError, EOFError) as error:
            raise _Gone(peer, error) from error

    def to(self, rank: int, kind: int) -> Awaitable[socket.socket]:
        """Return the connection to a rank, which is made if it is the first time."""
        if (rank, kind) not in self._out:
            self._out[rank, kind] = self.loop.create_task(self._connect(rank, kind))
        # Shielded: who stops waiting does not keep others from it.
        return asyncio.shield(self._out[rank, kind])

    def from_(self, rank: int, kind: int) -> Awaitable[socket.socket]:
        """Return the connection that a rank makes."""
        return asyncio.shield(self._in[rank, kind])

    def stop(self, owner: int) -> None:
        """End all that is under way, and the thread."""
        if os.getpid() != owner:
            return
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._accepting)
        self.loop.run_until_complete(self._cancel())
        self._listener.close()
        for link in (*_made(self._out.values()), *_made(self._in.values())):
            link.close()
        self.loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _held(self, exchange: Exchange, what: str, body: Body) -> Any:
        """Do it, unless the job ends or time runs out; then nothing more can be exchanged."""
        if self._over is not None:
            raise type(self._over)(f"{what}: {self._over}", **_fields(self._over))
        task = asyncio.ensure_future(body(exchange))
        deadline = self.loop.time() + self._client.timeout
        try:
            while not (await asyncio.wait({task}, timeout=PAUSE))[0]:
                if (failure := self._client.failure()) is not None:
                    raise failure
                if self.loop.time() > deadline:
                    raise self._timed_out(exchange, what)
            return task.result()
        except _Gone as gone:
            error = await self._why(gone, exchange, what)
            await self._end(error)
            raise error from gone.cause
        except FaninError as error:
            await self._end(error)
            raise
        finally:
            task.cancel()

    async def _end(self, error: FaninError) -> None:
        """Exchange nothing any more, and tell the others why, as far as they can hear it."""
        if self._over is not None:
            return
        self._over = error
        farewell = _header(_OVER, type(error).__name__, str(error))
        for link in _made(self._out.values()):
            if link not in self.sending:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(PAUSE):
                        await self.loop.sock_sendall(link, farewell)
            link.close()
        for link in _made(self._in.values()):
            link.close()

    def _timed_out(self, exchange: Exchange, what: str) -> AllReduceTimeout:
        seconds, awaited = self._client.timeout, sorted(exchange.awaited)
        whom = f"; nothing of it came from {', '.join(map(str, awaited))}" if awaited else ""
        return AllReduceTimeout(
            f"{what} was not over after {seconds:g} s{whom}", missing_ranks=awaited, waited=seconds
        )

    async def _why(self, gone: _Gone, exchange: Exchange, what: str) -> FaninError:
        """Return why a connection ended: its rank said so, or the services know it soon."""
        if self._over is not None:
            return self._over
        try:
            async with asyncio.timeout(PAUSE):
                await exchange.receive(gone.peer)
        except FaninError as told:
            return told
        except (_Gone, TimeoutError, ValueError):
            pass
        deadline = self.loop.time() + LOSS_TIMEOUT
        while self.loop.time() < deadline:
            if (failure := self._client.failure()) is not None:
                return failure
            if gone.peer in self._client.left():
                return RankLeft(f"{what}: rank {gone.peer} left the group", rank=gone.peer)
            await asyncio.sleep(PAUSE)
        return RankLost(f"{what}: rank {gone.peer} is cut off: {gone.cause}", rank=gone.peer)

    async def _connect(self, rank: int, kind: int) -> socket.socket:
        peer = self._peers[rank]
        family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.loop.sock_connect(link, (peer.host, peer.port))
            await self.loop.sock_sendall(link, peer.key + _HELLO.pack(self.rank, kind))
        except BaseException:
            link.close()
            raise
        return link

    async def _accept(self) -> None:
        while True:
            link, _ = await self.loop.sock_accept(self._listener)
            if len(self._strangers) >= STRANGERS_MAX:
                link.close()
                continue
            task = self.loop.create_task(self._greet(link))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _greet(self, link: socket.socket) -> None:
        """Take a connection whose other end knows this rank's key, and says who it is."""
        hello = bytearray(_KEY_BYTES + _HELLO.size)
        try:
            link.setblocking(False)
            async with asyncio.timeout(HELLO_TIMEOUT):
                await _fill(self.loop, link, memoryview(hello))
            rank, kind = _HELLO.unpack(hello[_KEY_BYTES:])
            known = secrets.compare_digest(bytes(hello[:_KEY_BYTES]), self._key)
            if known and rank < len(self._peers) and not self._in[rank, kind].done():
                self._in[rank, kind].set_result(link)
                return
        except (OSError, EOFError, TimeoutError):
            pass
        except asyncio.CancelledError:
            link.close()
            raise
        link.close()


class _Gone(Exception):  # noqa: N818 - not an error of its own: a rank's end is asked for
    def __init__(self, peer: int, cause: Exception) -> None:
        super().__init__(peer)
        self.peer = peer
        self.cause = cause


async def _all(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return what all of them return, in their order; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _fill(loop: asyncio.AbstractEventLoop, link: socket.socket, memory: memoryview) -> None:
    while memory:
        count = await loop.sock_recv_into(link, memory)
        if count == 0:
            raise EOFError("the connection was closed")
        memory = memory[count:]


def _made(ends: Iterable[asyncio.Future[socket.socket]]) -> list[socket.socket]:
    return [
        end.result()
        for end in ends
        if end.done() and not end.cancelled() and end.exception() is None
    ]


def _header(what: str, dtype: str, shape: Sequence[int] | str) -> bytes:
    text = json.dumps([what, dtype, shape]).encode()
    return _LENGTH.pack(len(text)) + text


def _listening(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _name(dtype: np.dtype[Any]) -> str:
    """Return a name that NumPy reads: those of other packages have no letter of their own."""
    return dtype.name if dtype.kind == "V" else dtype.str


def _fields(error: FaninError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "message"}
