"""A progress bar for work that grows while it is done: an experiment may ask for more runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """A display of how far the work is; any thread may tell it."""

    def expect(self, runs: int) -> None:
        """So many more runs will come."""

    def done(self, what: str) -> None:
        """One of them is over."""


class _Silent:
    def expect(self, runs: int) -> None:
        pass

    def done(self, what: str) -> None:
        pass


@contextmanager
def progress() -> Iterator[Progress]:
    """Yield a bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("starting", total=0)
    lock = threading.Lock()
    total = 0

    class Bar:
        def expect(self, runs: int) -> None:
            nonlocal total
            with lock:
                total += runs
                bar.update(task, total=total)

        def done(self, what: str) -> None:
            bar.update(task, advance=1, description=what)

    with bar:
        yield Bar()
