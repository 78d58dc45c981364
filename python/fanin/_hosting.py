"""The services that a process hosts for its groups' jobs: one at an address for all of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
import time
import weakref
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from fanin import _fanin
from fanin._services import bracketed

# How long a service stays for ranks that may still lack a result, in seconds.
LINGER: Final = 5.0
# A service shares its machine's cores with the training; a process has one in eight of them.
CORES_A_SHARD: Final = 8
SHARDS_MAX: Final = 8

_Of: TypeAlias = tuple[str, str | None]
"""The address at which a service listens, and its secret file."""

# A collected group gives its service back wherever the collector runs, also in `host`.
_lock = threading.RLock()
_hosted: dict[_Of, Hosted] = {}
# The services at which ranks meet, by HOST:PORT. They stay for the ranks of later jobs.
_meetings: dict[str, Hosted] = {}
# When all services end that are left at exit (`time.monotonic`): they are stopped in turn.
_exit_by: float | None = None


def _forget() -> None:
    """Leave the service to the parent, in a process that was forked, and a lock held there."""
    global _hosted, _lock, _meetings
    _hosted, _lock, _meetings = {}, threading.RLock(), {}


os.register_at_fork(after_in_child=_forget)


class Hosted:
    """A service of the process, as long as somebody uses it. Made by `host`."""

    def __init__(self, listen: str, of: _Of, shards: int) -> None:
        self.of = of
        self.switch = _fanin.Switch(listen, shards=shards, secret_file=of[1])
        self.address = self.switch.address
        self._users = 0
        # Also at exit: and made before whoever uses it, so that it ends after them.
        self._end = weakref.finalize(self, _end, os.getpid(), self.switch)

    def release(self) -> None:
        """Give it back. The last user ends it, once nobody needs it any more."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            if _hosted.get(self.of) is self:
                del _hosted[self.of]
        if threading.main_thread().is_alive():
            # In the background, as others may take their time.
            threading.Thread(target=self._end, name="fanin-linger").start()
        else:
            self._end()  # at exit nobody would wait for a thread


def host(address: str, secret_file: str | None = None) -> Hosted:
    """Return this process's service, which listens on `address`; `release` it afterwards.

    It serves those alone who know the secret in `secret_file`, if one is given. Raises `OSError`
    when it cannot listen there, and `fanin.errors.FaninError` for a file without a secret.
    """
    of = address, secret_file
    with _lock:
        hosted = _hosted.get(of)
        if hosted is None:
            shards = min(max((os.cpu_count() or 1) // CORES_A_SHARD, 1), SHARDS_MAX)
            hosted = _hosted[of] = Hosted(f"{bracketed(address)}:0", of, shards)
        hosted._users += 1
        return hosted


def listening(address: str, secret_file: str | None = None) -> None:
    """Have ranks meet at HOST:PORT as long as this process lives. Raises as `host`."""
    of = address, secret_file
    with _lock:
        kept = _meetings.get(address)
        if kept is not None and kept.of != of:
            raise OSError(f"this process listens there already, by {kept.of[1] or 'no secret'}")
        if kept is None:
            _meetings[address] = Hosted(_everywhere(address), of, 1)


def _everywhere(address: str) -> str:
    """Return where to listen so that all who know HOST:PORT find it.

    A name may mean the loopback interface on its own machine, and another address elsewhere.
    """
    parts = urlsplit(f"//{address}")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(parts.hostname or "")
        return address
    return f"0.0.0.0:{parts.port}"


def _end(owner: int, switch: _fanin.Switch) -> None:
    if os.getpid() == owner:  # a forked child has none of its threads
        switch.stop(_patience())


def _patience() -> float:
    """Return how long a service may stay now, in seconds."""
    global _exit_by
    if threading.main_thread().is_alive():
        return LINGER
    if _exit_by is None:
        _exit_by = time.monotonic() + LINGER
    return max(_exit_by - time.monotonic(), 0.0)
