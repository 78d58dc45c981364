"""Ways from rank to rank, for what no service does: TCP connections, each made when first used.

A rank connects to each rank that it sends to. A pair thus has a connection for each direction, and
one more for each if the program itself sends. One thread does the work of all. A connection begins
with a key that its two ends alone can make. An array has a header before it: its call, its dtype,
its shape. So ranks that do different things are told so.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
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
# How long a stranger that connects may take to say its name, in seconds, and how many may at once.
HELLO_TIMEOUT: Final = 5.0
STRANGERS_MAX: Final = 64
# How long the others may take to hear why all is over, in seconds.
FAREWELL_TIMEOUT: Final = 2.0
CLOSE_TIMEOUT: Final = 5.0

_KEY_BYTES: Final = 32
# A rank, and the kind of its connection.
_HELLO: Final = struct.Struct("!IB")
_LENGTH: Final = struct.Struct("!I")
_HEADER_MAX: Final = 1 << 16

COLLECTIVE: Final = 0
"""The connections of collectives, which all ranks do in one order."""
DIRECT: Final = 1
"""Those of `send` and `receive`."""
FAREWELL: Final = 2
"""Those by which a rank tells why it exchanges nothing more."""

Body: TypeAlias = Callable[["Exchange"], Awaitable[Any]]


class _Peer(NamedTuple):
    host: str
    port: int
    key: bytes
    """It is of this pair of ranks alone."""


class Transfer:
    """Something that is under way among the ranks."""

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
        """Return its result, once it is over."""
        return self._future.result()

    def done(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def loss(self) -> tuple[int, int, int, int] | None:
        """As of a sum of the services: TCP loses nothing."""
        over = self._future.done() and not self._future.cancelled()
        return (0, 0, 0, 0) if over and self._future.exception() is None else None


class Peers:
    """A rank's ways to the others. `said` is what they are to be told, `heard` takes theirs."""

    def __init__(self, rank: int, world_size: int, address: str, client: _fanin.Client) -> None:
        self.rank = rank
        self.world_size = world_size
        self._exchange = _fanin.Exchange()
        self._listener = _listening(address, world_size)
        host, port = self._listener.getsockname()[:2]
        # No secret: a key is made of it and of another rank's.
        self.said = json.dumps([host, port, self._exchange.public])
        self._client = client
        self._peers: list[_Peer] = []
        self._lanes: _Lanes | None = None
        self._calls = 0
        self._lock = threading.Lock()
        self._close: weakref.finalize[..., Any] = weakref.finalize(self, self._listener.close)
        self._pid = os.getpid()

    def heard(self, told: Sequence[str]) -> None:
        """Take what all ranks said, in their order."""
        for text in told:
            host, port, public = json.loads(text)
            self._peers.append(_Peer(host, port, self._exchange.key(public)))

    def collective(self, what: str, body: Body) -> Transfer:
        """Begin what all ranks do, one such after the other."""
        return self._begin(what, lambda lanes, call: lanes.collective(f"{what} ({call})", body))

    def send(self, to: int, array: Array) -> Transfer:
        """Begin to send to one rank, after what was sent to it before."""

        async def body(exchange: Exchange) -> None:
            await exchange.send(to, array)

        return self._begin(f"send to rank {to}", lambda lanes, _: lanes.direct(("to", to), body))

    def receive(self, source: int, into: Array | None) -> Transfer:
        """Begin to receive from one rank, after what was to come from it before.

        The result is a new array if the one that comes does not fit.
        """

        async def body(exchange: Exchange) -> Array:
            return await exchange.receive(source, into, strictly=False)

        what = f"receive from rank {source}"
        return self._begin(what, lambda lanes, _: lanes.direct(("from", source), body))

    def close(self) -> None:
        """End what is under way, and hang up. Idempotent; in a forked child it does nothing."""
        if os.getpid() == self._pid:
            with self._lock:
                self._close()

    def _begin(
        self, what: str, work: Callable[[_Lanes, int], Coroutine[Any, Any, Any]]
    ) -> Transfer:
        if os.getpid() != self._pid:
            raise Closed(f"{what}: the group is the parent's, and this process was forked")
        with self._lock:
            if not self._close.alive:
                raise Closed(f"{what}: the group is closed")
            if self._lanes is None:
                self._lanes = _Lanes(self.rank, self._listener, self._peers, self._client)
                # The thread must not keep this object alive.
                self._close.detach()
                self._close = weakref.finalize(self, _Lanes.stop, self._lanes, self._pid)
            self._calls += 1
            running = work(self._lanes, self._calls)
            try:
                future = asyncio.run_coroutine_threadsafe(running, self._lanes.loop)
            except RuntimeError:  # its thread has ended
                running.close()
                raise Closed(f"{what}: the group is closed") from None
        return Transfer(future, what)


class Exchange:
    """One call on the connections of its kind. What it sends is named by it, as is what comes."""

    def __init__(self, lanes: _Lanes, kind: int, what: str) -> None:
        self._lanes = lanes
        self.kind = kind
        self.rank = lanes.rank
        self.world_size = lanes.world_size
        self._what = what
        self.awaited: set[int] = set()
        """The ranks of which something is to come."""

    async def send(self, to: int, array: Array) -> None:
        """Send an array that lies in one piece, and has no Python objects."""
        with _naming(to):
            link = await self._lanes.to(to, self.kind)
            header = _header(self._what, _name(array.dtype), array.shape)
            await self._lanes.loop.sock_sendall(link, header)
            if array.nbytes:
                await self._lanes.loop.sock_sendall(link, _bytes(array))

    async def receive(
        self, source: int, into: Array | None = None, *, strictly: bool = True
    ) -> Array:
        """Receive an array, into one that lies in one piece if that is given.

        Raises `CollectiveMismatch` if what comes is of another call, or does not fit; if that need
        not be, it comes in a new array.
        """
        self.awaited.add(source)
        with _naming(source):
            link = await self._lanes.from_(source, self.kind)
            what, dtype, shape = await self._lanes.header(link)
            if what != self._what:
                raise CollectiveMismatch(
                    f"this rank does {self._what!r} where rank {source} does {what!r}: every rank "
                    "makes the same calls, in the same order"
                )
            if into is not None and (_name(into.dtype), list(into.shape)) != (dtype, shape):
                if strictly:
                    raise CollectiveMismatch(
                        f"{self._what}: rank {source} sent shape {tuple(shape)} of {dtype}, and "
                        f"this rank expects {into.shape} of {_name(into.dtype)}"
                    )
                into = None
            if into is None:
                into = np.empty(shape, _dtype(dtype, source))
            if into.nbytes:
                await _fill(self._lanes.loop, link, _bytes(into))
        self.awaited.discard(source)
        return into

    async def swap(
        self, parts: Sequence[Array], likes: Sequence[Array] | None = None
    ) -> list[Array]:
        """Send a part to each rank, and return what each sends to this one, in their order.

        This rank's own part is returned as it is. `likes` have the shapes and dtypes that have to
        come; without them, anything may.
        """
        ranks = range(self.world_size)
        places = [None if likes is None else _place(likes[rank]) for rank in ranks]
        return await self.swap_among(ranks, parts, places)

    async def swap_among(
        self,
        ranks: Sequence[int],
        parts: Sequence[Array],
        places: Sequence[Array | None] | None = None,
    ) -> list[Array]:
        """Send a part to each of some ranks, and return what each of them sends."""
        others = [index for index, rank in enumerate(ranks) if rank != self.rank]
        came = await _all(
            *(
                self.receive(ranks[index], None if places is None else places[index])
                for index in others
            ),
            *(self.send(ranks[index], parts[index]) for index in others),
        )
        found = dict(zip(others, came, strict=False))
        return [found.get(index, parts[index]) for index in range(len(ranks))]

    async def to_root(
        self, array: Array, root: int, like: Array | None = None
    ) -> list[Array] | None:
        """Send an array to the root; return what all send, on the root."""
        if self.rank != root:
            await self.send(root, array)
            return None
        ranks = [rank for rank in range(self.world_size) if rank != root]
        places = [None if like is None else _place(like) for _ in ranks]
        came = await _all(*map(self.receive, ranks, places))
        came.insert(root, array)
        return came

    async def from_root(self, parts: Sequence[Array], like: Array | None, root: int) -> Array:
        """Return this rank's part of what the root has; the root alone has parts."""
        if self.rank != root:
            return await self.receive(root, None if like is None else _place(like))
        await _all(*(self.send(rank, part) for rank, part in enumerate(parts) if rank != root))
        return parts[root]

    def alike(self, parts: Sequence[Array]) -> list[Array]:
        """Return the likes of what others send to this rank, if they are this rank's own part."""
        return [parts[self.rank]] * self.world_size


class _Lanes:
    """The connections, and the thread that serves them. All but `stop` runs on that thread."""

    def __init__(
        self, rank: int, listener: socket.socket, peers: Sequence[_Peer], client: _fanin.Client
    ) -> None:
        self.rank = rank
        self.world_size = len(peers)
        self.loop = asyncio.new_event_loop()
        self._listener = listener
        self._peers = peers
        self._client = client
        self._out: dict[tuple[int, int], asyncio.Task[socket.socket]] = {}
        self._in: defaultdict[tuple[int, int], asyncio.Future[socket.socket]]
        self._in = defaultdict(self.loop.create_future)
        self._turns: defaultdict[Any, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Why nothing can be exchanged any more, and what is under way.
        self._over: FaninError | None = None
        self._held_tasks: set[asyncio.Future[Any]] = set()
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

    def to(self, rank: int, kind: int) -> Awaitable[socket.socket]:
        """Return the connection to a rank, which is made if it is the first time."""
        if (rank, kind) not in self._out:
            made = self._out[rank, kind] = self.loop.create_task(self._connect(rank, kind))
            # Also if nobody waits for it any more.
            made.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Shielded: who stops waiting does not keep others from it.
        return asyncio.shield(self._out[rank, kind])

    def from_(self, rank: int, kind: int) -> Awaitable[socket.socket]:
        """Return the connection that a rank makes."""
        return asyncio.shield(self._in[rank, kind])

    async def header(self, link: socket.socket) -> Any:
        """Return what a header says."""
        (length,) = _LENGTH.unpack(await self._exactly(link, _LENGTH.size))
        if length > _HEADER_MAX:
            raise ConnectionError(f"a header of {length} bytes")
        return json.loads(await self._exactly(link, length))

    def stop(self, owner: int) -> None:
        """End all that is under way, and the thread."""
        if os.getpid() != owner:
            return
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._accepting.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self._accepting)
        finally:
            self.loop.run_until_complete(self._cancel())
            self._listener.close()
            self._hang_up()
            self.loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _hang_up(self) -> None:
        for link in (*_made(self._out.values()), *_made(self._in.values())):
            # A forked child may have it, too, and keep it open.
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    async def _held(self, exchange: Exchange, what: str, body: Body) -> Any:
        """Do it, unless the job ends or time runs out; then nothing more can be exchanged."""
        if self._over is not None:
            raise _again(self._over)
        task = asyncio.ensure_future(body(exchange))
        self._held_tasks.add(task)
        deadline = self.loop.time() + self._client.timeout
        try:
            while not (await asyncio.wait({task}, timeout=PAUSE))[0]:
                if (failure := self._failure(exchange)) is not None:
                    # The others hear of it as this rank does.
                    await self._end(failure, tells=False)
                    raise failure
                if self.loop.time() > deadline:
                    raise self._timed_out(exchange, what)
            if task.cancelled() and self._over is not None:
                raise _again(self._over)
            return task.result()
        except _Gone as gone:
            error = await self._why(gone, what)
            await self._end(error)
            raise _again(error) from gone.cause
        except FaninError as error:
            await self._end(error)
            raise
        except Exception as error:
            # The rest of this call is not read from the connections: nothing may follow.
            await self._end(FaninError(f"{what}: {type(error).__name__}: {error}"))
            raise
        finally:
            task.cancel()
            self._held_tasks.discard(task)

    def _failure(self, exchange: Exchange) -> FaninError | None:
        """Return why the job is over, as far as that is in the way of a call."""
        failure = self._client.failure()
        if not isinstance(failure, RankLeft):
            return failure
        # It may have sent what it had to send.
        needed = failure.rank in exchange.awaited
        return failure if needed and not self._in[failure.rank, exchange.kind].done() else None

    async def _end(self, error: FaninError, *, tells: bool = True) -> None:
        """Exchange nothing any more, and tell the others why."""
        if self._over is not None:
            return
        # Without the frames that it was raised in: they hold arrays, and the group.
        self._over = _again(error)
        for task in self._held_tasks:
            task.cancel()
        if tells:
            said = _header(type(error).__name__, str(error), _fields(error))
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            await asyncio.gather(*(self._tell(rank, said) for rank in others))
        # Before nobody waits at a connection, it is not closed.
        await asyncio.sleep(PAUSE / 10)
        self._hang_up()

    async def _tell(self, rank: int, said: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT):
                link = await self._connect(rank, FAREWELL)
                with contextlib.closing(link):
                    await self.loop.sock_sendall(link, said)

    def _timed_out(self, exchange: Exchange, what: str) -> AllReduceTimeout:
        seconds, awaited = self._client.timeout, sorted(exchange.awaited)
        ranks = ", ".join(map(str, awaited))
        whom = f"; what rank {ranks} has to send did not come, or not all of it" if awaited else ""
        return AllReduceTimeout(
            f"{what} was not over after {seconds:g} s{whom}", missing_ranks=awaited, waited=seconds
        )

    async def _why(self, gone: _Gone, what: str) -> FaninError:
        """Return why a connection ended: its rank said so, or the services know it soon."""
        deadline = self.loop.time() + LOSS_TIMEOUT
        while self.loop.time() < deadline:
            if self._over is not None:
                return self._over
            failure = self._client.failure()
            if failure is not None and not isinstance(failure, RankLeft):
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
            await self.loop.sock_sendall(link, _HELLO.pack(self.rank, kind) + peer.key)
        except BaseException:
            link.close()
            raise
        return link

    async def _accept(self) -> None:
        while True:
            if len(self._strangers) >= STRANGERS_MAX:
                await asyncio.wait(self._strangers, return_when=asyncio.FIRST_COMPLETED)
            try:
                link, _ = await self.loop.sock_accept(self._listener)
            except OSError:  # out of descriptors, or whoever came has gone
                await asyncio.sleep(PAUSE)
                continue
            task = self.loop.create_task(self._greet(link))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _greet(self, link: socket.socket) -> None:
        """Take a connection whose other end has the key of the rank that it says it is."""
        kept = False
        try:
            link.setblocking(False)
            async with asyncio.timeout(HELLO_TIMEOUT):
                hello = await self._exactly(link, _HELLO.size + _KEY_BYTES)
                rank, kind = _HELLO.unpack(hello[: _HELLO.size])
                known = rank < len(self._peers) and secrets.compare_digest(
                    hello[_HELLO.size :], self._peers[rank].key
                )
                if known and kind == FAREWELL:
                    await self._hear(rank, *await self.header(link))
                elif known and self._over is None and not self._in[rank, kind].done():
                    self._in[rank, kind].set_result(link)
                    kept = True
        except (OSError, EOFError, TimeoutError, ValueError):
            pass
        finally:
            if not kept:
                link.close()

    async def _hear(self, rank: int, kind: str, text: str, fields: dict[str, Any]) -> None:
        """Hear from a rank why it exchanges nothing any more."""
        error: FaninError = getattr(errors, kind)(f"rank {rank}: {text}", **fields)
        await self._end(error, tells=False)

    async def _exactly(self, link: socket.socket, count: int) -> bytes:
        memory = bytearray(count)
        await _fill(self.loop, link, memoryview(memory))
        return bytes(memory)


class _Gone(Exception):  # noqa: N818 - not an error of its own: a rank's end is asked for
    def __init__(self, peer: int, cause: Exception) -> None:
        super().__init__(peer)
        self.peer = peer
        self.cause = cause


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Tell which rank an end of a connection was of."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise _Gone(peer, error) from error


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


def _header(*said: Any) -> bytes:
    text = json.dumps(said).encode()
    return _LENGTH.pack(len(text)) + text


def _listening(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def _place(like: Array) -> Array:
    """Return memory in one piece for something of a shape and a dtype."""
    return np.empty(like.shape, like.dtype)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _name(dtype: np.dtype[Any]) -> str:
    """Return a name of a dtype: NumPy's own, or that which another package gave it."""
    try:
        own = np.dtype(dtype.str) == dtype
    except TypeError:
        own = False
    return dtype.str if own else dtype.name


def _dtype(name: str, source: int) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise FaninError(
            f"rank {source} sent dtype {name}, which this process does not know: give out= with "
            "that dtype, or import the package that has it"
        ) from None
    return found


def _again(error: FaninError) -> FaninError:
    """Return an error anew: without the frames that it was raised in."""
    return type(error)(error.message, **_fields(error))


def _fields(error: FaninError) -> dict[str, Any]:
    simple = (str, int, float, list, type(None))
    return {
        name: value
        for name, value in vars(error).items()
        if name != "message" and isinstance(value, simple)
    }
