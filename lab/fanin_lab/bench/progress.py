"""A progress bar on a terminal: rich's where it is installed, else one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[str], None]
_WIDTH = 30


@contextlib.contextmanager
def progress(rounds: int) -> Iterator[Advance]:
    """Yield a function to be called before each round, with what comes next."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        import rich.console
        import rich.progress
    except ImportError:
        with _plain(rounds) as advance:
            yield advance
        return
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=rounds)
        done = -1

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=what)

        yield advance


@contextlib.contextmanager
def _plain(rounds: int) -> Iterator[Advance]:
    done = -1

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        filled = _WIDTH * done // max(1, rounds)
        bar = "#" * filled + "." * (_WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K[{bar}] {done}/{rounds} {what}")
        sys.stderr.flush()

    try:
        yield advance
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
