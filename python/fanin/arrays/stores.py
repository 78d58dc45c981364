"""Stores of key and value where ranks meet: torch's, or any mapping that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

from fanin._handshake import Store
from fanin.errors import FaninError

Shared: TypeAlias = Store | MutableMapping[str, Any]
"""A store of torch's, or a mapping of texts that all ranks see: `multiprocessing.Manager().dict()`,
a class around Redis or etcd."""


def store_of(shared: Shared) -> Store:
    """Return it as a store. Raises `TypeError` for what is none."""
    if isinstance(shared, MutableMapping):
        return _OfMapping(shared)
    wanted = ("set", "get", "multi_get", "check")
    if all(callable(getattr(shared, name, None)) for name in wanted):
        return shared
    if all(hasattr(shared, name) for name in ("__getitem__", "__setitem__", "__contains__")):
        return _OfMapping(cast("MutableMapping[str, Any]", shared))
    raise TypeError(
        f"the rendezvous is a {type(shared).__name__}: give HOST:PORT, a mapping that all ranks "
        "share, or a store of torch's"
    )


class Below:
    """The part of a store whose keys begin with a prefix.

    What the store raises comes as a `FaninError`.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix
        self._store = store

    def set(self, key: str, value: str, /) -> None:
        """See `Store`."""
        with _telling():
            self._store.set(self._prefix + key, value)

    def get(self, key: str, /) -> bytes:
        """See `Store`."""
        with _telling():
            return self._store.get(self._prefix + key)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """See `Store`."""
        with _telling():
            return self._store.multi_get([self._prefix + key for key in keys])

    def check(self, keys: Sequence[str], /) -> bool:
        """See `Store`."""
        with _telling():
            return self._store.check([self._prefix + key for key in keys])


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except FaninError:
        raise
    except Exception as error:
        raise FaninError(
            f"the store where the ranks meet is gone, or fails: {type(error).__name__}: {error}"
        ) from error


class _OfMapping:
    def __init__(self, mapping: MutableMapping[str, Any]) -> None:
        self._mapping = mapping

    def set(self, key: str, value: str, /) -> None:
        self._mapping[key] = value

    def get(self, key: str, /) -> bytes:
        value = self._mapping[key]
        return value.encode() if isinstance(value, str) else bytes(value)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str], /) -> bool:
        return all(key in self._mapping for key in keys)
