"""A bulk transfer over TCP from `w0` to `w1`, and one back: traffic that must not starve.

``python -m fanin_lab.bench.bulk send ADDRESS FILE`` and ``.. sink ADDRESS FILE`` are its two ends.
The file is shared memory, a word for each of `_ALLOWED`, `_SENDING`, `_SENT` and `_ARRIVED`.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fanin_lab.bench import BenchError
from fanin_lab.bench.processes import end_with_parent, ended
from fanin_lab.netlab import Netlab, address

PORT = 4898
WAYS = (("w0", "w1"), ("w1", "w0"))
_BUFFER_BYTES = 1 << 18
_ALLOWED, _SENDING, _SENT, _ARRIVED = range(4)
"""May it send, does it send, the bytes that it sends, and the bytes that have arrived."""
_FILE_BYTES = 4 * 8
_WARM_BYTES = 1 << 20
"""A flow that has brought so much is out of TCP's slow start."""
_ALONE_S = 0.5
_DEADLINE_S = 30.0


class Flow:
    """One direction."""

    def __init__(self, file: Path) -> None:
        self._words = _mapped(file)

    def allow(self, on: bool) -> None:
        """Have the sender send, or pause."""
        self._words[_ALLOWED] = int(on)

    def arrived_bytes(self) -> int:
        """Return how many bytes have arrived so far."""
        return self._words[_ARRIVED]

    def is_still(self) -> bool:
        """Whether the sender has paused, and all that it sent has arrived."""
        words = self._words
        return not words[_SENDING] and words[_SENT] == words[_ARRIVED]


class Bulk:
    """Both directions, which send only when they are told to."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows
        self._began = 0.0
        self._before: list[int] = []

    def start(self) -> None:
        """Let both send, and wait until both have gathered speed.

        Raises `BenchError`.
        """
        wanted = [flow.arrived_bytes() + _WARM_BYTES for flow in self._flows]
        deadline = time.monotonic() + _DEADLINE_S
        for flow in self._flows:
            flow.allow(True)
        while any(flow.arrived_bytes() < w for flow, w in zip(self._flows, wanted, strict=True)):
            # The counts are in shared memory, where nothing tells of a change.
            if time.monotonic() > deadline:
                raise BenchError(f"TCP between w0 and w1 brought nothing in {_DEADLINE_S:.0f} s")
            time.sleep(0.005)

    def mark(self) -> None:
        """Count from now on."""
        self._began = time.monotonic()
        self._before = [flow.arrived_bytes() for flow in self._flows]

    def stop(self) -> float:
        """Return the bits a second of the slower direction since `mark`, and stop both.

        Raises `BenchError`.
        """
        lasted_s = time.monotonic() - self._began
        slower = min(
            flow.arrived_bytes() - before
            for flow, before in zip(self._flows, self._before, strict=True)
        )
        for flow in self._flows:
            flow.allow(False)
        self._wait_still()
        return 8 * slower / lasted_s

    def alone_bps(self) -> float:
        """Return the bits a second of the slower direction while nothing else is sent.

        Raises `BenchError`.
        """
        self.start()
        self.mark()
        time.sleep(_ALONE_S)  # the time that is measured
        return self.stop()

    def _wait_still(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not all(flow.is_still() for flow in self._flows):
            # As above: a count in shared memory.
            if time.monotonic() > deadline:
                raise BenchError(f"TCP between w0 and w1 did not stop in {_DEADLINE_S:.0f} s")
            time.sleep(0.005)


@contextlib.contextmanager
def bulk(lab: Netlab, folder: Path) -> Iterator[Bulk]:
    """Start both ends of both directions; nothing is sent yet.

    Raises `BenchError`.
    """
    module = [sys.executable, "-m", "fanin_lab.bench.bulk"]
    keywords: dict[str, Any] = {"preexec_fn": end_with_parent}
    with contextlib.ExitStack() as stack:
        flows = []
        for sender, receiver in WAYS:
            file = folder / f"bulk-{sender}-{receiver}"
            file.write_bytes(bytes(_FILE_BYTES))
            sink = lab.popen(
                receiver,
                [*module, "sink", address(receiver), str(file)],
                stdout=subprocess.PIPE,
                **keywords,
            )
            stack.enter_context(ended(sink))
            assert sink.stdout is not None
            if not sink.stdout.readline():
                raise BenchError(f"TCP from {sender} found no port at {receiver}")
            send = [*module, "send", address(receiver), str(file)]
            stack.enter_context(ended(lab.popen(sender, send, **keywords)))
            flows.append(Flow(file))
        yield Bulk(flows)


def _mapped(file: Path) -> memoryview:
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), _FILE_BYTES)).cast("Q")


def _send(to: str, file: Path) -> None:
    words = _mapped(file)
    buffer = bytes(_BUFFER_BYTES)
    with socket.create_connection((to, PORT)) as connection:
        while True:
            # The parent reads that this pauses only once nothing more is counted.
            words[_SENDING] = words[_ALLOWED]
            if words[_SENDING]:
                words[_SENT] += len(buffer)
                connection.sendall(buffer)
            else:
                time.sleep(0.002)  # the word is in shared memory, and the other side waits for it


def _sink(here: str, file: Path) -> None:
    words = _mapped(file)
    buffer = bytearray(_BUFFER_BYTES)
    with socket.create_server((here, PORT)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            while count := connection.recv_into(buffer):
                words[_ARRIVED] += count


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["send", to, file]:
            _send(to, Path(file))
        case ["sink", here, file]:
            _sink(here, Path(file))
        case _:
            sys.exit(__doc__)
