"""Process sets: collectives among some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fanin.horovod.errors import Disagreement
from fanin.horovod.requests import Kind, Request
from fanin.horovod.world import World, is_current, world

DYNAMIC = "dynamic"


class ProcessSet:
    """Some ranks of the job, for `init(process_sets=[...])` or `add_process_set`.

    `ranks` are ranks of the world. Roots of broadcasts are, too, also within a set. Before it is
    added, and after it was removed, `process_set_id`, `size()` and `rank()` are None.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ValueError(f"a process set is made of ranks, not of {ranks!r}: there is no MPI")
        listed = sorted(ranks)
        if any(not isinstance(rank, int) for rank in listed):
            raise ValueError(f"{listed} are not ranks")
        self.ranks = listed
        self._added: tuple[World, int] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number in the job that it was added to, as long as that lasts."""
        if self._added is None or not is_current(self._added[0]):
            return None
        return self._added[1]

    def size(self) -> int | None:
        """Return the number of its ranks."""
        return None if self.process_set_id is None else len(self.all_ranks())

    def rank(self) -> int | None:
        """Return this process's place in it; raises `ValueError` where it has none."""
        if self.process_set_id is None:
            return None
        rank = world().position.rank
        if rank not in self.all_ranks():
            raise ValueError(f"rank {rank} is not in {self}")
        return self.all_ranks().index(rank)

    def included(self) -> bool:
        """Whether this process is in it."""
        return world().position.rank in self.all_ranks()

    def all_ranks(self) -> Sequence[int]:
        """Return its ranks, of the world's."""
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _World(ProcessSet):
    """All ranks; it is there as long as the job is."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> int:
        return 0

    def all_ranks(self) -> Sequence[int]:
        """Return all there are."""
        return range(world().position.size)


global_process_set: ProcessSet = _World()


def set_ranks(process_set: ProcessSet) -> Sequence[int]:
    """Return the ranks of a set that this process is in; raises `ValueError` for others."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not added: call hvd.add_process_set")
    process_set.rank()
    return process_set.all_ranks()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set. All ranks of the world call it, also those that are not in the set.

    Raises `ValueError` if there is one of the same ranks, and for what are no ranks.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    number = _agree(Kind.ADD_PROCESS_SET, process_set)
    process_set._added = world(), number
    world().sets[number] = process_set.all_ranks()
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the world call it. False for one that is not added."""
    if not process_set.process_set_id:
        return False
    del world().sets[_agree(Kind.REMOVE_PROCESS_SET, process_set)]
    process_set._added = None
    return True


def _agree(kind: Kind, process_set: ProcessSet) -> int:
    engine = world().engine
    ranks = tuple(process_set.all_ranks())
    handle = engine.submit(Request(0, kind, engine.name(0, kind), ranks=ranks))
    try:
        number = handle.wait()
    except Disagreement as error:
        raise ValueError(str(error)) from None
    assert isinstance(number, int)
    return number
