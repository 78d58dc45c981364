"""Ranks that are told what to do, and heard, over pipes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from fanin_lab.bench import BenchError
from fanin_lab.bench.message import Failed

_T = TypeVar("_T")


class Crew:
    """All ranks of one job, each at the end of a pipe; ``end_of`` says how a dead rank ended."""

    def __init__(
        self, pipes: Sequence[Connection], timeout_s: float, end_of: Callable[[int], str]
    ) -> None:
        self._pipes = pipes
        self._timeout_s = timeout_s
        self._end_of = end_of

    def tell(self, what: object) -> None:
        """Tell all ranks."""
        for pipe in self._pipes:
            # OSError: it has ended, and its last words say why, to `hear`.
            with contextlib.suppress(OSError):
                pipe.send(what)

    def hear(self, kind: type[_T]) -> list[_T]:
        """Return what each rank says next, by rank.

        Raises `BenchError` if a rank fails, dies, or says nothing.
        """
        deadline = time.monotonic() + self._timeout_s
        heard: dict[int, _T] = {}
        while len(heard) < len(self._pipes):
            silent = {p: i for i, p in enumerate(self._pipes) if i not in heard}
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, sorted(silent.values())))
                raise BenchError(f"ranks {ranks} were silent for {self._timeout_s:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = silent[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    raise BenchError(f"rank {rank} died, {self._end_of(rank)}") from None
                if isinstance(said, Failed):
                    raise BenchError(f"rank {rank} failed:\n{said.text}")
                assert isinstance(said, kind), said
                heard[rank] = said
        return [heard[rank] for rank in range(len(self._pipes))]
