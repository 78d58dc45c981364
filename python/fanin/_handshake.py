"""How the ranks of a group find each other in a store that outlives them.

A store (torchrun's, over `--max-restarts`; a file; any one, over destroy + init) holds what ranks
wrote that have died since, in worlds of other sizes too. So nothing is counted, and nothing is read
under a name that two attempts share, but for one key a rank, whose old content does no harm:

    rank r    asks/r        = a fresh token, for each attempt a new one
    rank 0    answer/token  = its own fresh token and its terms, for whatever it finds in asks/r;
                              the job's name is sealed, so that the asking rank alone can read it
    rank r    ack/token0/r  = its token, once it has read an answer
    rank 0    go/token0     once each rank has acknowledged with the token that now stands in asks/r
    rank r    goes on once it reads go/token0

What a dead rank left in asks/r is answered under a token that nobody waits for; when the living one
has replaced it, rank 0, which looks until all have acknowledged, answers again. Every other key has
a fresh token in its name. A rank that is replaced before the go, rank 0 among them, is waited for.
One process at a time plays a rank: launchers end an attempt before they start the next.

A token is a public key (`_fanin.Exchange`). So who only reads the store does not learn the name by
which a rank joins the job: whoever says it first is that rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fanin import _fanin

# Between two looks at the store, in seconds: soon enough for a group, rarely enough for a store
# that many ranks ask.
PAUSE_MIN: Final = 0.001
PAUSE_MAX: Final = 0.05
PAUSE_GROWTH: Final = 1.5


class Store(Protocol):
    """What is asked of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Put the value there, in place of any other."""

    def get(self, key: str, /) -> bytes:
        """Return the value; it is there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values; they are there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""


@dataclass(frozen=True)
class Terms:
    """What rank 0 decides, and all ranks agree on."""

    token: str
    """Fresh: no other attempt has it."""
    job: str
    switch: str | None


class Absent(Exception):  # noqa: N818 - not an error of its own: the caller names the group
    """These ranks did not take part in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = list(ranks)


def agree(
    store: Store,
    rank: int,
    world_size: int,
    decide: Callable[[], tuple[str, str | None]],
    timeout: float,
    pause: Callable[[float], None] = time.sleep,
) -> Terms:
    """Return the same terms on every rank; `decide` makes job and switch, on rank 0.

    Raises `Absent` after `timeout` seconds, and what the store raises.
    """
    deadline = time.monotonic() + timeout
    side: _Decides | _Asks = (
        _Decides(store, world_size, decide) if rank == 0 else _Asks(store, rank, world_size)
    )
    wait = PAUSE_MIN
    while (terms := side.look()) is None:
        if time.monotonic() >= deadline:
            raise Absent(side.absent())
        pause(wait)
        wait = min(wait * PAUSE_GROWTH, PAUSE_MAX)
    return terms


def gather(
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    text: str,
    timeout: float,
    pause: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Return what each rank says under `name`; `store` is one that no other attempt uses.

    Raises `Absent` after `timeout` seconds, and what the store raises.
    """
    keys = [f"{name}/{other}" for other in range(world_size)]
    store.set(keys[rank], text)
    deadline = time.monotonic() + timeout
    wait = PAUSE_MIN
    while not store.check(keys):
        if time.monotonic() >= deadline:
            raise Absent([other for other in range(world_size) if not store.check([keys[other]])])
        pause(wait)
        wait = min(wait * PAUSE_GROWTH, PAUSE_MAX)
    # In one question: as many as there are ranks, of each rank, would keep the store busy.
    return [text.decode() for text in store.multi_get(keys)]


class _Decides:
    """Rank 0."""

    def __init__(
        self, store: Store, world_size: int, decide: Callable[[], tuple[str, str | None]]
    ) -> None:
        self._store = store
        self._others = range(1, world_size)
        self._exchange = _fanin.Exchange()
        self._terms = Terms(self._exchange.public, *decide())
        self._answered: set[str] = set()
        self._absent: list[int] = list(self._others)

    def look(self) -> Terms | None:
        self._absent = [rank for rank in self._others if not self._has_acknowledged(rank)]
        if self._absent:
            return None
        self._store.set(_go(self._terms.token), "1")
        return self._terms

    def absent(self) -> list[int]:
        return self._absent

    def _has_acknowledged(self, rank: int) -> bool:
        token = _read(self._store, _asks(rank))
        if token is None:
            return False
        if token not in self._answered:
            terms = self._terms
            try:
                sealed = self._exchange.seal(token, terms.job)
            except ValueError:
                return False  # nobody waits under what is no token
            self._store.set(_answer(token), json.dumps([terms.token, sealed, terms.switch]))
            self._answered.add(token)
        return _read(self._store, _ack(self._terms.token, rank)) == token


class _Asks:
    """Every other rank."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._exchange = _fanin.Exchange()
        self._token = self._exchange.public
        self._terms: Terms | None = None
        store.set(_asks(rank), self._token)

    def look(self) -> Terms | None:
        answer = _read(self._store, _answer(self._token))
        if answer is None:
            return None
        token, sealed, switch = json.loads(answer)
        terms = self._terms
        if terms is None or token != terms.token:
            # The first answer, or that of a rank 0 which took the place of one that died.
            terms = self._terms = Terms(token, self._exchange.open(token, sealed), switch)
            self._store.set(_ack(token, self._rank), self._token)
        return terms if self._store.check([_go(terms.token)]) else None

    def absent(self) -> list[int]:
        if self._terms is None:
            return [0]
        others = (rank for rank in range(1, self._world_size) if rank != self._rank)
        return [rank for rank in others if not self._store.check([_ack(self._terms.token, rank)])]


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _asks(rank: int) -> str:
    return f"fanin/asks/{rank}"


def _answer(token: str) -> str:
    return f"fanin/answer/{token}"


def _ack(token_of_rank_0: str, rank: int) -> str:
    return f"fanin/ack/{token_of_rank_0}/{rank}"


def _go(token_of_rank_0: str) -> str:
    return f"fanin/go/{token_of_rank_0}"
