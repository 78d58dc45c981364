"""The joining handshake: a model of ranks that die at any step, and torch's own stores."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fanin import _handshake as handshake
from fanin._handshake import Absent, Terms, agree
from ranks import DEADLINE
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore


class Killed(BaseException):
    """What a process of the model feels when it is killed: nothing of it runs any more."""


class Process:
    """One rank of one attempt, in a thread that takes a step only when it is told to."""

    def __init__(self, world: World, rank: int, world_size: int) -> None:
        self.rank = rank
        self.terms: Terms | None = None
        self._world = world
        self._turn = threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, args=(world_size,), daemon=True)
        self._thread.start()
        world.yielded.acquire()

    def _run(self, world_size: int) -> None:
        try:
            self.step()
            job = f"job of {id(self)}"
            self.terms = agree(
                self, self.rank, world_size, lambda: (job, None), DEADLINE, lambda _: self.step()
            )
        except Killed:
            pass
        finally:
            self._world.yielded.release()

    def step(self) -> None:
        """Ends the process's turn, and waits for the next one."""
        self._world.yielded.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def give_turn_if_running(self) -> None:
        if self.runs():
            self.give_turn()

    def give_turn(self) -> None:
        self._turn.release()
        self._world.yielded.acquire()

    def kill(self) -> None:
        self._killed = True
        if self.runs():
            self.give_turn()
        self._thread.join(DEADLINE)

    def runs(self) -> bool:
        return self._thread.is_alive() and self.terms is None

    # The store, each operation of which is a step.

    def set(self, key: str, value: str, /) -> None:
        self.step()
        self._world.keys[key] = value

    def get(self, key: str, /) -> bytes:
        self.step()
        return self._world.keys[key].encode()

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str], /) -> bool:
        self.step()
        return all(key in self._world.keys for key in keys)


class World:
    """A store that outlives everybody, and the processes that run now."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.yielded = threading.Semaphore(0)

    def attempt(self, world_size: int) -> list[Process]:
        return [Process(self, rank, world_size) for rank in range(world_size)]


STEPS_MAX = 20_000


def play(dice: random.Random) -> None:
    """Some attempts that die at any step, in worlds of several sizes; then one that lives."""
    world = World()
    for _ in range(dice.randrange(4)):
        processes = world.attempt(dice.randrange(2, 6))
        for _ in range(dice.randrange(200)):
            dice.choice(processes).give_turn_if_running()
        for process in processes:
            process.kill()
    world_size = dice.randrange(2, 6)
    processes = world.attempt(world_size)
    # Before the last of them does anything, others die and are replaced, one process at a time.
    late = dice.randrange(world_size)
    for _ in range(dice.randrange(4)):
        rank = dice.choice([rank for rank in range(world_size) if rank != late])
        for _ in range(dice.randrange(60)):
            other = dice.choice([rank for rank in range(world_size) if rank != late])
            processes[other].give_turn_if_running()
        processes[rank].kill()
        processes[rank] = Process(world, rank, world_size)
    for _ in range(STEPS_MAX):
        running = [process for process in processes if process.runs()]
        if not running:
            break
        dice.choice(running).give_turn()
    else:
        for process in processes:
            process.kill()
        pytest.fail("the last attempt hangs")
    assert len({process.terms for process in processes}) == 1
    assert processes[0].terms is not None
    assert processes[0].terms.job == f"job of {id(processes[0])}"
    # A reader of the store does not learn by which name a rank joins.
    assert not any("job of" in said for said in world.keys.values())


SEEDS = 300


@pytest.mark.parametrize("seed", range(0, SEEDS, 50))
def test_the_last_attempt_agrees_whatever_died_before_it(seed: int) -> None:
    for each in range(seed, seed + 50):
        try:
            play(random.Random(each))
        except BaseException:
            print(f"play(random.Random({each})) fails")
            raise


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """A store as each rank opens it."""
    if request.param == "tcp":
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: TCPStore("127.0.0.1", server.port, is_master=False)
    elif request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), -1)
    else:
        shared = HashStore()
        yield lambda: shared


def in_threads(world_size: int, body: Callable[[int], Terms]) -> list[Terms]:
    outcomes: dict[int, Terms] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: outcomes.update({rank: body(rank)}))
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return [outcomes[rank] for rank in range(world_size)]


def test_dead_attempts_of_any_size_are_not_taken_for_the_living(
    store: Callable[[], Store],
) -> None:
    seen: set[str] = set()
    for attempt, world_size in enumerate([4, 3, 4, 2]):
        # Only some ranks of this attempt's predecessor came to the store, and died there.
        for rank in range(1, world_size, 2):
            handshake._Asks(PrefixStore("group", store()), rank, world_size)
        stale = handshake._Decides(PrefixStore("group", store()), 2, lambda: ("dead", None))
        stale.look()
        del stale

        def body(rank: int, world_size: int = world_size, attempt: int = attempt) -> Terms:
            mine = PrefixStore("group", store())
            return agree(mine, rank, world_size, lambda: (f"job {attempt}", "box:1"), DEADLINE)

        terms = in_threads(world_size, body)
        assert len(set(terms)) == 1
        assert (terms[0].job, terms[0].switch) == (f"job {attempt}", "box:1")
        seen.add(terms[0].token)
    assert len(seen) == 4


def test_groups_of_one_store_do_not_meet() -> None:
    shared = HashStore()

    def body(rank: int) -> Terms:
        group = rank % 2
        mine = PrefixStore(f"group {group}", shared)
        return agree(mine, rank // 2, 2, lambda: (f"job {group}", None), DEADLINE)

    terms = in_threads(4, body)
    assert terms[0] == terms[2]
    assert terms[1] == terms[3]
    assert [each.job for each in terms[:2]] == ["job 0", "job 1"]


@pytest.mark.parametrize(("rank", "absent"), [(0, [1, 2]), (1, [0])])
def test_who_does_not_come_is_named(rank: int, absent: list[int]) -> None:
    with pytest.raises(Absent) as caught:
        agree(HashStore(), rank, 3, lambda: ("job", None), 0.05)
    assert caught.value.ranks == absent


def test_a_third_rank_that_does_not_come_is_named_by_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = HashStore()
    named: dict[int, list[int]] = {}
    # Time passes once both have looked again after rank 1 had acknowledged, by the third key.
    met: set[int] = set()

    def now() -> float:
        return time.monotonic() + (2 * DEADLINE if met == {0, 1} else 0)

    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=now))

    def body(rank: int) -> None:
        def pause(seconds: float) -> None:
            if shared.num_keys() == 3:
                met.add(rank)
            time.sleep(seconds)

        try:
            agree(shared, rank, 3, lambda: ("job", None), DEADLINE, pause)
        except Absent as absent:
            named[rank] = absent.ranks

    threads = [threading.Thread(target=body, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert named == {0: [2], 1: [2]}


class Asked:
    """A store that counts what is asked of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.questions: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.questions[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("prefixed", [False, True])
def test_what_all_ranks_say_is_read_in_one_question(prefixed: bool) -> None:
    store: Store = HashStore()
    if prefixed:
        store = PrefixStore("attempt/", store)
    for rank in range(1, 1000):
        store.set(f"place/{rank}", f"of {rank}")
    asked = Asked(store)
    said = handshake.gather(cast(handshake.Store, asked), 0, 1000, "place", "of 0", DEADLINE)
    assert said == [f"of {rank}" for rank in range(1000)]
    assert sum(asked.questions.values()) == 3, "to say it, to see that all are there, to read it"


def test_a_rank_that_does_not_say_where_it_is_is_named() -> None:
    store = HashStore()
    with pytest.raises(handshake.Absent) as caught:
        handshake.gather(store, 1, 3, "place", "here", 0.05)
    assert caught.value.ranks == [0, 2]
    store.set("place/0", "a")
    store.set("place/2", "c")
    assert handshake.gather(store, 1, 3, "place", "b", 0.05) == ["a", "b", "c"]
