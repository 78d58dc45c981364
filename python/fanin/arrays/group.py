"""A job's ranks and their collectives of arrays."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from fanin import _fanin
from fanin._layers import of_priority
from fanin._membership import Connected
from fanin.arrays import operators
from fanin.arrays.operators import SUMS, Array, Op
from fanin.arrays.peers import Body, Exchange, Peers, Transfer
from fanin.errors import CollectiveMismatch, FaninError

# Up to so many bytes the root of a broadcast sends to each rank; beyond, the ranks send on parts.
STAR_BYTES_MAX = 1 << 14


class Handle:
    """A collective under way. Its arrays must not be touched before `wait` returns."""

    def __init__(
        self,
        group: Group,
        pending: _fanin.Pending | Transfer,
        finish: Callable[[], Any],
        keep: object = None,
    ) -> None:
        self._group = group  # a group that nobody holds is closed, and what is under way fails
        self._pending = pending
        self._finish: Callable[[], Any] | None = finish
        self._keep = keep
        self._lock = threading.Lock()
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it is over, and return what the collective returns.

        `timeout` is in seconds; without it the group's timeout applies. Raises the typed error of
        `fanin.errors` if the collective failed.
        """
        self._pending.wait(timeout)
        with self._lock:  # two threads may wait; the copy back is done once
            if self._finish is not None:
                self._result = self._finish()
                self._finish = self._keep = None
        return self._result

    def loss(self) -> float:
        """Which part of the ranks' contributions is not in the sum: 0.0 without `loss_bound`.

        The same on every rank. Raises `RuntimeError` where there is no sum (yet).
        """
        told = self._pending.loss()
        if told is None:
            raise RuntimeError("the collective is under way, or failed: call wait() first")
        contributions, lost, _, _ = told
        return lost / contributions if contributions else 0.0

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._pending.done()


class Group:
    """A job's ranks, as seen by one of them. Made by `connect`; a context manager.

    Every rank calls the same collectives in the same order, each with arrays of one shape and
    dtype (docs/arrays.md says how much of that is compared). An array is NumPy's, or whatever hands
    its memory over by DLPack or as a buffer: an array of JAX, a tensor of torch, a list of numbers.
    Results are NumPy arrays, which DLPack hands on. `out` is the NumPy array for the result.
    Without it a NumPy array that was given and can be written to takes the result of `all_reduce`,
    `reduce` and `broadcast`. Everything else that was given stays as it is, and the result is a new
    array.

    Each collective has a form that returns at once: `all_reduce_async` and so on, which return a
    `Handle`. Several may be under way.

    The services sum, and do the other collectives where they can. The rest goes over TCP from rank
    to rank: other operators and dtypes, `all_to_all`, `gather`, `scatter`, `send`, `receive`. Those
    bytes are neither encrypted nor authenticated, so a job whose `security` asks for that has none
    of it. A rank may leave once the others have what it sent (`barrier`).

    Raised are `TypeError` for a dtype, `ValueError` for an operator, a root or a shape, and
    `fanin.errors`. After a `KeyboardInterrupt` a collective is still under way and writes into its
    arrays: leave them alone until the group is closed.
    """

    def __init__(
        self,
        connected: Connected,
        peers: Peers | None,
        new: NewGroup | None = None,
        why_no_peers: str = "",
        wire_dtype: str | None = None,
    ) -> None:
        self._client = connected.client
        self._peers = peers
        self._why_no_peers = why_no_peers
        self._new = new
        self.wire_dtype = wire_dtype
        """How large floats travel; None where nothing was said."""
        self._groups = 0
        # Also at exit: who hosts a service leaves before that waits for the others to leave.
        self._close = weakref.finalize(self, connected.close) if connected.hosted else None

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._client.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._client.world_size

    @property
    def client(self) -> _fanin.Client:
        """The membership itself, for what this class does not offer."""
        return self._client

    def all_reduce(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Array | None = None,
        priority: int = 0,
        loss_bound: float | None = None,
    ) -> Array:
        """Combine the ranks' arrays element by element, and return the result on all ranks.

        `op` is "sum", "avg", "min", "max", "product", or of the bits "band", "bor", "bxor". The
        services do "sum" and "avg" of float64, float32, float16 (and bfloat16 of ml_dtypes), int64,
        int32, int8, uint8; by ATP and GOAT of float32, float16, bfloat16 and int32. The bits are
        the same on all ranks. Integers wrap as NumPy's do, and "avg" of them rounds towards zero;
        how far a sum of floats may be off, `connect` says.

        `priority`, from 0 to 6 and the same on all ranks, is for jobs with a `loss_bound`: what has
        0 goes first, on ranks and switches and at routers that look at it (docs/operations.md).
        `loss_bound` is how much of this array may be lost there, in place of what `connect` said.
        """
        return cast(
            "Array",
            self.all_reduce_async(
                array, op, out=out, priority=priority, loss_bound=loss_bound
            ).wait(),
        )

    def all_reduce_async(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Array | None = None,
        priority: int = 0,
        loss_bound: float | None = None,
    ) -> Handle:
        """As `all_reduce`, but returns at once."""
        given = operators.read(array)
        op = operators.checked(op, given.dtype)
        layer = of_priority(priority)
        result = operators.result_for(array, given, out)
        if self._sums(op, given.dtype):
            return self._served(
                [result],
                "all_reduce",
                op,
                lambda: result,
                back=[result],
                layer=layer,
                loss_bound=loss_bound,
            )

        async def body(exchange: Exchange) -> Array:
            flat = np.ascontiguousarray(result).reshape(-1)
            slices = np.array_split(flat, exchange.world_size)
            parts = await exchange.swap(slices, exchange.alike(slices))
            mine = operators.combined(op, _copied(parts))
            whole = np.concatenate(await exchange.swap([mine] * exchange.world_size, slices))
            result[...] = whole.reshape(result.shape)
            return result

        return self._among(f"all_reduce {op}", body)

    def reduce(
        self, array: Any, root: int = 0, op: Op = "sum", *, out: Array | None = None
    ) -> Array | None:
        """As `all_reduce`, for the rank `root` alone; return None elsewhere, and change nothing."""
        return cast("Array | None", self.reduce_async(array, root, op, out=out).wait())

    def reduce_async(
        self, array: Any, root: int = 0, op: Op = "sum", *, out: Array | None = None
    ) -> Handle:
        """As `reduce`, but returns at once."""
        given = operators.read(array)
        op, is_root = operators.checked(op, given.dtype), self._checked(root) == self.rank
        # The services are handed memory that they may write to.
        kept = _whole(given) if given.flags.writeable else given.copy()
        result = operators.result_for(array, given, out) if is_root else kept
        if self._has_roots and self._sums(op, given.dtype):
            return self._served(
                [result],
                "reduce",
                op,
                lambda: result if is_root else None,
                root=root,
                back=[result] if is_root else [],
            )

        async def body(exchange: Exchange) -> Array | None:
            flat = np.ascontiguousarray(result).reshape(-1)
            slices = np.array_split(flat, exchange.world_size)
            parts = await exchange.swap(slices, exchange.alike(slices))
            whole = await exchange.to_root(operators.combined(op, _copied(parts)), root)
            if whole is None:
                return None
            result[...] = np.concatenate(whole).reshape(result.shape)
            return result

        return self._among(f"reduce {op} to rank {root}", body)

    def broadcast(self, array: Any, root: int = 0, *, out: Array | None = None) -> Array:
        """Return on all ranks what the rank `root` gives. The others give what has its shape."""
        return cast("Array", self.broadcast_async(array, root, out=out).wait())

    def broadcast_async(self, array: Any, root: int = 0, *, out: Array | None = None) -> Handle:
        """As `broadcast`, but returns at once."""
        given = operators.read(array)
        is_root = self._checked(root) == self.rank
        # The root gives alone: what it gave may stay as it is.
        result = operators.result_for(array, given, out)
        if self._has_roots:
            back = [] if is_root else [result]
            return self._served([result], "broadcast", None, lambda: result, root=root, back=back)

        async def body(exchange: Exchange) -> Array:
            flat = np.ascontiguousarray(result).reshape(-1)
            if flat.nbytes <= STAR_BYTES_MAX:
                parts = await exchange.from_root([flat] * exchange.world_size, flat, root)
            else:
                slices = np.array_split(flat, exchange.world_size)
                mine = await exchange.from_root(slices, slices[exchange.rank], root)
                parts = np.concatenate(await exchange.swap([mine] * exchange.world_size, slices))
            if not is_root:
                result[...] = parts.reshape(result.shape)
            return result

        return self._among(f"broadcast from rank {root}", body)

    def all_gather(self, array: Any, *, out: Array | None = None) -> Array:
        """Return the ranks' arrays on all ranks, one behind the other along the first axis.

        Arrays of shape (k, ...) make one of (world size x k, ...), numbers one of (world size,).
        """
        return cast("Array", self.all_gather_async(array, out=out).wait())

    def all_gather_async(self, array: Any, *, out: Array | None = None) -> Handle:
        """As `all_gather`, but returns at once."""
        given = np.atleast_1d(operators.read(array))
        rows, world_size = given.shape[0], self.world_size
        result = _out(out, given, rows * world_size)
        if self._has_roots:
            whole = result if operators.in_one_piece(result) else np.empty_like(result, order="C")
            slices = [whole[rows * rank :][:rows] for rank in range(world_size)]
            slices[self.rank][...] = given

            def finish() -> Array:
                if whole is not result:
                    result[...] = whole
                return result

            return self._served(slices, "all_gather", None, finish)

        async def body(exchange: Exchange) -> Array:
            parts = await exchange.swap([_whole(given)] * world_size, [given] * world_size)
            result[...] = np.concatenate(parts)
            return result

        return self._among("all_gather", body)

    def reduce_scatter(self, array: Any, op: Op = "sum", *, out: Array | None = None) -> Array:
        """Combine as `all_reduce`, and return each rank's part of the first axis on that rank.

        Arrays of shape (world size x k, ...) make one of (k, ...). The arrays are left as they are.
        """
        return cast("Array", self.reduce_scatter_async(array, op, out=out).wait())

    def reduce_scatter_async(
        self, array: Any, op: Op = "sum", *, out: Array | None = None
    ) -> Handle:
        """As `reduce_scatter`, but returns at once."""
        given = operators.read(array)
        op = operators.checked(op, given.dtype)
        rows = operators.rows_of(given.shape, self.world_size, "reduce_scatter")
        result = _out(out, given, rows)
        # The array stays as it is. This rank's part is a copy; the others are only read.
        slices = [given[rows * rank :][:rows] for rank in range(self.world_size)]
        mine = slices[self.rank].copy()
        slices[self.rank] = mine
        if self._has_roots and self._sums(op, given.dtype):

            def finish() -> Array:
                result[...] = mine
                return result

            return self._served(slices, "reduce_scatter", op, finish, keep=given)

        async def body(exchange: Exchange) -> Array:
            parts = await exchange.swap([_whole(part) for part in slices], exchange.alike(slices))
            result[...] = operators.combined(op, _copied(parts))
            return result

        return self._among(f"reduce_scatter {op}", body)

    def all_to_all(
        self, array: Any, rows: Sequence[int] | None = None, *, out: Array | None = None
    ) -> Array:
        """Send each rank its part of the first axis, and return what all ranks send to this one.

        The parts are equal, or have so many `rows` each, which the ranks need not know of each
        other. The result has them in the order of the ranks.
        """
        return cast("Array", self.all_to_all_async(array, rows, out=out).wait())

    def all_to_all_async(
        self, array: Any, rows: Sequence[int] | None = None, *, out: Array | None = None
    ) -> Handle:
        """As `all_to_all`, but returns at once."""
        given = operators.read(array)
        if rows is None:
            each = operators.rows_of(given.shape, self.world_size, "all_to_all")
            counts = [each] * self.world_size
        else:
            counts = [int(count) for count in rows]
            length = given.shape[0] if given.ndim else 0
            if len(counts) != self.world_size or min(counts) < 0 or sum(counts) != length:
                raise ValueError(
                    f"rows are {counts}: give one number a rank of {self.world_size}, {length} "
                    "together, as the array has on its first axis"
                )
        cuts = np.cumsum([0, *counts])
        parts = [given[cuts[rank] : cuts[rank + 1]] for rank in range(self.world_size)]
        if rows is None and out is not None:
            operators.fitting(out, given)

        async def body(exchange: Exchange) -> Array:
            likes = exchange.alike(parts) if rows is None else None
            swapped = await exchange.swap([_whole(part) for part in parts], likes)
            for sender, part in enumerate(swapped):
                if (part.dtype, part.shape[1:]) != (given.dtype, given.shape[1:]):
                    raise CollectiveMismatch(
                        f"all_to_all: rank {sender} sent rows of {part.shape[1:]} of {part.dtype}, "
                        f"and this rank's are {given.shape[1:]} of {given.dtype}"
                    )
            came = np.concatenate(swapped)
            if out is None:
                return came
            operators.fitting(out, came)[...] = came
            return out

        return self._among("all_to_all", body)

    def gather(self, array: Any, root: int = 0, *, out: Array | None = None) -> Array | None:
        """As `all_gather`, for the rank `root` alone; return None elsewhere."""
        return cast("Array | None", self.gather_async(array, root, out=out).wait())

    def gather_async(self, array: Any, root: int = 0, *, out: Array | None = None) -> Handle:
        """As `gather`, but returns at once."""
        given = np.atleast_1d(operators.read(array))
        is_root = self._checked(root) == self.rank
        result = _out(out, given, given.shape[0] * self.world_size) if is_root else None

        async def body(exchange: Exchange) -> Array | None:
            parts = await exchange.to_root(_whole(given), root, given)
            if result is None or parts is None:
                return None
            result[...] = np.concatenate(parts)
            return result

        return self._among(f"gather to rank {root}", body)

    def scatter(self, array: Any = None, root: int = 0, *, out: Array | None = None) -> Array:
        """Return each rank's equal part of the first axis of what the rank `root` gives."""
        return cast("Array", self.scatter_async(array, root, out=out).wait())

    def scatter_async(
        self, array: Any = None, root: int = 0, *, out: Array | None = None
    ) -> Handle:
        """As `scatter`, but returns at once."""
        parts: list[Array] = []
        if self._checked(root) == self.rank:
            given = operators.read(array)
            rows = operators.rows_of(given.shape, self.world_size, "scatter")
            parts = [_whole(given[rows * rank :][:rows]) for rank in range(self.world_size)]

        async def body(exchange: Exchange) -> Array:
            came = await exchange.from_root(parts, None, root)
            target = np.empty_like(came) if out is None else operators.fitting(out, came)
            target[...] = came
            return target

        return self._among(f"scatter from rank {root}", body)

    def send(self, array: Any, to: int) -> None:
        """Send to one rank, whose k-th `receive` from this rank gets this rank's k-th `send`."""
        self.send_async(array, to).wait()

    def send_async(self, array: Any, to: int) -> Handle:
        """As `send`, but returns at once."""
        given = _whole(operators.read(array))
        peers = self._with_peers(f"send to rank {self._other(to)}")
        return Handle(self, peers.send(to, given), _nothing, given)

    def receive(self, source: int, *, out: Array | None = None) -> Array:
        """Return what one rank sends to this one, in `out` if that is given."""
        return cast("Array", self.receive_async(source, out=out).wait())

    def receive_async(self, source: int, *, out: Array | None = None) -> Handle:
        """As `receive`, but returns at once."""
        peers = self._with_peers(f"receive from rank {self._other(source)}")
        into = None if out is None else operators.writable(out)
        if into is not None and not operators.in_one_piece(into):
            into = None
        pending = peers.receive(source, into)

        def finish() -> Array:
            came = cast("Array", pending.result())
            if out is None or came is out:
                return came
            operators.fitting(out, came)[...] = came
            return out

        return Handle(self, pending, finish, out)

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        self.all_reduce(np.zeros(1, np.int32))

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Make groups of the ranks that name the same color, in the order of their keys.

        All ranks of this group call it. Ranks of one key keep their order. A rank without a color
        is in none of the groups, and gets None.
        """
        if color is not None and color < 0:
            raise ValueError(f"color is {color}: give a number from 0, or None for no group")
        peers, new = self._with_peers("split"), self._new
        assert new is not None
        self._groups += 1
        said = np.array([-1 if color is None else color, key], np.int64)
        colors = self.all_gather(said).reshape(-1, 2)
        if color is None:
            return None
        members = sorted(np.flatnonzero(colors[:, 0] == color), key=lambda rank: colors[rank, 1])
        ranks = [int(rank) for rank in members]

        def gather(name: str, text: str, left: float) -> list[str]:
            return _said_among(peers, ranks, name, text, left)

        return new(gather, f"{self._groups}.{color}", ranks.index(self.rank), len(ranks))

    @property
    def plan(self) -> _fanin.JobPlan | None:
        """How the job is shared among its services, and how they fare; None once it is closed.

        A dict: `services`, of each a dict of `service` ("HOST:PORT") and `share` of all arrays;
        `measured`, the seconds that a byte of large arrays took of late as it travels, None before
        the first; `imbalance`, by how much a service misses its share of the packets, at most.
        """
        return self._client.plan

    def statistics(self) -> dict[str, int]:
        """Counters of this membership: packets, retransmissions, ..."""
        return self._client.statistics()

    def close(self) -> None:
        """Leaves the job; what is outstanding fails with `fanin.errors.Closed`. Idempotent."""
        if self._peers is not None:
            self._peers.close()
        self._client.close()
        if self._close is not None:
            self._close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _has_roots(self) -> bool:
        return self._client.has_roots

    def _sums(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether the services combine so: alike on all ranks."""
        return op in SUMS and dtype.name in self._client.dtypes

    def _checked(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise ValueError(f"rank {root} is not in a group of {self.world_size}")
        return root

    def _other(self, rank: int) -> int:
        if self._checked(rank) == self.rank:
            raise ValueError(f"rank {rank} is this rank, which sends to others")
        return rank

    def _served(
        self,
        parts: Sequence[Array],
        collective: _fanin.Collective,
        op: Op | None,
        finish: Callable[[], Any],
        *,
        root: int = 0,
        back: Sequence[Array] = (),
        layer: tuple[int, int] | None = None,
        loss_bound: float | None = None,
        keep: object = None,
    ) -> Handle:
        """Have the services do it in place; into `back` goes what had to be copied."""
        memory = [part if operators.in_one_piece(part) else part.copy(order="C") for part in parts]
        copied = [
            (part, staged)
            for part, staged in zip(parts, memory, strict=True)
            if part is not staged and any(part is wanted for wanted in back)
        ]
        moved = op is None
        dtype = "uint8" if moved else cast("_fanin.DType", parts[0].dtype.name)
        pending = self._client.submit(
            [(part.ctypes.data, part.nbytes if moved else part.size) for part in memory],
            dtype,
            collective,
            root,
            op == "avg",
            (memory, keep),
            False,
            layer,
            loss_bound,
        )

        def finished() -> Any:
            for part, staged in copied:
                part[...] = staged.reshape(part.shape)
            return finish()

        return Handle(self, pending, finished)

    def _with_peers(self, what: str) -> Peers:
        if self._peers is None:
            raise FaninError(f"{what}: {self._why_no_peers}")
        return self._peers

    def _among(self, what: str, body: Body) -> Handle:
        """Have the ranks do it themselves."""
        pending = self._with_peers(what).collective(what, body)
        return Handle(self, pending, pending.result)


Gather = Callable[[str, str, float], list[str]]
NewGroup = Callable[[Gather, str, int, int], Group]
"""Makes a group of ranks that say things to each other: how, its name, this rank, how many."""


def _said_among(peers: Peers, ranks: Sequence[int], name: str, text: str, left: float) -> list[str]:
    """Return what each of some ranks says."""
    said = np.frombuffer(text.encode(), np.uint8)

    async def body(exchange: Exchange) -> list[Array]:
        return await exchange.swap_among(ranks, [said] * len(ranks))

    pending = peers.collective(f"split: {name}", body)
    pending.wait(max(left, 0.0))
    return [bytes(each).decode() for each in pending.result()]


def _out(out: Array | None, like: Array, rows: int) -> Array:
    if out is None:
        return np.empty((rows, *like.shape[1:]), like.dtype)
    return operators.fitting(out, like, rows)


def _whole(array: Array) -> Array:
    return array if operators.in_one_piece(array) else array.copy(order="C")


def _copied(parts: list[Array]) -> list[Array]:
    """Return parts of which the first may be written to."""
    return [parts[0].copy(), *parts[1:]]


def _nothing() -> None:
    return None
