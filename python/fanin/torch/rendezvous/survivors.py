"""The survivors of a group of processes, agreed on in a store that outlives the lost ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Final

from torch._C._distributed_c10d import Store

SURVIVORS_SECONDS: Final = 10.0
"""How long the survivors of a failure wait for a process that no error has named as lost."""
_PAUSE: Final = 0.01
"""Between two looks at the store, which waits for all of several keys, and not for one of them."""


def announce(store: Store, ours: int, lost: Iterable[int]) -> None:
    """Say that this process is still there, and whom its errors name as lost.

    `store` is for one failure alone.
    """
    store.set(f"survives/{ours}", json.dumps(sorted(lost)))


def agree_on_survivors(store: Store, everyone: Sequence[int], seconds: float) -> list[int]:
    """Return who is left of `everyone`, in that order: the same on all who are in it.

    The first process that has heard of all whom nobody names as lost, or has waited `seconds`,
    decides. Who announces itself later is not in the list. Raises what the store raises.
    """
    end = time.monotonic() + seconds
    while not store.check(["survivors"]):
        here = [each for each in everyone if store.check([f"survives/{each}"])]
        lost = {rank for each in here for rank in json.loads(store.get(f"survives/{each}"))}
        if set(everyone) - lost <= set(here) or time.monotonic() > end:
            store.compare_set("survivors", "", ",".join(map(str, here)))
        else:
            time.sleep(_PAUSE)
    return [int(each) for each in store.get("survivors").decode().split(",")]
