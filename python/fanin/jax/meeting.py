"""The processes of a JAX program meet: in the store of `jax.distributed`, if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax

# jax has no public name for the store of its processes.
from jax._src.distributed import global_state

import fanin
from fanin._settings import Said
from fanin.arrays.connecting import Rendezvous
from fanin.arrays.group import Group


def connect(
    switch: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: Rendezvous | None = None,
    timeout: float = 300.0,
    **settings: Unpack[Said],
) -> Group:
    """As `fanin.connect`, of the processes of `jax.distributed.initialize` if that was called.

    They then have the ranks of `jax.process_index`, and meet in jax's own store. Keep the group
    until the results of all programs are there: a group that nobody holds leaves.
    """
    if rank is None and world_size is None and global_state.client is not None:
        rank, world_size = jax.process_index(), jax.process_count()
        if rendezvous is None and switch is None and world_size > 1:
            rendezvous = _Store(global_state.client)
    return fanin.connect(
        switch,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        timeout=timeout,
        **settings,
    )


class _Store:
    """The store of `jax.distributed`, as `fanin._handshake.Store` has it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str, /) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, /) -> bytes:
        return str(self._client.key_value_try_get(key)).encode()

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str], /) -> bool:
        return all(map(self._has, keys))

    def _has(self, key: str) -> bool:
        try:
            self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise
        return True
