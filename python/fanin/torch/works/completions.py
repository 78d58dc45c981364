"""The threads that take what the network has done, and complete futures.

Callbacks run on the completing thread, and a callback may wait for another all-reduce (PowerSGD's
does). So completions are taken by leader and followers: a thread that takes one while no other
waits for the next first starts another thread. Never fewer than one waits, and callbacks may nest
without bound.

Completions are taken as they come. The futures are completed in the order of the submissions, one
at a time (`turns`): a follower whose work is not the next one leaves it to the thread that
completes those before, and takes the next.
"""

from __future__ import annotations

import logging
import threading

from fanin import _fanin
from fanin.torch.works.work import Kept

# Threads beyond these leave once their callback is done.
IDLE_MAX = 2

log = logging.getLogger(__name__)


class Completions:
    """Hands finished all-reduces of one client to their works.

    Starts no thread before `ensure_running`.
    """

    def __init__(self, client: _fanin.Client) -> None:
        self._client = client
        # Re-entrant: the garbage collector may run in here, and close the channel that it finds.
        self._lock = threading.RLock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()

    def ensure_running(self) -> None:
        """Start the first thread: to be called before submitting with `notify`."""
        with self._lock:
            if not self._threads:
                self._start()

    def join(self, timeout: float) -> None:
        """Wait for the threads, once the client is closed: each still delivers what it holds."""
        with self._lock:
            threads = [
                thread for thread in self._threads if thread is not threading.current_thread()
            ]
        for thread in threads:
            thread.join(timeout)

    def _start(self) -> None:
        # Daemons: a callback that never returns must not keep the process. Threads that wait end
        # when the client is closed, at the latest at exit (see `channel`).
        thread = threading.Thread(target=self._run, name="fanin-completion", daemon=True)
        thread.start()
        # The starter counts the thread, because its lock keeps the thread from counting before. So
        # two completions do not start two followers. It counts only now, as a thread may not start.
        self._threads.add(thread)
        self._idle += 1

    def _run(self) -> None:
        try:
            while True:
                pending = self._client.next_completion()
                with self._lock:
                    self._idle -= 1
                if pending is None:
                    return
                try:
                    with self._lock:
                        if self._idle == 0:
                            self._start()
                except RuntimeError:  # this machine has no thread left; the next one may find one
                    log.exception("no further thread: callbacks that wait for others may hang")
                kept = pending.keep
                if isinstance(kept, Kept):
                    try:
                        kept.completed(pending)
                    except Exception:
                        log.exception("a completed all-reduce could not be delivered")
                del pending, kept
                with self._lock:
                    if self._idle >= IDLE_MAX:
                        return
                    self._idle += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
