"""How the ranks of a torch group agree on a job and a switch, over the group's own store."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from fanin import _handshake as handshake
from fanin._join import check_rank, trusted
from fanin._membership import Connected, Ranks
from fanin._planes import GLOO_VARIABLE
from fanin._settings import Settings
from fanin.errors import FaninError, JoinTimeout
from fanin.torch.rendezvous.interface import own_address
from fanin.torch.rendezvous.rank_list import Listed

# Longest parts of a job's and of a group's name: a name has 128 bytes on the switch.
JOB_BYTES_MAX = 80
GROUP_MAX = 24
# torch's name of the default group.
DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for the others."""

    seconds: float
    """In all."""
    deadline: float
    """When they are over (`time.monotonic`)."""
    look: Callable[[], None] | None = None
    """Called now and then meanwhile; what it raises ends the wait."""
    tell: Callable[[BaseException], None] | None = None
    """Called with what ends the wait, before anything that others need is gone."""

    @classmethod
    def of(
        cls,
        seconds: float,
        look: Callable[[], None] | None = None,
        tell: Callable[[BaseException], None] | None = None,
    ) -> Patience:
        """Return patience that begins now."""
        return cls(seconds, time.monotonic() + seconds, look, tell)

    def left(self) -> float:
        """Return how many seconds are left."""
        return self.deadline - time.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep between two looks."""
        # The look comes before the sleep: all ranks learn some errors when the last one has spoken,
        # and each says them itself.
        if self.look is not None:
            self.look()
        # A store's own wait would look at nothing else meanwhile.
        time.sleep(seconds)


@dataclass(frozen=True)
class Membership:
    """What all ranks of a group share."""

    job: str
    """Unique among all runs on all machines: it carries a random number of rank 0."""
    switch: str | None
    """Rank 0's switch, None if it has none: for ranks that were told of none."""
    store: Store
    """A part of the group's store that no other attempt uses."""
    attempt: str
    """Fresh: no other attempt has it."""
    group: str
    """The group's name."""

    def connect(
        self,
        settings: Settings,
        rank: int,
        world_size: int,
        timeout: float,
        patience: Patience,
        measures_anew: bool = False,
        address: str = "",
    ) -> Connected:
        """Join the job; blocks until all ranks have. Raises the errors of `fanin.errors`.

        `timeout` is that of each all-reduce, in seconds. With `measures_anew` no rate of a link
        counts that was measured before. `address` is this machine's, if the ranks have met before.
        """

        def gather(name: str, text: str, left: float) -> list[str]:
            with naming_absent(self.group, patience.seconds):
                return handshake.gather(
                    self.store, rank, world_size, name, text, left, patience.pause
                )

        ranks = Ranks(
            job=self.job,
            name=self.job,
            who=f"group {self.group!r}",
            rank=rank,
            world_size=world_size,
            address=address or own_address(self.store),
            cure=f"Set {GLOO_VARIABLE} to the interface to the others",
            gather=gather,
            trust=trusted(settings),
            look=patience.look,
            tell=patience.tell,
            measures_anew=measures_anew,
        )
        # A rank's own switch first: it may reach it by another address than rank 0.
        own = replace(settings, switch=settings.switch or self.switch)
        # Also what looks at the store while the rank joins may find it gone.
        with naming_absent(self.group, patience.seconds):
            return ranks.connect(own, timeout, patience.deadline)


@contextlib.contextmanager
def naming_absent(group: str, waited: float) -> Iterator[None]:
    """Turn what the store lacks into an error that names the ranks of a group."""
    try:
        yield
    except handshake.Absent as absent:
        raise JoinTimeout(
            f"group {group!r}: {_named(absent.ranks)} did not say within {waited:g} s "
            "where they are; did they end?",
            missing_ranks=absent.ranks,
            waited=waited,
        ) from None
    except DistError as gone:
        raise _without_store(group, gone) from gone


def _without_store(group: str, error: DistError) -> FaninError:
    return FaninError(
        f"group {group!r}: the store where its ranks meet is gone: the process that hosts it, rank "
        f"0 or the launcher, ended; its log says why ({str(error).splitlines()[0]})"
    )


def new_job(job: str | None, group: str) -> str:
    """Return a name that no other run has for the job of a group: "train/group-1#5f0c9a3e".

    `job` is the setting; without it the program's name is taken. `group` is the group's name.
    """
    name = (job or _program()).encode()[:JOB_BYTES_MAX].decode(errors="ignore")
    kept = re.sub(r"[^A-Za-z0-9_.-]", "_", group)[:GROUP_MAX]
    if re.fullmatch("[0-9a-f]+", kept):
        kept = f"group-{kept[:8]}"  # a number, or a hash of the ranks
    return f"{name}{'' if group == DEFAULT_GROUP else f'/{kept}'}#{secrets.token_hex(4)}"


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.stem == "__main__" else path.stem
    return name if name.isprintable() and name not in ("", "-c", "-m") else "python"


def agree(
    store: Store,
    rank: int,
    world_size: int,
    group: str,
    settings: Settings,
    patience: Patience,
    listed: Listed | None = None,
) -> Membership:
    """Rank 0 decides, all agree; returns once every rank of this attempt is there.

    `listed` is what `new_group` was given. Raises `fanin.errors.JoinTimeout` if some rank does not
    come in time, `GroupMismatch` if one was given another list, and `RankOutOfRange` where no
    switch would serve so many.
    """
    check_rank(rank, world_size)
    if listed is not None:
        store = listed.store
        patience = replace(patience, look=listed.look)

    def decide() -> tuple[str, str | None]:
        return new_job(settings.job, group), settings.switch

    try:
        terms = handshake.agree(store, rank, world_size, decide, patience.left(), patience.pause)
    except handshake.Absent as absent:
        raise JoinTimeout(
            f"group {group!r}: {_named(absent.ranks)} did not join within {patience.seconds:g} s; "
            "does every rank make the same groups, in the same order?",
            missing_ranks=absent.ranks,
            waited=patience.seconds,
        ) from None
    except DistError as gone:
        raise _without_store(group, gone) from gone
    agreed = PrefixStore(f"fanin/{terms.token}/", store)
    return Membership(terms.job, terms.switch, agreed, terms.token, group)


def _named(ranks: list[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "some rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
