"""What ends the joining of one rank is told to all of them, through the store where they meet."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fanin import _handshake, errors
from fanin.errors import FaninError, RankLeft, RankLost

# The keys under which a rank says why it cannot join, and that it is through.
WRONG: Final = "wrong"
OVER: Final = "over"
# How long a rank that cannot join waits for the others to hear of it, in seconds.
PARTING: Final = 5.0


@dataclass(frozen=True)
class Failures:
    """What ends the joining of one rank ends that of all, by the same error: it is in their store.

    A rank that fails stays until all have read why, as its process may host the store.
    """

    store: _handshake.Store
    """A part of the ranks' store that no other attempt uses."""
    rank: int
    world_size: int
    gone: type[Exception] = FaninError
    """What is raised by a store that is gone."""

    def look(self, then: str = "") -> None:
        """Raise what another rank told, if one did; `then` is what it leads to."""
        if (told := self._told(then)) is not None:
            raise told

    def _told(self, then: str = "") -> FaninError | None:
        if not self.store.check([WRONG]):
            return None
        rank, kind, message, fields = json.loads(self.store.get(WRONG))
        if rank == self.rank:
            return None
        # All ranks may be told that they differ, or by name which rank cannot do something. A rank
        # may hear it from another one first, which is not to blame.
        is_of_all = kind == errors.SettingMismatch.__name__ or message.startswith("rank ")
        who = "" if is_of_all else f"rank {rank}: "
        told: FaninError = getattr(errors, kind)(f"{who}{message}{then}", **fields)
        return told

    def tell(self, error: BaseException) -> None:
        """Tell the others what ended this rank's joining, unless one of them did before."""
        with contextlib.suppress(self.gone):  # without the store nobody can be told
            if not self.store.check([WRONG]):
                self._tell(error)

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, FaninError):
            kind, message = type(error).__name__, str(error)
            fields = {name: value for name, value in vars(error).items() if name != "message"}
        else:
            kind, message, fields = "FaninError", f"{type(error).__name__}: {error}", {}
        self.store.set(WRONG, json.dumps([self.rank, kind, message, fields]))

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Tell the others what the block raises, and raise it once they have heard."""
        try:
            yield
        except BaseException as error:
            told: FaninError | None = None
            self.tell(error)
            with contextlib.suppress(self.gone):
                told = self._told()
                self._say_over()
                if isinstance(error, Exception):
                    self._await_others()
            if isinstance(error, RankLost | RankLeft) and told is not None:
                # A rank that said why it cannot join was missed before that was read.
                raise told from error
            raise
        with contextlib.suppress(self.gone):
            self._say_over()

    def _say_over(self) -> None:
        # Also a rank that has joined: nobody need wait for it.
        self.store.set(f"{OVER}/{self.rank}", "")

    def _await_others(self) -> None:
        deadline = time.monotonic() + PARTING
        keys = [f"{OVER}/{other}" for other in range(self.world_size)]
        while not self.store.check(keys) and time.monotonic() < deadline:
            # Between two looks: a store's own wait takes no other end.
            time.sleep(_handshake.PAUSE_MAX)


def tellable(error: Exception) -> Exception:
    """Return an error that other ranks can be told: its text, if it cannot travel itself."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
