"""A file of what rank 0 saw of each operation, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import threading
import time
from typing import IO, Any

from fanin.horovod.requests import Key


class Timeline:
    """Writes while it is open: for each operation how long ranks were waited for, and the rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._cycles = False
        self._names: dict[str, int] = {}

    def start(self, path: str, mark_cycles: bool) -> None:
        """Open a file, in place of one that is open."""
        self.stop()
        with self._lock:
            # It stays open while it is written.
            self._file = open(path, "w")  # noqa: SIM115
            self._cycles = mark_cycles
            self._names = {}
            began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._write({"name": "start", "ph": "M", "pid": 0, "args": began}, first=True)

    def stop(self) -> None:
        """Close the file, if one is open."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def add(self, key: Key, asked: float, began: float) -> None:
        """Write an operation that ends now; `asked` is when the first rank asked for it."""
        if self._file is None:
            return
        ended = time.monotonic()
        _, kind, name = key
        with self._lock:
            if self._file is None:
                return
            row = self._row(f"{kind.value}.{name}")
            self._span(f"NEGOTIATE_{kind.name}", row, asked, began)
            self._span(kind.name, row, began, ended)

    def cycle(self) -> None:
        """Mark that rank 0 decides."""
        if self._file is None or not self._cycles:
            return
        with self._lock:
            if self._file is not None:
                now = _micros(time.monotonic())
                self._write({"name": "CYCLE_START", "ph": "i", "ts": now, "pid": 0, "s": "g"})

    def _row(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = len(self._names) + 1
            row = self._names[name]
            of_row = {"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}}
            self._write(of_row)
        return self._names[name]

    def _span(self, name: str, row: int, began: float, ended: float) -> None:
        times = {"ts": _micros(began), "dur": _micros(ended - began)}
        self._write({"name": name, "ph": "X", "pid": row, "tid": 0, **times})

    def _write(self, event: dict[str, Any], *, first: bool = False) -> None:
        assert self._file is not None
        self._file.write("[\n" if first else ",\n")
        json.dump(event, self._file)
        self._file.flush()


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)
