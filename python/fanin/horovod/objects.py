"""Objects that `pickle` takes to all ranks, whatever framework the job is of."""

from __future__ import annotations

import pickle
import struct
from typing import Any, Final

from fanin.horovod.errors import Disagreement
from fanin.horovod.process_sets import ProcessSet, global_process_set, set_ranks
from fanin.horovod.requests import Kind
from fanin.horovod.submission import first, submit
from fanin.horovod.world import rank, world

# The bytes of an object, and whether they are those of a text that says why it has none.
_HEAD: Final = struct.Struct("!Q?")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object, which must be one that `pickle` takes.

    Raises `HorovodInternalError` on all ranks if `pickle` does not take it.
    """
    words, fails = _pickled(obj) if rank() == root_rank else (b"", None)
    head = _HEAD.pack(len(words), fails is not None)
    length, failed = _HEAD.unpack(
        _broadcast(head, root_rank, name and f"{name}.length", process_set)
    )
    if rank() != root_rank:
        words = bytes(length)
    words = _broadcast(words, root_rank, name and f"{name}.bytes", process_set)
    if failed:
        raise Disagreement(f"rank {root_rank}'s object {pickle.loads(words)}") from fails
    return obj if rank() == root_rank else pickle.loads(words)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the ranks' order.

    Raises `HorovodInternalError` on all ranks if `pickle` does not take the object of one.
    """
    words, fails = _pickled(obj)
    of_words = world().engine.executor.of_words
    to_words = world().engine.executor.to_words
    handles = [
        submit(Kind.ALLGATHER, [of_words(said)], name and f"{name}.{what}", process_set, first)
        for what, said in (("length", _HEAD.pack(len(words), fails is not None)), ("bytes", words))
    ]
    heads, gathered = (to_words(handle.wait()) for handle in handles)
    ranks = set_ranks(process_set)
    assert len(heads) == _HEAD.size * len(ranks)
    objects = []
    begin = 0
    for each, (length, failed) in zip(ranks, _HEAD.iter_unpack(heads), strict=True):
        said = pickle.loads(gathered[begin : begin + length])
        begin += length
        if failed:
            raise Disagreement(f"rank {each}'s object {said}") from fails
        objects.append(said)
    return objects


def _broadcast(words: bytes, root_rank: int, name: str | None, process_set: ProcessSet) -> bytes:
    executor = world().engine.executor
    given = [executor.of_words(words)]
    handle = submit(Kind.BROADCAST, given, name, process_set, first, root=root_rank)
    return executor.to_words(handle.wait())


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return an object's bytes; those of a text, and the error, if it has none."""
    try:
        return pickle.dumps(obj), None
    except Exception as error:
        return pickle.dumps(f"cannot be pickled: {type(error).__name__}: {error}"), error
