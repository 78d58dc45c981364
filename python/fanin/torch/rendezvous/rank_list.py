"""Whether the ranks of a new group were given the same list of ranks.

Torch names a group by how many were made before it, so that groups of different lists have one
name, and one part of the store. Each list has a part of its own here: nobody meets a rank that was
given another list. And each rank says its list to all, under the name of the group, so that those
who wait for it in vain learn why.

Old lists of a store that outlives its ranks tell nothing: they stand under another attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from fanin.errors import GroupMismatch

# An error shows so many ranks of a list.
SHOWN_MAX = 16


class Listed:
    """One rank's list: ranks of the default group, of which this is the one at `index`.

    `attempt` tells the default group from all others of the store; without it, nobody is told.
    """

    def __init__(
        self, store: Store, ranks: Sequence[int], index: int, group: str, attempt: str | None
    ) -> None:
        self._ranks = list(ranks)
        self._rank = self._ranks[index]
        self._group = group
        text = json.dumps(self._ranks)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.store = PrefixStore(f"ranks/{digest}/", store)
        """For those who were given this list."""
        self._lists = None if attempt is None else PrefixStore(f"lists/{attempt}/", store)
        self._other = f"other/{digest}"
        # Ranks whose list is not known yet. The first rank looks for the lists of all others, and
        # the others only for the first one's. Otherwise each rank would ask the store for each
        # other.
        others = self._ranks[1:] if index == 0 else self._ranks[:1]
        self._unheard = others if self._lists is not None else []
        if self._lists is not None:
            self._lists.set(str(self._rank), text)

    def look(self) -> None:
        """Raise `GroupMismatch` if a rank of this list was given another one."""
        if self._lists is None:
            return
        for rank in list(self._unheard):
            if not self._lists.check([str(rank)]):
                continue
            theirs = json.loads(self._lists.get(str(rank)))
            if theirs != self._ranks:
                self._lists.set(self._other, json.dumps([rank, theirs]))
                raise self._mismatch(rank, theirs)
            self._unheard.remove(rank)
        # The first one has found it out.
        if self._rank != self._ranks[0] and self._lists.check([self._other]):
            raise self._mismatch(*json.loads(self._lists.get(self._other)))

    def _mismatch(self, rank: int, theirs: list[int]) -> GroupMismatch:
        lists = {self._rank: self._ranks, rank: theirs}
        said = ", ".join(f"rank {of} was given {_shown(ranks)}" for of, ranks in lists.items())
        return GroupMismatch(
            f"group {self._group!r}: {said}; every rank must make the same groups, with the same "
            "ranks, in the same order",
            lists=lists,
        )


def _shown(ranks: list[int]) -> str:
    if len(ranks) <= SHOWN_MAX:
        return str(ranks)
    return f"{str(ranks[:SHOWN_MAX])[:-1]}, ...] ({len(ranks)} ranks)"
